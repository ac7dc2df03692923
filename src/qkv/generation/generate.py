"""Generate text autoregressively: prefill the prompts, then run decode steps with the KV cache."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkv.config import SamplingConfig
from qkv.errors import InputError, WeightsError
from qkv.generation.decoder import Decoder, GPTDecoder
from qkv.generation.sampling import NextLogits, SeenMask, choose_next_ids, gather_log_probabilities
from qkv.generation.sequence import GeneratedSequence, new_sequences
from qkv.models import GPT

if TYPE_CHECKING:
    from qkv.accel.cpu.prepacked_weights import PrepackedWeights
    from qkv.accel.cuda.decode_step import CUDADecodeStep

NO_STOP_IDS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """A token generated for one row."""

    row: int
    id: int
    log_probability: float
    """Log-probability according to the model, before temperature and filters."""
    sequence: GeneratedSequence
    batch_index: int
    """Index of the row in `batch_logits`, which contains only unfinished rows."""
    batch_logits: Tensor | None

    @property
    def logits(self) -> Tensor:
        """Logits from which this token was chosen, with shape (1, vocab_size). Valid only until the next step."""
        if self.batch_logits is None:
            raise InputError("logits require with_logits=True, got with_logits=False")
        return self.batch_logits[self.batch_index : self.batch_index + 1]


def generate_tokens(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = NO_STOP_IDS,
    prepacked: "PrepackedWeights | None" = None,
    with_logits: bool = True,
) -> Iterator[GenerationStep]:
    """Generate tokens and yield each token as soon as it is available, row by row.

    The caller can stop a row by setting `step.sequence.finish_reason`. Prompts may have different lengths. Row i is
    sampled with the seed `sampling.seed + i`, so its output depends only on the prompt and the seed, not on the batch.

    `prepacked` is the result of `__import__('importlib').import_module('qkv.accel.cpu.prepacked_weights').prepack_weights(model)`. Pass it if you generate repeatedly because prepacking takes
    as long as a few decode steps. With `with_logits=False`, a GPU decodes several tokens before the host reads them.
    """
    sequences = new_sequences(prompts, max_new=max_new, context_length=model.config.context_length)
    # The last new token is never fed back to the model, so it needs no slot in the KV cache.
    capacity = max(len(sequence.prompt) + sequence.limit.max_new_tokens - 1 for sequence in sequences)
    prepacked = prepacked or __import__("importlib").import_module("qkv.accel.cpu.prepacked_weights").prepack_weights(
        model
    )
    with ExitStack() as stack:
        with torch.inference_mode():
            cpu_engine, cuda_step = (
                __import__("importlib")
                .import_module("qkv.accel.cpu.decode_engine")
                .create_cpu_decode_engine(model, prepacked, capacity=capacity),
                None,
            )
            if prepacked.cuda_steps is not None and __import__("importlib").import_module(
                "qkv.accel.cuda.decode_pool"
            ).can_use_triton_kernels(model):
                cuda_step = stack.enter_context(prepacked.cuda_steps.acquire(batch=len(sequences), capacity=capacity))
            decoder = GPTDecoder(
                model, batch=len(sequences), capacity=capacity, cpu_engine=cpu_engine, cuda_step=cuda_step
            )
            logits = decoder.prefill(prompts)
        if (
            cuda_step is not None
            and not with_logits
            and __import__("importlib").import_module("qkv.accel.cuda.decode_pool").can_sample_on_device(sampling)
        ):
            yield from _decode_on_device(cuda_step, logits, sequences, sampling=sampling, stop_ids=stop_ids)
        else:
            yield from decode_steps(decoder, logits, sequences, sampling=sampling, stop_ids=stop_ids)


def _decode_on_device(
    cuda_step: "CUDADecodeStep",
    logits: NextLogits,
    sequences: list[GeneratedSequence],
    *,
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
) -> Iterator[GenerationStep]:
    """Decode with CUDA graphs that also choose the next token, so the host only reads the results."""
    generators = [Random(sampling.seed + row) for row in range(len(sequences))]
    with torch.inference_mode():
        uniform = [generator.random() for generator in generators]
        uniform = torch.tensor(uniform, dtype=torch.float64, device=logits.device)
        chosen = choose_next_ids(logits, sampling, seen_mask=None, uniform=uniform)
        first = chosen.tolist(), gather_log_probabilities(logits, chosen).tolist()
    outputs = chain(
        [first],
        __import__("importlib")
        .import_module("qkv.accel.cuda.decode_pool")
        .decode_until_all_finished(cuda_step, chosen, sequences, sampling=sampling, generators=generators),
    )
    for ids, log_ps in outputs:
        for row, (sequence, token_id, log_p) in enumerate(zip(sequences, ids, log_ps, strict=True)):
            if sequence.finish_reason is None:
                yield _check_nan_and_append(GenerationStep(row, token_id, log_p, sequence, row, None), stop_ids)


def decode_steps(
    decoder: Decoder,
    logits: NextLogits,
    sequences: list[GeneratedSequence],
    *,
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
) -> Iterator[GenerationStep]:
    """Generate tokens as in `generate_tokens`, but with any decoder.

    `logits` contains the logits after the last token of each prompt.
    """
    generators = [Random(sampling.seed + row) for row in range(len(sequences))]
    seen_mask = _initial_seen_mask(sequences, logits) if sampling.repetition_penalty != 1.0 else None
    rows = list(range(len(sequences)))
    while rows:
        with torch.inference_mode():
            uniform = None
            if sampling.temperature > 0:
                samples = [generators[row].random() for row in rows]
                uniform = torch.tensor(samples, dtype=torch.float64, device=logits.device)
            chosen = choose_next_ids(logits, sampling, seen_mask=seen_mask, uniform=uniform)
            log_ps = gather_log_probabilities(logits, chosen).tolist()
        for index, (row, token_id, log_p) in enumerate(zip(rows, chosen.tolist(), log_ps, strict=True)):
            yield _check_nan_and_append(GenerationStep(row, token_id, log_p, sequences[row], index, logits), stop_ids)
        unfinished = [index for index, row in enumerate(rows) if sequences[row].finish_reason is None]
        with torch.inference_mode():
            if len(unfinished) < len(rows):
                rows = [rows[index] for index in unfinished]
                if not rows:
                    return
                indices = torch.tensor(unfinished, device=logits.device)
                decoder.reorder(indices, sequences=indices)
                chosen, seen_mask = chosen[indices], None if seen_mask is None else seen_mask[indices]
            if seen_mask is not None:
                seen_mask = seen_mask.scatter(1, chosen[:, None], value=True)
            logits = decoder.step(chosen)


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = NO_STOP_IDS,
    prepacked: "PrepackedWeights | None" = None,
) -> list[GeneratedSequence]:
    """Generate a continuation of each prompt and return the finished sequences in the order of the prompts."""
    sequences: dict[int, GeneratedSequence] = {}
    for step in generate_tokens(
        model, prompts, max_new=max_new, sampling=sampling, stop_ids=stop_ids, prepacked=prepacked, with_logits=False
    ):
        sequences[step.row] = step.sequence
    return [sequences[row] for row in range(len(prompts))]


def _check_nan_and_append(step: GenerationStep, stop_ids: frozenset[int]) -> GenerationStep:
    if step.log_probability != step.log_probability:  # NaN
        raise WeightsError(f"logits became NaN after generating {len(step.sequence.new_ids)} tokens")
    step.sequence.append_token(step.id, step.log_probability, stop_ids)
    return step


def _initial_seen_mask(sequences: list[GeneratedSequence], logits: NextLogits) -> SeenMask:
    seen_mask = torch.zeros_like(logits, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        seen_mask[row, sequence.ids] = True
    return seen_mask
