"""Text goes on: prefill the prompt, then decode token by token with the cache."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from random import Random

import torch
from torch import Tensor

from qkv.config import SamplingConfig
from qkv.errors import InputError, WeightsError
from qkv.generation.decoder import Decoder, GPTDecoder
from qkv.generation.gpu import can_use_kernels, can_write_ahead, write_ahead
from qkv.generation.gpu_step import GPUStep
from qkv.generation.lean import lean_step
from qkv.generation.packing import Packing, packing_of
from qkv.generation.sampling import NextLogits, Said, choose, log_probabilities
from qkv.generation.text import Text, begin
from qkv.models import GPT

NO_STOPS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gave one row."""

    row: int
    id: int
    log_probability: float
    """Under the model itself, before temperature and filters."""
    text: Text
    place: int
    batch_logits: Tensor | None

    @property
    def logits(self) -> Tensor:
        """The model's own logits for this token, (1, vocabulary); to be read before the next step."""
        if self.batch_logits is None:
            raise InputError("these steps have no logits: they were asked for with with_logits=False")
        return self.batch_logits[self.place : self.place + 1]


def steps(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = NO_STOPS,
    packing: Packing | None = None,
    with_logits: bool = True,
) -> Iterator[Step]:
    """Each new token as it comes, row by row; a row whose `text.ended` the reader sets is left out from then on.

    Prompts have any lengths. Row i draws with seed + i, so what it says depends on its prompt and seed alone.
    `packing`: of `packing_of(model)`, kept from call to call; it takes as long as a few steps to make.
    `with_logits`: without them a GPU writes several tokens before the first is read.
    """
    texts = begin(prompts, max_new=max_new, context_length=model.config.context_length)
    # The last new token of a text is never read, so it needs no room.
    capacity = max(len(text.prompt) + text.limit.n_new - 1 for text in texts)
    packing = packing or packing_of(model)
    with ExitStack() as open_steps:
        with torch.inference_mode():
            lean, gpu = lean_step(model, packing, capacity=capacity), None
            if packing.gpu_steps is not None and can_use_kernels(model):
                gpu = open_steps.enter_context(packing.gpu_steps.taken(batch=len(texts), capacity=capacity))
            decoder = GPTDecoder(model, batch=len(texts), capacity=capacity, lean=lean, gpu=gpu)
            logits = decoder.prefill(prompts)
        if gpu is not None and not with_logits and can_write_ahead(sampling):
            yield from _written_ahead(gpu, logits, texts, sampling=sampling, stop_ids=stop_ids)
        else:
            yield from decode(decoder, logits, texts, sampling=sampling, stop_ids=stop_ids)


def _written_ahead(
    gpu: GPUStep, logits: NextLogits, texts: list[Text], *, sampling: SamplingConfig, stop_ids: frozenset[int]
) -> Iterator[Step]:
    chances = [Random(sampling.seed + row) for row in range(len(texts))]
    with torch.inference_mode():
        chance = torch.tensor([one.random() for one in chances], dtype=torch.float64, device=logits.device)
        chosen = choose(logits, sampling, said=None, chance=chance)
        first = chosen.tolist(), log_probabilities(logits, chosen).tolist()
    told = chain([first], write_ahead(gpu, chosen, texts, sampling=sampling, chances=chances))
    for ids, log_ps in told:
        for row, (text, number, log_p) in enumerate(zip(texts, ids, log_ps, strict=True)):
            if text.ended is None:
                yield _added(Step(row, number, log_p, text, row, None), stop_ids)


def decode(
    decoder: Decoder, logits: NextLogits, texts: list[Text], *, sampling: SamplingConfig, stop_ids: frozenset[int]
) -> Iterator[Step]:
    """`steps` for any decoder; `logits` are those after each prompt's last token."""
    chances = [Random(sampling.seed + row) for row in range(len(texts))]
    said = _said(texts, logits) if sampling.repetition_penalty != 1.0 else None
    rows = list(range(len(texts)))
    while rows:
        with torch.inference_mode():
            chance = None
            if sampling.temperature > 0:
                drawn = [chances[row].random() for row in rows]
                chance = torch.tensor(drawn, dtype=torch.float64, device=logits.device)
            chosen = choose(logits, sampling, said=said, chance=chance)
            of_chosen = log_probabilities(logits, chosen).tolist()
        for place, (row, number, log_p) in enumerate(zip(rows, chosen.tolist(), of_chosen, strict=True)):
            yield _added(Step(row, number, log_p, texts[row], place, logits), stop_ids)
        going = [place for place, row in enumerate(rows) if texts[row].ended is None]
        with torch.inference_mode():
            if len(going) < len(rows):
                rows = [rows[place] for place in going]
                if not rows:
                    return
                kept = torch.tensor(going, device=logits.device)
                decoder.select(kept, texts=kept)
                chosen, said = chosen[kept], None if said is None else said[kept]
            if said is not None:
                said = said.scatter(1, chosen[:, None], value=True)
            logits = decoder.step(chosen)


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = NO_STOPS,
    packing: Packing | None = None,
) -> list[Text]:
    """The finished texts, in the order of their prompts."""
    texts: dict[int, Text] = {}
    for step in steps(
        model, prompts, max_new=max_new, sampling=sampling, stop_ids=stop_ids, packing=packing, with_logits=False
    ):
        texts[step.row] = step.text
    return [texts[row] for row in range(len(prompts))]


def _added(step: Step, stop_ids: frozenset[int]) -> Step:
    if step.log_probability != step.log_probability:
        raise WeightsError(f"after {len(step.text.new)} new tokens the logits are no numbers (NaN)")
    step.text.add(step.id, step.log_probability, stop_ids)
    return step


def _said(texts: list[Text], logits: NextLogits) -> Said:
    said = torch.zeros_like(logits, dtype=torch.bool)
    for row, text in enumerate(texts):
        said[row, text.ids] = True
    return said
