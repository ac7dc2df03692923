"""Translate texts with an encoder–decoder model."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import overload

from qkv.choices import BackendName, SpecialToken
from qkv.config import BeamConfig
from qkv.data.sampler import batch_by_length
from qkv.engines import decode_engine
from qkv.errors import ContextLengthError, InputError
from qkv.generation import FinishReason, Hypothesis
from qkv.generation import translate as translate_ids
from qkv.generation.sequence import truncate_repetition
from qkv.inspection.alignment import CrossAttention, compute_cross_attention
from qkv.inspection.short_repr import ShortRepr
from qkv.models import RNNSeq2Seq, Seq2Seq
from qkv.tasks.description import task_repr_prefix
from qkv.tasks.text_utils import contains_term, has_words, split_to_fit, to_sentence_case
from qkv.text import Tokenizer
from qkv.text.token_display import (
    token_byte_spans,
    token_text_or_vocabulary_name,
    word_indices_of_ids,
    word_indices_of_spans,
)
from qkv.weights.generation_config import GenerationConfig

SOURCE_TOKENS_PER_BATCH = 1024
"""The maximum number of source tokens per batch, including padding.

In the decoder, each source occupies one row per beam.
"""
DEFAULT_BEAMS = 5
EMPTY_GLOSSARY: Mapping[str, str] = {}
ALL_CAPS_TOKEN_RATIO = 1.5
"""The minimum token ratio at which an all-caps text is translated in lowercase.

