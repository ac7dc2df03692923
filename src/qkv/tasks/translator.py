"""Translate texts with an encoder–decoder."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import overload

from qkv.choices import SpecialToken
from qkv.config import BeamConfig
from qkv.errors import ContextLengthError, InputError
from qkv.generation import FinishReason, Hypothesis
from qkv.generation import translate as translate_ids
from qkv.generation.prepacked_weights import prepack_weights
from qkv.generation.stop_conditions import truncate_repetition
from qkv.inspection.alignment import CrossAttention, compute_cross_attention
from qkv.inspection.short_repr import ShortRepr
from qkv.models import RNNSeq2Seq, Seq2Seq
from qkv.tasks.batches import batch_by_length
from qkv.tasks.description import describe_task
from qkv.tasks.text_utils import contains_term, has_words, split_to_fit, to_sentence_case
from qkv.text import Tokenizer
from qkv.text.token_display import token_text
from qkv.text.word_indices import token_byte_spans, word_indices_of_ids, word_indices_of_spans
from qkv.weights.decoding import Decoding

SOURCE_TOKENS_PER_BATCH = 1024
"""Maximum source tokens per batch, including padding. Each source takes as many rows as there are beams."""
DEFAULT_BEAM = BeamConfig(n_beams=5)
EMPTY_GLOSSARY: Mapping[str, str] = {}
ALL_CAPS_TOKEN_RATIO = 1.5
"""If an all-caps text has at least this many times the tokens of its lowercase form, the lowercase form is translated."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TranslationHypothesis(ShortRepr):
    """One result of the beam search."""

    text: str
    ids: list[int]
    """All generated ids. The text omits the end token and the repetitions of a loop."""
    tokens: list[str]
    log_probabilities: list[float]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, repr=False)
class Translation:
    """The translation of one source.

    A source without letters or digits is returned unchanged and has no ids. With `attention=True`,
    `translation.attention.word_pairs()` aligns source and target words, `translation.attention.average()` is the (target,
    source) matrix, and `plot_heatmaps(translation.attention.to_heatmap())` of `qkv.inspection` plots it.
    """

    source: str
    source_ids: list[int]
    source_tokens: list[str]
    hypotheses: list[TranslationHypothesis]
    """Best first, as many as requested."""
    attention: CrossAttention | None = None
    """Cross-attention of the best hypothesis."""

    def __repr__(self) -> str:
        looked = "" if self.attention is None else f", {self.attention!r}"
        return f"Translation({self.source!r} → {self.text!r}, score {self.score:.3g}, {len(self.hypotheses)} found{looked})"

    @property
    def text(self) -> str:
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        return self.hypotheses[0].score


