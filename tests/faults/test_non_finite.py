"""NaN or infinity anywhere stops the run before the update, with the step and the first non-finite tensor."""

import re
from dataclasses import replace

import pytest

from qkv.errors import TrainingError
from qkv.training import open_run
from tests.faults.families import FAMILIES
from tests.training.runs import build_cpu_trainer

VALUES = (float("nan"), float("inf"), -float("inf"))
BAD_STEP = 3
BLOCKS = {"gpt": "blocks.1", "bert": "blocks.1", "seq2seq": "encoder.blocks.1", "rnn": "encoder"}


def in_weight(trainer, family, value):
    name, weight = next((n, p) for n, p in trainer.model.named_parameters() if n.startswith(BLOCKS[family]))
    weight.data.view(-1)[0] = value
    return name


def in_output(trainer, family, value):
    def inject(_module, _inputs, output):
        return (output[0] * value, *output[1:]) if isinstance(output, tuple) else output * value

    trainer.model.get_submodule(BLOCKS[family]).register_forward_hook(inject)
    return BLOCKS[family]


def in_loss(trainer, _family, value):
    original = trainer.train_step.objective

    def faulty_objective(batch):
        output = original(batch)
        return replace(output, loss=output.loss * value)

    trainer.train_step.objective = faulty_objective
    return "loss"


def in_gradient(trainer, _family, value):
    name, weight = list(trainer.model.named_parameters())[-1]
    weight.register_hook(lambda gradient: gradient.fill_(value))
    return name


def in_data(trainer, _family, value):
    """Ids are integers, so the equivalent fault is an id outside the vocabulary."""
    original = trainer.train_step.micro_batch_losses

    def losses_of_invalid_ids(batch, step):
        ids = batch.ids.clone()
        ids[0, 0] = 10_000 if value > 0 else -7
        return original(replace(batch, ids=ids), step)

    trainer.train_step.micro_batch_losses = losses_of_invalid_ids
    return "10000" if value > 0 else "-7"


FAULTS = (in_weight, in_output, in_loss, in_gradient, in_data)


def stops_before_update(prepared, family, inject_fault, value) -> bool:
    """Inject a fault at BAD_STEP. Returns True if the run stops with the right message and keeps its state."""
    trainer = build_cpu_trainer(prepared)
    expected_names: list[str] = []
    before = {}

    def inject_at_bad_step(entry):
        if entry["step"] == BAD_STEP and "loss" in entry:
            expected_names.append(inject_fault(trainer, family, value))
            before.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    trainer.report = inject_at_bad_step
    try:
        trainer.train()
        return False
    except TrainingError as error:
        message = str(error)
    last_step = trainer.run.checkpoint_steps()[-1]
    unchanged = all(p.nan_to_num().equal(before[name].nan_to_num()) for name, p in trainer.model.named_parameters())
    names_culprit = re.match(rf"step {BAD_STEP}: ", message) and expected_names[0] in message
    keeps_checkpoint = (
        f" step {last_step} " in message and trainer.run.latest_valid_checkpoint(pytest.fail)[0].step == last_step
    )
    return bool(unchanged and names_culprit and keeps_checkpoint)


def sweep(uninterrupted, family, values, tmp_path, tally) -> None:
    for inject_fault in FAULTS:
        for value in values:
            copy = open_run(uninterrupted.copy(tmp_path / f"{inject_fault.__name__}{value}"))
            # A checkpoint at step 2, and no evaluation that would fail first.
            training = copy.recipe.training.replace(save_every=2, eval_every=5)
            copy = replace(copy, recipe=copy.recipe.replace(training=training))
            tally.add(
                f"{value} {inject_fault.__name__}", survived=stops_before_update(copy, family, inject_fault, value)
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_stops_the_run_before_the_update(unbroken_run_of, tmp_path, family, tally):
    sweep(unbroken_run_of(family), family, VALUES[:1], tmp_path, tally)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_non_finite_values_stop_the_run_before_the_update(unbroken_run_of, tmp_path, family, tally):
    sweep(unbroken_run_of(family), family, VALUES, tmp_path, tally)