The token ratio is the number of tokens in the all-caps text divided by the number of tokens in its lowercase form.
"""


@dataclass(frozen=True, kw_only=True, repr=False)
class TranslationHypothesis(ShortRepr):
    """One of the translations found by beam search."""

    text: str
    ids: list[int]
    """All generated ids. `text` omits the end token and, if the output repeats itself in a loop, the repetitions."""
    tokens: list[str]
    log_probabilities: list[float]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, repr=False)
class Translation:
    """The translation of one source text.

    A source without letters and digits is returned unchanged and has no ids. If the text was translated with
    `attention=True`, `translation.attention.word_pairs()` aligns source and target words,
    `translation.attention.average()` returns the (target, source) matrix, and
    `qkv.inspection.plot_heatmaps(translation.attention.to_heatmap())` plots the matrix.
    """

    source: str
    source_ids: list[int]
    source_tokens: list[str]
    hypotheses: list[TranslationHypothesis]
    """The requested number of hypotheses, with the best one first."""
    attention: CrossAttention | None = None
    """The cross-attention of the best hypothesis, if requested."""

    def __repr__(self) -> str:
        attention_text = "" if self.attention is None else f", {self.attention!r}"
        summary = f"{self.source!r} → {self.text!r}, score {self.score:.3g}, {len(self.hypotheses)} hypotheses"
        return f"Translation({summary}{attention_text})"

    @property
    def text(self) -> str:
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        return self.hypotheses[0].score


class Translator:
    """An encoder–decoder model with its tokenizers.

    `translate` returns only text. `translate_batch` also returns tokens, scores and, optionally, attention.
    """

    def __init__(
        self,
        model: Seq2Seq | RNNSeq2Seq,
        tokenizer: Tokenizer,
        *,
        source: Tokenizer | None = None,
        name: str = "",
        generation_config: GenerationConfig = GenerationConfig(),  # noqa: B008 - frozen
        backend: str = BackendName.AUTO,
    ) -> None:
        """Create a translator. `source` is the source tokenizer, if it differs from the target tokenizer."""
        if isinstance(model, Seq2Seq) and model.config.d_patch is not None:
            raise InputError(
                "Translator requires a model that takes text, "
                f"but this model takes images (d_patch={model.config.d_patch})"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.source_tokenizer = source or tokenizer
        self.name = name
        self.generation_config = generation_config
        # If the model was trained for several tasks, the caller must select one of them.
        self.prefix = (
            next(iter(generation_config.task_prefixes.values())) if len(generation_config.task_prefixes) == 1 else ""
        )
        """The text that is added before each source text, such as T5's `translate English to German: `.

        Use `with_task_prefix` to create a translator with a different prefix.
        """
        self.backend = backend
        """The backend that generates tokens."""

    def __repr__(self) -> str:
        return task_repr_prefix("Translator", self.model, self.name) + ")"

    def with_task_prefix(self, prefix: str) -> "Translator":
        """Return a copy of this translator for another task.

        `prefix` is either the name of a task in `generation_config.task_prefixes` or the prefix itself.
        """
        other = copy(self)
        other.prefix = self.generation_config.task_prefixes.get(prefix, prefix)
        return other

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes for the user."""
        prefixes = self.generation_config.task_prefixes
        if self.prefix:
            return (f"{self.prefix!r} is added before each text",)
        if prefixes:
            return (
                f"trained for {len(prefixes)} tasks ({', '.join(prefixes)}), but none was selected: no prefix is added",
            )
        return ()

    @overload
    def translate(self, texts: str, *, beam: int = DEFAULT_BEAMS, split: bool | None = None) -> str: ...
    @overload
    def translate(self, texts: list[str], *, beam: int = DEFAULT_BEAMS, split: bool | None = None) -> list[str]: ...
    def translate(
        self, texts: str | list[str], *, beam: int = DEFAULT_BEAMS, split: bool | None = None
    ) -> str | list[str]:
        """Translate a text or a list of texts.

        If `split` is set, long texts are split with `split_to_context_length`, and the translations of the parts are
        joined. By default, texts are split if the model has a length limit for joined sentences.
        """
        text_list = _as_text_list(texts)
        is_split = self.splits_by_default if split is None else split
        parts = [self.split_to_context_length(text) if is_split else [text] for text in text_list]
        flat_parts = [part for text_parts in parts for part in text_parts]
        results = iter(self.translate_batch(flat_parts, beam=BeamConfig(n_beams=beam)))
        translations = [" ".join(next(results).text for _ in text_parts) for text_parts in parts]
        return translations[0] if isinstance(texts, str) else translations

    @property
    def splits_by_default(self) -> bool:
        """Whether long texts are split by default.

        Splitting is needed for models trained on single sentences. Given a long text, such a model would omit most of
        the text or repeat itself.
        """
        return self.generation_config.max_joined is not None

    def split_to_context_length(self, text: str) -> list[str]:
        """Split a text at sentence boundaries, or between words if a sentence is too long.

        Sentences are joined up to `generation_config.max_joined` tokens or, if that is `None`, up to the context
        length.
        """
        context_length = self.model.config.context_length
        max_joined = min(context_length, self.generation_config.max_joined or context_length)
        return split_to_fit(
            text,
            lambda part: self._count_source_tokens(part) <= context_length,
            fits_joined=lambda part: self._count_source_tokens(part) <= max_joined,
        )

    def translate_batch(
        self,
        texts: Sequence[str],
        *,
        beam: BeamConfig | None = None,
        max_new: int | None = None,
        glossary: Mapping[str, str] = EMPTY_GLOSSARY,
        attention: bool = False,
    ) -> list[Translation]:
        """Translate texts in batches of similar length, and return the translations in the order of the texts.

        `beam` defaults to beam search with 5 beams. `max_new` is the maximum number of generated tokens per text and
        defaults to twice the number of source tokens plus 10. A translation that reaches this default limit is cut off
        where it starts to repeat itself. If a text contains a source term from `glossary`, its translation contains the
        target term, although the next token may continue the term's last word.
        """
        prepared = [self._sentence_case_if_all_caps(text) for text in texts]
        sources = [self._encode_source(index, text) for index, text in enumerate(prepared)]
        results_by_index: dict[int, list[Hypothesis]] = {}
        nonempty = [index for index, ids in enumerate(sources) if ids]
        for batch in batch_by_length([len(sources[index]) for index in nonempty], SOURCE_TOKENS_PER_BATCH):
            indices = [nonempty[position] for position in batch]
            results = translate_ids(
                self.model,
                [sources[index] for index in indices],
                start_id=self.decoder_start_id,
                stop_ids=self.stop_ids,
                beam=beam or BeamConfig(n_beams=DEFAULT_BEAMS),
                max_new=[2 * len(sources[index]) + 10 if max_new is None else max_new for index in indices],
                constraints=[self._glossary_constraints(prepared[index], glossary) for index in indices],
                create_engine=partial(decode_engine, backend=self.backend),
                generation_config=self.generation_config,
            )
            results_by_index.update(zip(indices, results, strict=True))
        return [
            self._build_translation(
                text, ids, results_by_index.get(index, []), attention=attention, keep_repetition=max_new is not None
            )
            for index, (text, ids) in enumerate(zip(texts, sources, strict=True))
        ]

    @property
    def decoder_start_id(self) -> int:
        """The first decoder input id.

        This is the id in the generation config, if set. Otherwise, it is the begin token or, if there is none, the
        padding token.
        """
        if self.generation_config.decoder_start_id is not None:
            return self.generation_config.decoder_start_id
        begin = self.tokenizer.find_special_id(SpecialToken.BOS)
        return self.tokenizer.special_id(SpecialToken.PAD) if begin is None else begin

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({self.tokenizer.special_id(SpecialToken.EOS)})

    def normalize_and_add_prefix(self, text: str) -> str:
        """Normalize a text and add the prefix, which yields the text that the model receives.

        A text without words becomes empty. An all-caps text is converted to sentence case if that reduces the number of
        tokens considerably.
        """
        return self._add_prefix(normalized) if (normalized := self._sentence_case_if_all_caps(text)) else ""

    def _sentence_case_if_all_caps(self, text: str) -> str:
        text = text.strip() if has_words(text) else ""
        lowercase = to_sentence_case(text)
        keeps_case = not text.isupper() or self._count_source_tokens(
            text
        ) < ALL_CAPS_TOKEN_RATIO * self._count_source_tokens(lowercase)
        return text if keeps_case else lowercase

    def _count_source_tokens(self, text: str) -> int:
        return len(self.source_tokenizer.encode(self._add_prefix(text)))

    def _encode_source(self, index: int, text: str) -> list[int]:
        if not text:
            return []
        ids = self.source_tokenizer.encode(self._add_prefix(text))
        if len(ids) > (context_length := self.model.config.context_length):
            can_split = len(self.split_to_context_length(text)) > 1
            hint = (
                "use --split (split=True) to split the text at sentence boundaries"
                if can_split
                else f"{text[:20]!r}… contains no space where it could be split"
            )
            raise ContextLengthError(
                f"text {index + 1} has {len(ids):,} tokens, which exceeds the model's context_length "
                f"of {context_length}: {hint}"
            )
        return ids

    def _add_prefix(self, text: str) -> str:
        return self.prefix + text.strip()

    def _glossary_constraints(self, text: str, glossary: Mapping[str, str]) -> list[list[int]]:
        for term, target in glossary.items():
            if not (term.strip() and target.strip()):
                raise InputError(f"both sides of a glossary entry must contain a word, got {term!r}: {target!r}")
        return [self._encode_mid_text(target) for term, target in glossary.items() if contains_term(text, term)]

    def _encode_mid_text(self, term: str) -> list[int]:
        """Return the ids that a term has inside a text, where its first token includes the preceding space."""
        before = self.tokenizer.encode("a", add_special_tokens=False)
        both = self.tokenizer.encode(f"a {term.strip()}", add_special_tokens=False)
        return both[len(before) :] if both[: len(before)] == before else both

    def _build_translation(
        self, text: str, ids: list[int], results: list[Hypothesis], *, attention: bool, keep_repetition: bool
    ) -> Translation:
        normalized = self._sentence_case_if_all_caps(text)
        hypotheses = [self._to_hypothesis(hypothesis, keep_repetition=keep_repetition) for hypothesis in results]
        if normalized != text.strip():
            hypotheses = [replace(hypothesis, text=hypothesis.text.upper()) for hypothesis in hypotheses]
        if not ids:
            unchanged = " ".join(text.split())
            hypotheses = [
                TranslationHypothesis(
                    text=unchanged, ids=[], tokens=[], log_probabilities=[], score=0.0, finish_reason=FinishReason.STOP
                )
            ]
        tokens = [token_text_or_vocabulary_name(self.source_tokenizer, token_id) for token_id in ids]
        cross_attention = self._compute_attention(normalized, ids, hypotheses[0]) if attention and ids else None
        return Translation(
            source=text, source_ids=ids, source_tokens=tokens, hypotheses=hypotheses, attention=cross_attention
        )

    def _to_hypothesis(self, hypothesis: Hypothesis, *, keep_repetition: bool) -> TranslationHypothesis:
        ids = (
            hypothesis.ids
            if keep_repetition or hypothesis.finish_reason is FinishReason.STOP
            else truncate_repetition(hypothesis.ids)
        )
        valid_ids = [token_id for token_id in ids if token_id < self.tokenizer.vocab_size]
        return TranslationHypothesis(
            text=" ".join(self.tokenizer.decode(valid_ids).split()),
            ids=hypothesis.ids,
            tokens=[token_text_or_vocabulary_name(self.tokenizer, token_id) for token_id in hypothesis.ids],
            log_probabilities=hypothesis.log_probabilities,
            score=hypothesis.score,
            finish_reason=hypothesis.finish_reason,
        )

    def _compute_attention(self, text: str, ids: list[int], hypothesis: TranslationHypothesis) -> CrossAttention:
        return CrossAttention(
            weights=compute_cross_attention(self.model, ids, hypothesis.ids, start_id=self.decoder_start_id),
            source=[token_text_or_vocabulary_name(self.source_tokenizer, token_id) for token_id in ids],
            target=hypothesis.tokens,
            source_word_ids=self._source_word_ids(text, ids),
            target_word_ids=word_indices_of_ids(self.tokenizer, hypothesis.ids),
        )

    def _source_word_ids(self, text: str, ids: list[int]) -> list[int | None]:
        """Return the word index of each source token, not counting the words in the prefix."""
        n_prefix_words = len(self.prefix.split())
        prefixed = self._add_prefix(text)
        words = word_indices_of_spans(prefixed, token_byte_spans(self.source_tokenizer, prefixed, ids))
        return [None if word is None or word < n_prefix_words else word - n_prefix_words for word in words]


def _as_text_list(value: object) -> list[str]:
    texts = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise InputError(f"translate requires a string or a list of strings, got {repr(wrong[0])[:60]}")
    return [text for text in texts if isinstance(text, str)]
