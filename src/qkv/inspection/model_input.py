"""Prepare tokenized model inputs with token labels, word indices and byte spans."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from qkv.choices import AttentionStack, SpecialToken
from qkv.errors import ContextLengthError, InputError
from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.text import Tokenizer
from qkv.text.token_display import (
    token_byte_spans,
    token_text_or_vocabulary_name,
    word_indices_of_ids,
    word_indices_of_spans,
)
from qkv.text.tokenizer import StreamingDecoder


@runtime_checkable
class ModelWithTokenizer(Protocol):
    """A model with its tokenizer, such as every task in `qkv.tasks`."""

    @property
    def model(self) -> Model: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


@runtime_checkable
class EncoderDecoderTask(ModelWithTokenizer, Protocol):
    """An encoder–decoder with its source and target tokenizers."""

    @property
    def source_tokenizer(self) -> Tokenizer: ...
    @property
    def decoder_start_id(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TokenizedText:
    """A tokenized text: the only input of a model, or the source or target of an encoder–decoder."""

    text: str
    ids: list[int]
    tokens: list[str]
    """The text of each token as returned by `token_text_or_vocabulary_name`, including leading spaces."""
    word_ids: list[int | None]
    """The word index of each token, or `None` for tokens that do not belong to a word, such as [SEP]."""
    spans: list[tuple[int, int] | None]
    """The UTF-8 byte range of `text` that each token covers, or `None` where it is unknown."""
    is_special: list[bool]

    @property
    def labels(self) -> list[str]:
        """The tokens with visible whitespace, for use in axes and tables."""
        return [mark_whitespace(token) for token in self.tokens]

    def find_last_occurrence(self, word: str, *, before: int | None = None) -> list[int]:
        """Return the token positions of the last occurrence of a word in the text.

        If `before` is given, the last occurrence that ends before that position is preferred, if there is one.
        """
        matches = re.finditer(rf"(?<!\w){re.escape(word.strip())}(?!\w)", self.text) if word.strip() else ()
        occurrences = [positions for match in matches if (positions := self._positions_in_span(*match.span()))]
        if not occurrences:
            raise InputError(f"the word {word!r} does not occur in the text {self.text!r}")
        earlier = [positions for positions in occurrences if before is not None and positions[-1] < before]
        return (earlier or occurrences)[-1]

    def _positions_in_span(self, start: int, end: int) -> list[int]:
        first, last = (len(self.text[:offset].encode()) for offset in (start, end))
        return [n for n, span in enumerate(self.spans) if span is not None and span[0] < last and span[1] > first]


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """The input of one forward pass. For an encoder–decoder, `sequence` is the decoder input."""

    sequence: TokenizedText
    source: TokenizedText | None = None
    segments: list[int] | None = None
    """The segment ids for a BERT if the input is a pair of texts."""
    next_ids: list[int] | None = None
    """The actual next id at each position, or `None` for a model that does not predict the next token (BERT).

    The last position is omitted if its next id is unknown.
    """
    generated: TokenizedText | None = None
    """For a translation, the generated tokens. Row t of the cross-attention belongs to the prediction of token t."""

    def attention_axis_tokens(self, stack: AttentionStack, *, is_key: bool = False) -> TokenizedText:
        """Return the query tokens or, if `is_key` is set, the key tokens.

        In cross-attention, queries are labeled with the tokens that they predict.
        """
        if stack is AttentionStack.ENCODER or (stack is AttentionStack.CROSS and is_key):
            return self.source or self.sequence
        return self.prediction_tokens if stack is AttentionStack.CROSS else self.sequence

    @property
    def prediction_tokens(self) -> TokenizedText:
        """The tokens that label the predictions: the generated tokens for a translation, otherwise the input tokens."""
        return self.generated or self.sequence


def mark_whitespace(token: str) -> str:
    """Replace the spaces, newlines and tabs in a token with visible characters."""
    return token.replace(" ", "▁").replace("\n", "⏎").replace("\t", "⇥")


def prepare_input(task: ModelWithTokenizer, text: str, second_text: str | Sequence[int] | None = None) -> ModelInput:
    """Tokenize a text, and build the input for a task's model.

    For a translation model, `second_text` is the translation, as text or ids. For a BERT, it is the second text of a
    pair.
    """
    model = task.model
    match model:
        case GPT():
            if second_text is not None:
                raise InputError("a GPT requires exactly 1 text, got 2")
            return _prepare_gpt_input(task, text)
        case BERT():
            if not isinstance(second_text, str | None):
                raise InputError("the second text of a pair must be a string, got token ids")
            return _prepare_bert_input(task, text, second_text)
        case Seq2Seq() | RNNSeq2Seq():
            assert isinstance(task, EncoderDecoderTask)
            if second_text is None:
                raise InputError("a translation model requires a source and its translation, got no translation")
            return _prepare_translation_input(task, text, second_text)


def prepare_gpt_input_from_ids(task: ModelWithTokenizer, ids: Sequence[int]) -> ModelInput:
    """Build the input for a GPT from token ids."""
    check_context_length(task.model, len(ids))
    sequence = _build_from_ids(task.tokenizer, list(ids))
    return ModelInput(sequence=sequence, next_ids=sequence.ids[1:])


def _prepare_gpt_input(task: ModelWithTokenizer, text: str) -> ModelInput:
    ids = task.tokenizer.encode(text)
    if not ids:
        begin = task.tokenizer.find_special_id(SpecialToken.BOS)
        if begin is None:
            raise InputError("the text must have at least 1 token, got 0")
        ids = [begin]
    check_context_length(task.model, len(ids))
    return ModelInput(sequence=_build_from_text(task.tokenizer, text, ids), next_ids=ids[1:])


def _prepare_bert_input(task: ModelWithTokenizer, text: str, second_text: str | None) -> ModelInput:
    tokenizer = task.tokenizer
    if second_text is None:
        ids = tokenizer.encode(text, parse_special_tokens=True)
        check_context_length(task.model, len(ids))
        return ModelInput(sequence=_build_from_text(tokenizer, text, ids, parse_special_tokens=True))
    pair = tokenizer.encode_pair(text, second_text, parse_special_tokens=True)
    check_context_length(task.model, len(pair.ids))
    first_ids, second_ids = (
        [i for i, segment in zip(pair.ids, pair.segments, strict=True) if segment == n] for n in (0, 1)
    )
    first_tokens = _build_from_text(tokenizer, text, first_ids, parse_special_tokens=True)
    second_tokens = _build_from_text(tokenizer, second_text, second_ids, parse_special_tokens=True)
    n_words = max((word for word in first_tokens.word_ids if word is not None), default=-1) + 1
    shift = len(f"{text}\n".encode())
    sequence = TokenizedText(
        text=f"{text}\n{second_text}",
        ids=pair.ids,
        tokens=first_tokens.tokens + second_tokens.tokens,
        word_ids=first_tokens.word_ids + [None if word is None else word + n_words for word in second_tokens.word_ids],
        spans=first_tokens.spans
        + [None if span is None else (span[0] + shift, span[1] + shift) for span in second_tokens.spans],
        is_special=first_tokens.is_special + second_tokens.is_special,
    )
    has_segments = isinstance(task.model, BERT) and task.model.config.has_multiple_segments
    return ModelInput(sequence=sequence, segments=pair.segments if has_segments else None)


def _prepare_translation_input(task: EncoderDecoderTask, text: str, second_text: str | Sequence[int]) -> ModelInput:
    source_ids = task.source_tokenizer.encode(text.strip())
    target = task.tokenizer.encode(second_text.strip()) if isinstance(second_text, str) else list(second_text)
    if target[:1] == [task.decoder_start_id]:
        target = target[1:]
    if not source_ids or not target:
        raise InputError(f"source and target must each have at least 1 token, got {len(source_ids)} and {len(target)}")
    # The decoder input is the target shifted right by one.
    sequence = _build_from_ids(task.tokenizer, [task.decoder_start_id, *target[:-1]])
    check_context_length(task.model, len(source_ids))
    check_context_length(task.model, len(sequence.ids))
    return ModelInput(
        sequence=sequence,
        source=_build_from_text(task.source_tokenizer, text.strip(), source_ids),
        next_ids=target,
        generated=_build_from_ids(task.tokenizer, target),
    )


def _build_from_text(
    tokenizer: Tokenizer, text: str, ids: list[int], *, parse_special_tokens: bool = False
) -> TokenizedText:
    spans = token_byte_spans(tokenizer, text, ids, parse_special_tokens=parse_special_tokens)
    return _build_tokenized_text(tokenizer, text, ids, word_ids=word_indices_of_spans(text, spans), spans=spans)


def _build_from_ids(tokenizer: Tokenizer, ids: list[int]) -> TokenizedText:
    valid_ids = [token_id for token_id in ids if token_id < tokenizer.vocab_size]
    text = tokenizer.decode(valid_ids)
    return _build_tokenized_text(
        tokenizer, text, ids, word_ids=word_indices_of_ids(tokenizer, ids), spans=_byte_spans_of_ids(tokenizer, ids)
    )


def _byte_spans_of_ids(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, int] | None]:
    """Return each token's byte span in the decoded text. Tokens that share a character share all of its bytes."""
    decoder = StreamingDecoder(tokenizer)
    spans: list[tuple[int, int] | None] = [None] * len(ids)
    pending: list[int] = []
    start = 0
    visible = [
        n for n, token_id in enumerate(ids) if token_id < tokenizer.vocab_size and token_id not in tokenizer.special_ids
    ]
    for position in visible:
        pending.append(position)
        decoded_text = decoder.add(ids[position]) or (decoder.finish() if position == visible[-1] else "")
        if decoded_text:
            end = start + len(decoded_text.encode())
            for pending_position in pending:
                spans[pending_position] = (start, end)
            pending, start = [], end
    return spans


def _build_tokenized_text(
    tokenizer: Tokenizer,
    text: str,
    ids: list[int],
    *,
    word_ids: list[int | None],
    spans: Sequence[tuple[int, int] | None],
) -> TokenizedText:
    return TokenizedText(
        text=text,
        ids=ids,
        tokens=[token_text_or_vocabulary_name(tokenizer, token_id) for token_id in ids],
        word_ids=word_ids,
        spans=list(spans),
        is_special=[token_id in tokenizer.special_ids for token_id in ids],
    )


def check_context_length(model: Model, n_tokens: int) -> None:
    """Check that the number of tokens does not exceed the context length."""
    context_length = model.config.context_length
    if n_tokens > context_length:
        raise ContextLengthError(
            f"the text has {n_tokens:,} tokens, which exceeds the model's context_length of {context_length:,}"
        )
