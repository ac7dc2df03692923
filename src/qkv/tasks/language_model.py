"""Generate text and score documents with a GPT model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from qkv.choices import BackendName, SpecialToken
from qkv.config import BeamConfig, SamplingConfig
from qkv.engines import decode_engine
from qkv.errors import InputError
from qkv.generation import (
    FinishReason,
    GeneratedSequence,
    GenerationStep,
    Hypothesis,
    StopStringFilter,
    beam_generate,
    generate_tokens,
)
from qkv.models import GPT
from qkv.tasks.description import task_repr_prefix
from qkv.tasks.log_likelihood import document_nll_sums
from qkv.text import StreamingDecoder, Tokenizer

if TYPE_CHECKING:
    from qkv.training.loop import EvaluationResult

PROMPTS_PER_BATCH = 32
"""The number of prompts per batch. Larger batches need more memory without being faster."""
DEFAULT_SAMPLING = SamplingConfig()


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The text generated after a prompt."""

    text: str
    ids: list[int]
    """All generated ids, including those of an end token or stop string, which `text` omits."""
    log_probabilities: list[float]
    finish_reason: FinishReason
    score: float | None = None
    """The beam search score, or `None` if beam search was not used."""


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """A token generated for one prompt, and the characters that it completes, if any."""

    row: int
    text: str
    step: GenerationStep


