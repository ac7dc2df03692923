"""A text as a model reads it: ids, tokens to show, words, and where in the text they stand."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from qkv.choices import SpecialToken, Stack
from qkv.errors import ContextLengthError, InputError
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.text import Tokenizer
from qkv.text.token_display import token_text
from qkv.text.streaming_decoder import StreamingDecoder
from qkv.text.word_indices import token_byte_spans, word_indices_of_spans, word_indices_of_ids


@runtime_checkable
class ModelWithTokenizer(Protocol):
    """A model with its tokenizer, such as every task of `qkv.tasks`."""

    @property
    def model(self) -> Model: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


@runtime_checkable
class EncoderDecoderTask(ModelWithTokenizer, Protocol):
    """An encoder–decoder with its tokenizers."""

    @property
    def source_tokenizer(self) -> Tokenizer: ...
    @property
    def decoder_start_id(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TokenizedText:
    """One side of what a model reads."""

    text: str
    ids: list[int]
    tokens: list[str]
    """As `token_text` shows them; a blank that a token begins with is part of it."""
    word_ids: list[int | None]
    """Which word each token is of; None: of none, such as [SEP]."""
    spans: list[tuple[int, int] | None]
    """The UTF-8 bytes of `text` that each token stands for, where that is known."""
    is_special: list[bool]

    @property
    def labels(self) -> list[str]:
        """For axes and tables: nothing in them is unseen."""
        return [mark_whitespace(token) for token in self.tokens]

    def find_word(self, word: str, *, before: int | None = None) -> list[int]:
        """At which tokens a word of the text stands; of several, the last one.

        `before`: the last that ends before that token, where there is one.
        """
        found = re.finditer(rf"(?<!\w){re.escape(word.strip())}(?!\w)", self.text) if word.strip() else ()
        all_places = [places for match in found if (places := self._over(*match.span()))]
        if not all_places:
            raise InputError(f"the word {word!r} is not in the text {self.text!r}")
        earlier = [places for places in all_places if before is not None and places[-1] < before]
        return (earlier or all_places)[-1]

    def _over(self, start: int, end: int) -> list[int]:
        first, last = (len(self.text[:at].encode()) for at in (start, end))
        return [n for n, span in enumerate(self.spans) if span is not None and span[0] < last and span[1] > first]


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """What one pass reads. Of an encoder–decoder, `own` is the target as the decoder is fed it."""

    sequence: TokenizedText
    source: TokenizedText | None = None
    segments: list[int] | None = None
    """BERT's, where two texts are read as a pair."""
    next_ids: list[int] | None = None
    """Of each position the id that really came next; one less than positions where the last one's is open.

    None: the model does not say what comes next (BERT).
    """
    generated: TokenizedText | None = None
    """Of a translation, the tokens chosen: row t of a look at the source is the look that chose token t."""

    def select_tokens(self, stack: Stack, *, is_key: bool = False) -> TokenizedText:
        """Who looks; `is_key`: who is looked at. At a source looks the token that is chosen by it."""
        if stack is Stack.ENCODER or (stack is Stack.CROSS and is_key):
            return self.source or self.sequence
        return self.prediction_tokens if stack is Stack.CROSS else self.sequence

    @property
    def prediction_tokens(self) -> TokenizedText:
        """By which token a place is meant where the model guesses: of a translation, the one chosen there."""
        return self.generated or self.sequence


def mark_whitespace(token: str) -> str:
    """A blank that a token begins with is seen, and so is the end of a line."""
    return token.replace(" ", "▁").replace("\n", "⏎").replace("\t", "⇥")


def prepare_input(task: ModelWithTokenizer, text: str, second: str | Sequence[int] | None = None) -> ModelInput:
    """`second`: of a translator, the translation, as text or as ids; of a BERT, the second text of a pair."""
    model = task.model
    match model:
        case GPT():
            if second is not None:
                raise InputError("a GPT reads one text; two were given")
            return _prepare_gpt_input(task, text)
        case BERT():
            if not isinstance(second, str | None):
                raise InputError("the second text of a pair is given as text, not as ids")
            return _prepare_bert_input(task, text, second)
        case Seq2Seq() | RNNSeq2Seq():
            assert isinstance(task, EncoderDecoderTask)
            if second is None:
                raise InputError("a translator reads a source and its translation; the translation was not given")
            return _prepare_translation_input(task, text, second)


def prepare_input_ids(task: ModelWithTokenizer, ids: Sequence[int]) -> ModelInput:
    """What a GPT has written, as ids."""
    check_context_length(task.model, len(ids))
    own = _tokenized_ids(task.tokenizer, list(ids))
    return ModelInput(sequence=own, next_ids=own.ids[1:])


