"""Generate text autoregressively: prefill the prompts, then run decode steps with the KV cache."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from qkv.config import SamplingConfig
from qkv.errors import InputError, WeightsError
from qkv.generation.decode_engine import DecodeEngine, EngineFactory, SamplingEngine, eager_engine
from qkv.generation.sampling import NextLogits, SeenMask, choose_next_ids, gather_log_probabilities, process_logits
from qkv.generation.sequence import GeneratedSequence, new_sequences
from qkv.models import GPT

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
    create_engine: EngineFactory = eager_engine,
    with_logits: bool = True,
) -> Iterator[GenerationStep]:
    """Generate tokens and yield each token as soon as it is available, row by row.

    The caller can stop a row by setting `step.sequence.finish_reason`. Prompts may have different lengths. Row i is
    sampled with the seed `sampling.seed + i`, so its output depends only on the prompt and the seed, not on the batch.

    `create_engine` selects the implementation of the model (default: eager). With `with_logits=False`, an engine that
    samples on its device generates several tokens before the host reads them.
    """
    sequences = new_sequences(prompts, max_new=max_new, context_length=model.config.context_length)
    # The last new token is never fed back to the model, so it needs no slot in the KV cache.
    capacity = max(len(sequence.prompt) + sequence.limit.max_new_tokens - 1 for sequence in sequences)
    with torch.inference_mode():
        engine = create_engine(model, batch=len(sequences), capacity=capacity)
    with closing(engine):
        with torch.inference_mode():
            logits = engine.prefill(prompts)
        yield from continue_sequences(
            engine, logits, sequences, sampling=sampling, stop_ids=stop_ids, with_logits=with_logits
        )


def continue_sequences(
    engine: DecodeEngine,
    logits: NextLogits,
    sequences: list[GeneratedSequence],
    *,
    sampling: SamplingConfig,
    stop_ids: frozenset[int] = NO_STOP_IDS,
    with_logits: bool = False,
) -> Iterator[GenerationStep]:
    """Generate tokens with an engine that has read the prompts, on its device if it can sample there."""
    if not with_logits and isinstance(engine, SamplingEngine) and engine.can_sample(sampling):
        return _sample_on_device(engine, logits, sequences, sampling=sampling, stop_ids=stop_ids)
    return decode_steps(engine, logits, sequences, sampling=sampling, stop_ids=stop_ids)


def _sample_on_device(
    engine: SamplingEngine,
    logits: NextLogits,
    sequences: list[GeneratedSequence],
    *,
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
) -> Iterator[GenerationStep]:
    """Generate tokens with an engine that also chooses them, so the host only reads the results."""
    generators = [Random(sampling.seed + row) for row in range(len(sequences))]
    with torch.inference_mode():
        chosen = choose_next_ids(logits, sampling, seen_mask=None, uniform=_draw_uniform(generators, 1, logits)[0])
        first = chosen.tolist(), gather_log_probabilities(logits, chosen).tolist()
        engine.set_next_ids(chosen)

    def read_all_rows() -> Iterator[tuple[list[int], list[float]]]:
        """Yield the ids and log-probabilities of all rows for each step until all sequences are finished."""
        yield first
        while unfinished := [sequence for sequence in sequences if sequence.finish_reason is None]:
            n_left = max(sequence.limit.max_new_tokens - len(sequence.new_ids) for sequence in unfinished)
            n = min(engine.tokens_per_sync, n_left)
            with torch.inference_mode():
                uniform = _draw_uniform(generators, n, logits) if sampling.temperature > 0 else None
                outputs = engine.sample_tokens(n, sampling, uniform)
            yield from zip(*outputs, strict=True)

    # Finished rows continue to decode, because the engine has a fixed number of rows. Their tokens are discarded.
    for ids, log_ps in read_all_rows():
        for row, (sequence, token_id, log_p) in enumerate(zip(sequences, ids, log_ps, strict=True)):
            if sequence.finish_reason is None:
                yield _check_nan_and_append(GenerationStep(row, token_id, log_p, sequence, row, None), stop_ids)


def _draw_uniform(generators: Sequence[Random], n: int, logits: NextLogits) -> Tensor:
    """Draw `n` random numbers per row, each row from its own generator."""
    uniform = [[generator.random() for generator in generators] for _ in range(n)]
    return torch.tensor(uniform, dtype=torch.float64, device=logits.device)


def decode_steps(
    engine: DecodeEngine,
    logits: NextLogits,
    sequences: list[GeneratedSequence],
    *,
    sampling: SamplingConfig,
    stop_ids: frozenset[int],
) -> Iterator[GenerationStep]:
    """Generate tokens as in `generate_tokens`, but with an engine that has read the prompts.

    `logits` contains the logits after the last token of each prompt.
    """
    generators = [Random(sampling.seed + row) for row in range(len(sequences))]
    seen_mask = _initial_seen_mask(sequences, logits) if sampling.repetition_penalty != 1.0 else None
    rows = list(range(len(sequences)))
    while rows:
        with torch.inference_mode():
            running = [generators[row] for row in rows]
            uniform = _draw_uniform(running, 1, logits)[0] if sampling.temperature > 0 else None
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
                engine.reorder(indices, sequences=indices)
                chosen, seen_mask = chosen[indices], None if seen_mask is None else seen_mask[indices]
            if seen_mask is not None:
                seen_mask = seen_mask.scatter(1, chosen[:, None], value=True)
            logits = engine.decode(chosen)


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    stop_ids: frozenset[int] = NO_STOP_IDS,
    create_engine: EngineFactory = eager_engine,
) -> list[GeneratedSequence]:
    """Generate a continuation of each prompt and return the finished sequences in the order of the prompts."""
    sequences: dict[int, GeneratedSequence] = {}
    for step in generate_tokens(
        model,
        prompts,
        max_new=max_new,
        sampling=sampling,
        stop_ids=stop_ids,
        create_engine=create_engine,
        with_logits=False,
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


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A token that could have been generated at a step."""

    id: int
    probability: float
    """Probability according to the model."""
    revised: float
    """Probability after repetition penalty, temperature and filters, or 0 if the token was filtered out."""
    is_chosen: bool


@torch.inference_mode()
def top_raw_and_processed_candidates(step: GenerationStep, sampling: SamplingConfig, *, n: int = 5) -> list[Candidate]:
    """Return the chosen token and the `n` most probable tokens before and after applying the sampling settings.

    Candidates are sorted by their probability according to the model, highest first.
    """
    seen_mask = torch.zeros_like(step.logits, dtype=torch.bool)
    seen_mask[0, [*step.sequence.prompt, *step.sequence.new_ids[:-1]]] = True
    before = step.logits.float().softmax(-1)[0]
    after = process_logits(step.logits, sampling, seen_mask).softmax(-1)[0]
    n = min(n, len(before))
    best_after = [i for i in after.topk(n).indices.tolist() if after[i] > 0]
    token_ids = {*before.topk(n).indices.tolist(), *best_after, step.id}
    candidates = [
        Candidate(id=i, probability=float(before[i]), revised=float(after[i]), is_chosen=i == step.id)
        for i in token_ids
    ]
    return sorted(candidates, key=lambda candidate: (-candidate.probability, candidate.id))