class LanguageModel:
    """A GPT model with its tokenizer.

    `generate` continues a prompt, and `score` computes the negative log-likelihood of a document.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        name: str = "",
        remarks: tuple[str, ...] = (),
        backend: str = BackendName.AUTO,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.remarks = remarks
        """Notes for the user."""
        self.backend = backend
        """The backend that generates tokens."""

    def __repr__(self) -> str:
        return task_repr_prefix("LanguageModel", self.model, self.name) + ")"

    def generate(
        self,
        prompt: str,
        *,
        max_new: int = 200,
        stop: Sequence[str] = (),
        **sampling: Any,  # noqa: ANN401
    ) -> str:
        """Generate text that continues a prompt.

        Additional keyword arguments are fields of `SamplingConfig` (temperature, top_k, seed, …).
        """
        return self.generate_batch([prompt], max_new=max_new, stop=stop, sampling=SamplingConfig(**sampling))[0].text

    def generate_batch(
        self,
        prompts: Sequence[str],
        *,
        max_new: int = 200,
        stop: Sequence[str] = (),
        sampling: SamplingConfig = DEFAULT_SAMPLING,
    ) -> list[Continuation]:
        """Generate text that continues several prompts, in batches.

        Batching does not affect the results because prompt i always uses the seed `sampling.seed + i`.
        """
        continuations: list[Continuation] = []
        for start in range(0, len(prompts), PROMPTS_PER_BATCH):
            batch_sampling = sampling.replace(seed=sampling.seed + start)
            batch_prompts = prompts[start : start + PROMPTS_PER_BATCH]
            texts, sequences = [""] * len(batch_prompts), dict[int, GeneratedSequence]()
            for token in self.stream_batch(
                batch_prompts, max_new=max_new, stop=stop, sampling=batch_sampling, with_logits=False
            ):
                texts[token.row] += token.text
                sequences[token.row] = token.step.sequence
            continuations += [_to_continuation(sequences[row], texts[row]) for row in range(len(batch_prompts))]
        return continuations

    def stream(
        self, prompt: str, *, max_new: int = 200, stop: Sequence[str] = (), sampling: SamplingConfig = DEFAULT_SAMPLING
    ) -> Iterator[str]:
        """Generate text that continues a prompt, and yield it in parts. Multi-byte characters are never split."""
        for token in self.stream_batch([prompt], max_new=max_new, stop=stop, sampling=sampling, with_logits=False):
            if token.text:
                yield token.text

    def stream_batch(
        self,
        prompts: Sequence[str],
        *,
        max_new: int = 200,
        stop: Sequence[str] = (),
        sampling: SamplingConfig = DEFAULT_SAMPLING,
        with_logits: bool = True,
    ) -> Iterator[StreamedToken]:
        """Generate text that continues several prompts in one batch, and yield each token.

        Without `with_logits`, a GPU decodes several tokens before the first one is yielded.
        """
        ids = [self.tokenize(prompt) for prompt in prompts]
        decoders = [StreamingDecoder(self.tokenizer, context_ids=prompt_ids) for prompt_ids in ids]
        stops = [StopStringFilter(stop) for _ in prompts]
        for step in generate_tokens(
            self.model,
            ids,
            max_new=max_new,
            sampling=sampling,
            stop_ids=self.stop_ids,
            create_engine=partial(decode_engine, backend=self.backend),
            with_logits=with_logits,
        ):
            decoder, stop_filter = decoders[step.row], stops[step.row]
            text = stop_filter.feed(self._decode_token(decoder, step.id))
            if step.sequence.finish_reason is not None and not stop_filter.is_stopped:
                text += stop_filter.feed(decoder.finish())
                text += stop_filter.flush()
            if stop_filter.is_stopped:
                step.sequence.finish_reason = FinishReason.STOP
            yield StreamedToken(step.row, text, step)

    def beam_search(self, prompts: Sequence[str], *, max_new: int = 200, beam: BeamConfig) -> list[list[Continuation]]:
        """Return the `beam.n_best` best continuations of each prompt, best first."""
        continuations: list[list[Continuation]] = []
        for start in range(0, len(prompts), PROMPTS_PER_BATCH):
            ids = [self.tokenize(prompt) for prompt in prompts[start : start + PROMPTS_PER_BATCH]]
            results = beam_generate(
                self.model,
                ids,
                max_new=max_new,
                beam=beam,
                stop_ids=self.stop_ids,
                create_engine=partial(decode_engine, backend=self.backend),
            )
            for prompt_ids, hypotheses in zip(ids, results, strict=True):
                continuations.append([self._to_beam_continuation(prompt_ids, hypothesis) for hypothesis in hypotheses])
        return continuations

    @property
    def stop_ids(self) -> frozenset[int]:
        end = self.tokenizer.find_special_id(SpecialToken.EOS)
        return frozenset() if end is None else frozenset({end})

    def tokenize(self, prompt: str) -> list[int]:
        """Tokenize a prompt. If the prompt is empty, return the begin token if the tokenizer has one."""
        ids = self.tokenizer.encode(prompt)
        if ids:
            return ids
        begin = self.tokenizer.find_special_id(SpecialToken.BOS)
        if begin is None:
            raise InputError(
                "the prompt must contain at least 1 token because the tokenizer has no begin token, got 0 tokens"
            )
        return [begin]

    def score(self, document: str) -> "EvaluationResult":
        """Compute the negative log-likelihood of a document. See `score_documents`."""
        return next(self.score_documents([document]))

    def score_documents(self, documents: Iterable[str]) -> "Iterator[EvaluationResult]":
        """Compute the negative log-likelihood of each document, in batches of similar length, and yield them in order.

        Leading and trailing whitespace is removed. The begin token is added before each document, and the score
        includes the end token. The number of bytes of a document is its size in UTF-8. Documents longer than the
        context are split into overlapping windows (`log_likelihood.split_into_overlapping_windows`).
        """
        from qkv.training.loop import EvaluationResult

        begin, end = self.tokenizer.special_id(SpecialToken.BOS), self.tokenizer.special_id(SpecialToken.EOS)
        sizes: list[tuple[int, int]] = []

        def encode_documents() -> Iterator[list[int]]:
            for document in documents:
                text = document.strip()
                ids = [begin, *self.tokenizer.encode(text, add_special_tokens=False), end]
                sizes.append((len(ids) - 1, len(text.encode())))
                yield ids

        for index, loss_sum in enumerate(document_nll_sums(self.model, encode_documents(), backend=self.backend)):
            n_targets, n_bytes = sizes[index]
            yield EvaluationResult(loss_sum=loss_sum, n_targets=n_targets, n_bytes=n_bytes)

    def _decode_token(self, decoder: StreamingDecoder, token_id: int) -> str:
        """Decode a token, and return the characters that it completes.

        Ids outside the tokenizer's vocabulary, which are padding rows of the embedding, decode to an empty string.
        """
        return decoder.add(token_id) if token_id < self.tokenizer.vocab_size else ""

    def _to_beam_continuation(self, prompt: list[int], hypothesis: Hypothesis) -> Continuation:
        decoder = StreamingDecoder(self.tokenizer, context_ids=prompt)
        text = "".join([*(self._decode_token(decoder, token_id) for token_id in hypothesis.ids), decoder.finish()])
        return Continuation(
            text=text,
            ids=hypothesis.ids,
            log_probabilities=hypothesis.log_probabilities,
            finish_reason=hypothesis.finish_reason,
            score=hypothesis.score,
        )


def _to_continuation(text: GeneratedSequence, visible_text: str) -> Continuation:
    assert text.finish_reason is not None
    return Continuation(
        text=visible_text, ids=text.new_ids, log_probabilities=text.log_probabilities, finish_reason=text.finish_reason
    )
