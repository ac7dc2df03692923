"""NaN or infinity anywhere: no update, the step and the first bad tensor by name, the last checkpoint as it was."""

import re
from dataclasses import replace

import pytest

from qkv.errors import TrainingError
from qkv.training import open_run
from tests.faults.families import FAMILIES
from tests.training.runs import trainer_of

VALUES = (float("nan"), float("inf"), -float("inf"))
BAD_STEP = 3
BLOCKS = {"gpt": "blocks.1", "bert": "blocks.1", "seq2seq": "encoder.blocks.1", "rnn": "encoder"}


def in_weight(trainer, family, value):
    name, weight = next((n, p) for n, p in trainer.model.named_parameters() if n.startswith(BLOCKS[family]))
    weight.data.view(-1)[0] = value
    return f"weight {name}"


def in_output(trainer, family, value):
    def spoil(_part, _given, output):
        return (output[0] * value, *output[1:]) if isinstance(output, tuple) else output * value

    trainer.model.get_submodule(BLOCKS[family]).register_forward_hook(spoil)
    return "the output of "


def in_loss(trainer, _family, value):
    plain = trainer.objective

    def spoilt(batch):
        outcome = plain(batch)
        return replace(outcome, loss=outcome.loss * value)

    trainer.objective = spoilt
    return "the loss"


def in_gradient(trainer, _family, value):
    name, weight = list(trainer.model.named_parameters())[-1]
    weight.register_hook(lambda gradient: gradient.fill_(value))
    return f"the gradient of {name}"


def in_data(trainer, _family, value):
    """Ids are whole numbers: what is none among them is an id that the vocabulary has not."""
    plain = trainer._outcomes

    def spoilt(batch, step):
        ids = batch.ids.clone()
        ids[0, 0] = 10_000 if value > 0 else -7
        return plain(replace(batch, ids=ids), step)

    trainer._outcomes = spoilt
    return "outside the vocabulary"


PLACES = (in_weight, in_output, in_loss, in_gradient, in_data)


def stops_well(prepared, family, place, value) -> bool:
    """A weight that is already bad is refused before the first step; the rest is spoilt while it trains."""
    trainer = trainer_of(prepared)
    named: list[str] = []
    before = {}

    def spoil(entry):
        if entry["step"] == BAD_STEP and "loss" in entry:
            named.append(place(trainer, family, value))
            before.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    trainer.report = spoil
    try:
        trainer.train()
        return False
    except TrainingError as error:
        line = str(error)
    kept = trainer.run.checkpoint_steps()[-1]
    unchanged = all(p.nan_to_num().equal(before[name].nan_to_num()) for name, p in trainer.model.named_parameters())
    is_said = re.match(rf"step {BAD_STEP}: ", line) and named[0] in line
    is_safe = f"the checkpoint of step {kept} is intact" in line and trainer.run.latest_valid_checkpoint(pytest.fail)[0].step == kept
    return bool(unchanged and is_said and is_safe)


def sweep(unbroken, family, values, tmp_path, tally) -> None:
    for place in PLACES:
        for value in values:
            copy = open_run(unbroken.copy(tmp_path / f"{place.__name__}{value}"))
            # Saved after step 2 at the latest, and no evaluation that would meet it first.
            training = copy.recipe.training.replace(save_every=2, eval_every=5)
            copy = replace(copy, recipe=copy.recipe.replace(training=training))
            tally.add(f"{value} {place.__name__}", survived=stops_well(copy, family, place, value))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_stops_the_run_before_the_update(unbroken_of, tmp_path, family, tally):
    sweep(unbroken_of(family), family, VALUES[:1], tmp_path, tally)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_number_stops_the_run_before_the_update(unbroken_of, tmp_path, family, tally):
    sweep(unbroken_of(family), family, VALUES, tmp_path, tally)