def _prepare_gpt_input(task: ModelWithTokenizer, text: str) -> ModelInput:
    ids = task.tokenizer.encode(text)
    if not ids:
        begin = task.tokenizer.find_special_id(SpecialToken.BOS)
        if begin is None:
            raise InputError("the text is empty: 0 tokens, there must be at least 1")
        ids = [begin]
    check_context_length(task.model, len(ids))
    return ModelInput(sequence=_tokenize_text(task.tokenizer, text, ids), next_ids=ids[1:])


def _prepare_bert_input(task: ModelWithTokenizer, text: str, second: str | None) -> ModelInput:
    tokenizer = task.tokenizer
    if second is None:
        ids = tokenizer.encode(text, parse_special_tokens=True)
        check_context_length(task.model, len(ids))
        return ModelInput(sequence=_tokenize_text(tokenizer, text, ids, parse_special_tokens=True))
    both = tokenizer.encode_pair(text, second, parse_special_tokens=True)
    check_context_length(task.model, len(both.ids))
    first_ids, second_ids = ([i for i, at in zip(both.ids, both.segments, strict=True) if at == n] for n in (0, 1))
    one = _tokenize_text(tokenizer, text, first_ids, parse_special_tokens=True)
    other = _tokenize_text(tokenizer, second, second_ids, parse_special_tokens=True)
    n_words = max((word for word in one.word_ids if word is not None), default=-1) + 1
    shift = len(f"{text}\n".encode())
    own = TokenizedText(
        text=f"{text}\n{second}", ids=both.ids, tokens=one.tokens + other.tokens,
        word_ids=one.word_ids + [None if word is None else word + n_words for word in other.word_ids],
        spans=one.spans + [None if span is None else (span[0] + shift, span[1] + shift) for span in other.spans],
        is_special=one.is_special + other.is_special,
    )  # fmt: skip
    has_segments = isinstance(task.model, BERT) and task.model.config.uses_segment_ids
    return ModelInput(sequence=own, segments=both.segments if has_segments else None)


def _prepare_translation_input(task: EncoderDecoderTask, text: str, second: str | Sequence[int]) -> ModelInput:
    source_ids = task.source_tokenizer.encode(text.strip())
    target = task.tokenizer.encode(second.strip()) if isinstance(second, str) else list(second)
    if target[:1] == [task.decoder_start_id]:
        target = target[1:]
    if not source_ids or not target:
        raise InputError(f"there are {len(source_ids)} source tokens and {len(target)} target tokens; both need 1")
    # The decoder is fed what stands before each token it chooses.
    own = _tokenized_ids(task.tokenizer, [task.decoder_start_id, *target[:-1]])
    check_context_length(task.model, len(source_ids))
    check_context_length(task.model, len(own.ids))
    return ModelInput(sequence=own, source=_tokenize_text(task.source_tokenizer, text.strip(), source_ids), next_ids=target,
        generated=_tokenized_ids(task.tokenizer, target),
    )  # fmt: skip


def _tokenize_text(tokenizer: Tokenizer, text: str, ids: list[int], *, parse_special_tokens: bool = False) -> TokenizedText:
    spans = token_byte_spans(tokenizer, text, ids, parse_special_tokens=parse_special_tokens)
    return _build_tokenized_text(tokenizer, text, ids, words=word_indices_of_spans(text, spans), spans=spans)


def _tokenized_ids(tokenizer: Tokenizer, ids: list[int]) -> TokenizedText:
    known = [number for number in ids if number < tokenizer.vocab_size]
    text = tokenizer.decode(known)
    return _build_tokenized_text(tokenizer, text, ids, words=word_indices_of_ids(tokenizer, ids), spans=_byte_spans_of_ids(tokenizer, ids))


def _byte_spans_of_ids(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, int] | None]:
    """Where in their decoded text; the tokens of one character share its bytes."""
    decoder = StreamingDecoder(tokenizer)
    spans: list[tuple[int, int] | None] = [None] * len(ids)
    held: list[int] = []
    start = 0
    spoken = [n for n, one in enumerate(ids) if one < tokenizer.vocab_size and one not in tokenizer.special_ids]
    for place in spoken:
        held.append(place)
        piece = decoder.add(ids[place]) or (decoder.finish() if place == spoken[-1] else "")
        if piece:
            end = start + len(piece.encode())
            for one in held:
                spans[one] = (start, end)
            held, start = [], end
    return spans


def _build_tokenized_text(
    tokenizer: Tokenizer, text: str, ids: list[int], *, words: list[int | None],
    spans: Sequence[tuple[int, int] | None],
) -> TokenizedText:  # fmt: skip
    return TokenizedText(
        text=text, ids=ids, tokens=[token_text(tokenizer, number) for number in ids], word_ids=words, spans=list(spans),
        is_special=[number in tokenizer.special_ids for number in ids],
    )  # fmt: skip


def check_context_length(model: Model, n: int) -> None:
    """So many tokens must fit into the context."""
    room = model.config.context_length
    if n > room:
        raise ContextLengthError(f"the text has {n:,} tokens, the model's context_length is {room:,}")
