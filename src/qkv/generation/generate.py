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
from qkv.generation.cpu_decode_engine import create_cpu_decode_engine
from qkv.generation.cuda_decode import can_sample_on_device, can_use_triton_kernels, decode_n_tokens
from qkv.generation.cuda_decode_step import CUDADecodeStep
from qkv.generation.decoder import Decoder, GPTDecoder
from qkv.generation.prepacked_weights import PrepackedWeights, prepack_weights
from qkv.generation.sampling import NextLogits, SeenMask, choose_next_ids, gather_log_probabilities
from qkv.generation.sequence import GeneratedSequence, new_sequences
from qkv.models import GPT

NO_STOPS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """What one step gave one row."""

    row: int
    id: int
    log_probability: float
    """Under the model itself, before temperature and filters."""
    text: GeneratedSequence
    place: int
    batch_logits: Tensor | None

    @property
    def logits(self) -> Tensor:
        """The model's own logits for this token, (1, vocabulary); to be read before the next step."""
        if self.batch_logits is None:
            raise InputError("these steps have no logits: they were asked for with with_logits=False")
        return self.batch_logits[self.place : self.place + 1]


def generate_steps(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = NO_STOPS,
    packing: PrepackedWeights | None = None,
    with_logits: bool = True,
) -> Iterator[GenerationStep]:
    """Each new token as it comes, row by row; a row whose `text.finish_reason` the reader sets is left out from then on.

    Prompts have any lengths. Row i draws with seed + i, so what it says depends on its prompt and seed alone.
    `packing`: of `prepack_weights(model)`, kept from call to call; it takes as long as a few steps to make.
    `with_logits`: without them a GPU writes several tokens before the first is read.
    """
    texts = new_sequences(prompts, max_new=max_new, context_length=model.config.context_length)
    # The last new token of a text is never read, so it needs no room.
    capacity = max(len(text.prompt) + text.limit.max_new_tokens - 1 for text in texts)
    packing = packing or prepack_weights(model)
    with ExitStack() as open_steps:
        with torch.inference_mode():
            lean, gpu = create_cpu_decode_engine(model, packing, capacity=capacity), None
            if packing.gpu_steps is not None and can_use_triton_kernels(model):
                gpu = open_steps.enter_context(packing.gpu_steps.taken(batch=len(texts), capacity=capacity))
            decoder = GPTDecoder(model, batch=len(texts), capacity=capacity, cpu_engine=lean, cuda_step=gpu)
            logits = decoder.prefill(prompts)
        if gpu is not None and not with_logits and can_sample_on_device(sampling):
            yield from _written_ahead(gpu, logits, texts, sampling=sampling, stop_ids=stop_ids)
        else:
            yield from decode_steps(decoder, logits, texts, sampling=sampling, stop_ids=stop_ids)


def _written_ahead(
    gpu: CUDADecodeStep,
    logits: NextLogits,
    texts: list[GeneratedSequence],
    *,
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
) -> Iterator[GenerationStep]:
    chances = [Random(sampling.seed + row) for row in range(len(texts))]
    with torch.inference_mode():
        chance = torch.tensor([one.random() for one in chances], dtype=torch.float64, device=logits.device)
        chosen = choose_next_ids(logits, sampling, seen_mask=None, uniform=chance)
        first = chosen.tolist(), gather_log_probabilities(logits, chosen).tolist()
    told = chain([first], decode_n_tokens(gpu, chosen, texts, sampling=sampling, chances=chances))
    for ids, log_ps in told:
        for row, (text, number, log_p) in enumerate(zip(texts, ids, log_ps, strict=True)):
            if text.finish_reason is None:
                yield _added(GenerationStep(row, number, log_p, text, row, None), stop_ids)


def decode_steps(
    decoder: Decoder,
    logits: NextLogits,
    texts: list[GeneratedSequence],
    *,
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
) -> Iterator[GenerationStep]:
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
            chosen = choose_next_ids(logits, sampling, seen_mask=said, uniform=chance)
            of_chosen = gather_log_probabilities(logits, chosen).tolist()
        for place, (row, number, log_p) in enumerate(zip(rows, chosen.tolist(), of_chosen, strict=True)):
            yield _added(GenerationStep(row, number, log_p, texts[row], place, logits), stop_ids)
        going = [place for place, row in enumerate(rows) if texts[row].finish_reason is None]
        with torch.inference_mode():
            if len(going) < len(rows):
                rows = [rows[place] for place in going]
                if not rows:
                    return
                kept = torch.tensor(going, device=logits.device)
                decoder.reorder(kept, sequences=kept)
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
    packing: PrepackedWeights | None = None,
) -> list[GeneratedSequence]:
    """The finished texts, in the order of their prompts."""
    texts: dict[int, GeneratedSequence] = {}
    for step in generate_steps(
        model, prompts, max_new=max_new, sampling=sampling, stop_ids=stop_ids, prepacked=packing, with_logits=False
    ):
        texts[step.row] = step.sequence
    return [texts[row] for row in range(len(prompts))]


def _added(step: GenerationStep, stop_ids: frozenset[int]) -> GenerationStep:
    if step.log_probability != step.log_probability:
        raise WeightsError(f"after {len(step.sequence.new_ids)} new tokens the logits are no numbers (NaN)")
    step.sequence.add(step.id, step.log_probability, stop_ids)
    return step


def _said(texts: list[GeneratedSequence], logits: NextLogits) -> SeenMask:
    said = torch.zeros_like(logits, dtype=torch.bool)
    for row, text in enumerate(texts):
        said[row, text.ids] = True
    return said