class Translator:
    """An encoder–decoder with its tokenizers.

    `translate` returns text, and `translate_batch` returns tokens, scores and attention.
    """

    def __init__(
        self,
        model: Seq2Seq | RNNSeq2Seq,
        tokenizer: Tokenizer,
        *,
        source: Tokenizer | None = None,
        name: str = "",
        decoding: Decoding = Decoding(),  # noqa: B008 - frozen
    ) -> None:
        """`source` is the source tokenizer, if it differs from the target tokenizer."""
        if isinstance(model, Seq2Seq) and model.config.d_patch is not None:
            raise InputError(f"a Translator takes text, but this model takes images (d_patch={model.config.d_patch})")
        self.model = model
        self.tokenizer = tokenizer
        self.source_tokenizer = source or tokenizer
        self.name = name
        self.decoding = decoding
        # With several trained tasks, the caller must choose one.
        self.prefix = next(iter(decoding.prefixes.values())) if len(decoding.prefixes) == 1 else ""
        """Text added before every source, such as T5's `translate English to German: `. Set it with `with_prefix`."""
        self._packing = prepack_weights(model)

    def __repr__(self) -> str:
        return describe_task("Translator", self.model, self.name) + ")"

    def with_prefix(self, prefix: str) -> "Translator":
        """Returns a copy for another task: a name in `decoding.prefixes`, or any other prefix."""
        other = copy(self)
        other.prefix = self.decoding.prefixes.get(prefix, prefix)
        return other

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes for the user."""
        known = self.decoding.prefixes
        if self.prefix:
            return (f"{self.prefix!r} is added before each text",)
        if known:
            return (
                f"trained for {len(known)} tasks ({', '.join(known)}), but none was selected, so no prefix is added",
            )
        return ()

    @overload
    def translate(self, texts: str, *, beam: int = 5, split: bool | None = None) -> str: ...
    @overload
    def translate(self, texts: list[str], *, beam: int = 5, split: bool | None = None) -> list[str]: ...
    def translate(self, texts: str | list[str], *, beam: int = 5, split: bool | None = None) -> str | list[str]:
        """Translate a text, or a list of texts.

        With `split`, long texts are split (`split_text`) and their translations joined. By default, this depends on whether the
        model has a length limit for joined sentences.
        """
        given = _as_text_list(texts)
        is_cut = self.splits_by_default if split is None else split
        pieces = [self.split_text(text) if is_cut else [text] for text in given]
        flat = [piece for some in pieces for piece in some]
        done = iter(self.translate_batch(flat, beam=BeamConfig(n_beams=beam)))
        joined = [" ".join(next(done).text for _ in some) for some in pieces]
        return joined[0] if isinstance(texts, str) else joined

    @property
    def splits_by_default(self) -> bool:
        """Whether long texts are split by default.

        A model trained on single sentences omits most of a long text or repeats itself.
        """
        return self.decoding.max_joined is not None

    def split_text(self, text: str) -> list[str]:
        """Split a text at sentence boundaries, or between words if a single sentence is too long.

        Sentences are joined up to `decoding.max_joined` tokens, or up to the context length.
        """
        room = self.model.config.context_length
        most = min(room, self.decoding.max_joined or room)
        return split_to_fit(
            text, lambda part: self._n_ids(part) <= room, together=lambda part: self._n_ids(part) <= most
        )

    def translate_batch(
        self,
        texts: Sequence[str],
        *,
        beam: BeamConfig = DEFAULT_BEAM,
        max_new: int | None = None,
        glossary: Mapping[str, str] = EMPTY_GLOSSARY,
        attention: bool = False,
    ) -> list[Translation]:
        """Translate texts in batches of similar length. Results are in the order of the texts.

        `max_new` defaults to twice the number of source tokens plus 10. If a text contains a term of the `glossary`, its
        translation contains the target term (what follows may continue its last word). A translation that reaches the default
        limit is cut where it starts to repeat itself.
        """
        read = [self._read(text) for text in texts]
        sources = [self._encoded(number, text) for number, text in enumerate(read)]
        found: dict[int, list[Hypothesis]] = {}
        there = [number for number, ids in enumerate(sources) if ids]
        for batch in batch_by_length([len(sources[number]) for number in there], SOURCE_TOKENS_PER_BATCH):
            numbers = [there[place] for place in batch]
            results = translate_ids(
                self.model,
                [sources[number] for number in numbers],
                start_id=self.decoder_start_id,
                stop_ids=self.stop_ids,
                beam=beam,
                max_new=[2 * len(sources[number]) + 10 if max_new is None else max_new for number in numbers],
                constraints=[self._terms(read[number], glossary) for number in numbers],
                prepacked=self._packing,
                decoding=self.decoding,
            )
            found.update(zip(numbers, results, strict=True))
        return [
            self._translation(text, ids, found.get(number, []), attention=attention, may_loop=max_new is not None)
            for number, (text, ids) in enumerate(zip(texts, sources, strict=True))
        ]

    @property
    def decoder_start_id(self) -> int:
        """The first decoder input id: the configured one, the begin token, or the padding token."""
        if self.decoding.decoder_start_id is not None:
            return self.decoding.decoder_start_id
        begin = self.tokenizer.find_special_id(SpecialToken.BOS)
        return self.tokenizer.special_id(SpecialToken.PAD) if begin is None else begin

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({self.tokenizer.special_id(SpecialToken.EOS)})

    def prepare_source(self, text: str) -> str:
        """Returns the text that the model translates, with the prefix.

        Texts without words become empty, and all-caps texts become lowercase if the vocabulary has few uppercase words.
        """
        return self._prefixed(read) if (read := self._read(text)) else ""

    def _read(self, text: str) -> str:
        text = text.strip() if has_words(text) else ""
        small = to_sentence_case(text)
        knows = not text.isupper() or self._n_ids(text) < ALL_CAPS_TOKEN_RATIO * self._n_ids(small)
        return text if knows else small

    def _n_ids(self, text: str) -> int:
        return len(self.source_tokenizer.encode(self._prefixed(text)))

    def _encoded(self, number: int, text: str) -> list[int]:
        if not text:
            return []
        ids = self.source_tokenizer.encode(self._prefixed(text))
        if len(ids) > (room := self.model.config.context_length):
            can_be_cut = len(self.split_text(text)) > 1
            hint = (
                "--split (split=True) splits it at sentence boundaries"
                if can_be_cut
                else f"{text[:20]!r}… contains no space to split it at"
            )
            raise ContextLengthError(
                f"text {number + 1} has {len(ids):,} tokens, which exceeds the model's context_length of {room}: {hint}"
            )
        return ids

    def _prefixed(self, text: str) -> str:
        return self.prefix + text.strip()

    def _terms(self, text: str, glossary: Mapping[str, str]) -> list[list[int]]:
        for term, target in glossary.items():
            if not (term.strip() and target.strip()):
                raise InputError(f"both sides of the glossary entry {term!r}: {target!r} must contain a word")
        return [self._inside(target) for term, target in glossary.items() if contains_term(text, term)]

    def _inside(self, term: str) -> list[int]:
        """Returns the ids of a term inside a text, where the first token includes the preceding space."""
        before = self.tokenizer.encode("a", add_special_tokens=False)
        both = self.tokenizer.encode(f"a {term.strip()}", add_special_tokens=False)
        return both[len(before) :] if both[: len(before)] == before else both

    def _translation(
        self, text: str, ids: list[int], found: list[Hypothesis], *, attention: bool, may_loop: bool
    ) -> Translation:
        read = self._read(text)
        written = [self._written(one, may_loop=may_loop) for one in found]
        if read != text.strip():
            written = [replace(one, text=one.text.upper()) for one in written]
        if not ids:
            same = " ".join(text.split())
            written = [
                TranslationHypothesis(
                    text=same, ids=[], tokens=[], log_probabilities=[], score=0.0, finish_reason=FinishReason.STOP
                )
            ]
        tokens = [token_text(self.source_tokenizer, number) for number in ids]
        looked = self._attention(read, ids, written[0]) if attention and ids else None
        return Translation(source=text, source_ids=ids, source_tokens=tokens, hypotheses=written, attention=looked)

    def _written(self, one: Hypothesis, *, may_loop: bool) -> TranslationHypothesis:
        ids = one.ids if may_loop or one.finish_reason is FinishReason.STOP else truncate_repetition(one.ids)
        known = [number for number in ids if number < self.tokenizer.vocab_size]
        return TranslationHypothesis(
            text=" ".join(self.tokenizer.decode(known).split()),
            ids=one.ids,
            tokens=[token_text(self.tokenizer, number) for number in one.ids],
            log_probabilities=one.log_probabilities,
            score=one.score,
            finish_reason=one.finish_reason,
        )

    def _attention(self, text: str, ids: list[int], written: TranslationHypothesis) -> CrossAttention:
        return CrossAttention(
            weights=compute_cross_attention(self.model, ids, written.ids, start_id=self.decoder_start_id),
            source=[token_text(self.source_tokenizer, number) for number in ids],
            target=written.tokens,
            source_words=self._source_words(text, ids),
            target_words=word_indices_of_ids(self.tokenizer, written.ids),
        )

    def _source_words(self, text: str, ids: list[int]) -> list[int | None]:
        """Returns the word index of each source token, not counting the words of the prefix."""
        n = len(self.prefix.split())
        given = self._prefixed(text)
        words = word_indices_of_spans(given, token_byte_spans(self.source_tokenizer, given, ids))
        return [None if word is None or word < n else word - n for word in words]


def _as_text_list(given: object) -> list[str]:
    texts = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise InputError(f"translate takes a string or a list of strings, got {repr(wrong[0])[:60]}")
    return [text for text in texts if isinstance(text, str)]
