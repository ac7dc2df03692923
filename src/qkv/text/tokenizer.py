"""Encode texts and decode tokens with a thin immutable wrapper around Hugging Face `tokenizers`."""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import tokenizers

from qkv.choices import SpecialToken
from qkv.errors import InputError, QKVError

MAX_CHUNK_CHARACTERS = 1 << 20
"""Maximum number of characters per chunk. `tokenizers` temporarily uses about 100 bytes per character."""

_SPLIT_POINT = re.compile(r"(?<=\S) (?=\S)")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class TokenByteSpan:
    """A token and the range of UTF-8 bytes that it covers in the text."""

    id: int
    token: str
    """Token as spelled in the vocabulary (`Ġdog`, `##ing`)."""
    start: int
    end: int


@dataclass(frozen=True)
class Encoding:
    """Token ids of an encoded text or text pair."""

    ids: list[int]
    segments: list[int]
    """Segment ids: 0 for the first text and its special tokens, and 1 for the second text and its special tokens."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A trained tokenizer.

    By default, special tokens that occur in a text (such as `<|endoftext|>`) are encoded as ordinary text so that user
    input cannot inject control tokens. `parse_special_tokens=True` encodes them as special tokens. Truncation and
    padding settings of the tokenizer file are disabled, so texts are never silently truncated.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[SpecialToken, str]
    """Special tokens, keyed by role. A token may have several roles."""
    name: str = "the tokenizer"
    """Name used in error messages, usually the name of the tokenizer file."""

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        for role, token in self.special_tokens.items():
            if self.backend.token_to_id(token) is None:
                raise InputError(f"{role}={token!r} is not in the vocabulary of the tokenizer")

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one. An embedding requires this number of rows even if some ids are unused."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tokenizer's vocabulary, algorithm and special tokens."""
        state = json.dumps([self.backend.to_str(), sorted(self.special_tokens.items())])
        return blake2b(state.encode(), digest_size=32).hexdigest()

    def find_special_id(self, role: SpecialToken) -> int | None:
        """Return the id of the special token with this role, or None if there is no such token."""
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    def special_id(self, role: SpecialToken) -> int:
        """Return the id of the special token with this role. Raises `InputError` if there is no such token."""
        token_id = self.find_special_id(role)
        if token_id is None:
            available = ", ".join(role.value for role in self.special_tokens) or "none"
            raise InputError(f"{self.name} has no {role.value} (available: {available})")
        return token_id

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, including those without a role."""
        added = self.backend.get_added_tokens_decoder()
        roles = {self.special_id(role) for role in self.special_tokens}
        return frozenset(roles | {token_id for token_id, token in added.items() if token.special})

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> list[int]:
        """Encode a text. `add_special_tokens` applies the tokenizer's template, e.g. [CLS] … [SEP]."""
        with convert_errors_to_input_error("the text cannot be encoded"):
            check_encodable(text)
            backend = self.special_parsing_backend if parse_special_tokens else self.backend
            return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, parse_special_tokens: bool = False
    ) -> list[list[int]]:
        """Encode many texts. The results match those of `encode`, but this method is faster and releases the GIL."""
        with convert_errors_to_input_error("the texts cannot be encoded"):
            for text in texts:
                check_encodable(text)
            backend = self.special_parsing_backend if parse_special_tokens else self.backend
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]

    def encode_pair(self, first: str, second: str, *, parse_special_tokens: bool = False) -> Encoding:
        """Encode two texts as one sequence, e.g. [CLS] first [SEP] second [SEP] for BERT."""
        with convert_errors_to_input_error("the pair cannot be encoded"):
            check_encodable(first)
            check_encodable(second)
            backend = self.special_parsing_backend if parse_special_tokens else self.backend
            encoding = backend.encode(first, second)
            return Encoding(ids=encoding.ids, segments=encoding.type_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids to text. Bytes that do not form a complete character become U+FFFD."""
        self._check_ids(ids)
        with convert_errors_to_input_error("the ids cannot be decoded"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str:
        """Return the token with this id, or an empty string if the id is unused."""
        self._check_ids([token_id])
        return self.backend.id_to_token(token_id) or ""

    def token_spans_without_template(self, text: str, *, parse_special_tokens: bool = False) -> list[TokenByteSpan]:
        """Tokenize a text without the template, and return each token with the range of UTF-8 bytes that it covers.

        Tokens that split a character may have overlapping ranges.
        """
        with convert_errors_to_input_error("the text cannot be encoded"):
            check_encodable(text)
            backend = self.special_parsing_backend if parse_special_tokens else self.backend
            encoding = backend.encode(text, add_special_tokens=False)
        spans = self._byte_level_token_ranges(encoding.tokens, text) or _character_to_byte_spans(encoding.offsets, text)
        return [
            TokenByteSpan(id=token_id, token=token, start=start, end=end)
            for token_id, token, (start, end) in zip(encoding.ids, encoding.tokens, spans, strict=True)
        ]

    @cached_property
    def special_parsing_backend(self) -> tokenizers.Tokenizer:
        """A copy of the backend that parses special tokens in texts.

        A copy is needed because this option is part of a backend's state, and other threads may be using the original.
        """
        return tokenizers.Tokenizer.from_str(self.backend.to_str())

    def _byte_level_token_ranges(self, tokens: list[str], text: str) -> list[tuple[int, int]] | None:
        """Return exact byte ranges if the vocabulary is byte-level, so that each character of a token is one byte."""
        if not isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel):
            return None
        ends = [0]
        for token in tokens:
            ends.append(ends[-1] + len(token))
        return list(pairwise(ends)) if ends[-1] == len(text.encode()) else None

    def _check_ids(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InputError(f"id {token_id} is out of range for a vocabulary of {self.vocab_size} tokens")


def _character_to_byte_spans(character_offsets: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Convert character offsets to byte offsets."""
    ends = [0]
    for character in text:
        ends.append(ends[-1] + len(character.encode()))
    return [(ends[start], ends[end]) for start, end in character_offsets]


def check_encodable(text: str) -> None:
    """Raise `InputError` if a text contains unpaired surrogates, which cannot be encoded as UTF-8."""
    if not text.isascii():  # isascii() takes constant time
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"character {error.start} of the text is an unpaired surrogate") from None


def encode_texts(
    tokenizer: Tokenizer, rows: Sequence[tuple[str, ...]], *, parse_special_tokens: bool = False
) -> list[Encoding]:
    """Encode rows of one text `(text,)` or two texts `(text, text)` without truncation."""
    for row in rows:
        for text in row:
            check_encodable(text)
    inputs = [row[0] if len(row) == 1 else row for row in rows]
    with convert_errors_to_input_error("the texts cannot be encoded"):
        backend = tokenizer.special_parsing_backend if parse_special_tokens else tokenizer.backend
        return [Encoding(encoding.ids, encoding.type_ids) for encoding in backend.encode_batch_fast(inputs)]


def encode_truncated(
    tokenizer: Tokenizer, row: tuple[str, ...], max_length: int, *, parse_special_tokens: bool = False
) -> Encoding:
    """Encode a text or text pair and truncate it to `max_length` tokens, including special tokens.

    The longer text of a pair is truncated first.
    """
    backend = tokenizer.special_parsing_backend if parse_special_tokens else tokenizer.backend
    with convert_errors_to_input_error("the text cannot be encoded"):
        encodings = [backend.encode(text, add_special_tokens=False) for text in row]
        budget = max_length - backend.num_special_tokens_to_add(is_pair=len(encodings) == 2)
        lengths = [len(encoding.ids) for encoding in encodings]
        if len(encodings) == 1:
            limits = [budget]
        else:
            shorter = min(*lengths, budget // 2)
            limits = [shorter, budget - shorter] if lengths[0] <= lengths[1] else [budget - shorter, shorter]
        for encoding, limit in zip(encodings, limits, strict=True):
            encoding.truncate(limit)
        combined = backend.post_process(encodings[0], encodings[1] if len(encodings) == 2 else None)
        return Encoding(combined.ids, combined.type_ids)


def split_into_chunks(text: str, *, max_characters: int = MAX_CHUNK_CHARACTERS) -> Iterator[str]:
    """Split a long text into chunks of at most `max_characters` characters without changing its tokens.

    The text is split before a single space between two non-space characters. In common tokenizers (byte-level patterns
    of GPT-2 and later, words of BERT, ▁words of SentencePiece), no token crosses such a split point, so the chunks have
    the same tokens as the text. In two rare cases, one or two tokens at the split differ: a run of `max_characters`
    characters without a split point is split anyway, and tokenizers that prepend a space to every text (Llama 2)
    prepend one to every chunk.
    """
    start = 0
    while len(text) - start > max_characters:
        end = find_last_split_point_or_stop(text, start=start, stop=start + max_characters)
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def find_last_split_point_or_stop(text: str, *, start: int, stop: int) -> int:
    """Return the last split point before `stop`, or `stop` if there is no split point after `start`."""
    end = stop
    while (space := text.rfind(" ", start + 1, end)) >= 0:
        if _SPLIT_POINT.match(text, space):
            return space
        end = space
    return stop


class StreamingDecoder:
    """Incremental decoder whose concatenated outputs equal the result of `Tokenizer.decode` for all ids.

    The decoder holds back text that later ids may change: incomplete characters and runs of byte tokens such as
    `<0xF0>`.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
    ) -> None:
        """Create a decoder for text that continues the text of `context_ids`.

        The context matters because SentencePiece decoders remove a space at the start of a text.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # A token's text depends at most on the previous token, so the ids of the last output are sufficient context.
        self._context = [token_id for token_id in context_ids if token_id not in tokenizer.special_ids]
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """Add an id and return the newly completed text, which may be empty."""
        token = self._tokenizer.id_to_token(token_id)
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        text = self.pending_text
        if not text or text.endswith(_UNFINISHED) or _BYTE.fullmatch(token):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """Return the pending text. Incomplete characters become U+FFFD, as in `Tokenizer.decode`."""
        text = self.pending_text
        self._context, self._pending = [], []
        return text

    @property
    def pending_text(self) -> str:
        """Text that the decoder is holding back, decoded as if no more ids followed."""
        context = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)[len(context) :]


def stream_text(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool = True) -> Iterator[str]:
    """Decode ids incrementally, and yield each non-empty piece of text as soon as it is complete."""
    decoder = StreamingDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    for token_id in ids:
        if text := decoder.add(token_id):
            yield text
    if text := decoder.finish():
        yield text


@contextmanager
def convert_errors_to_input_error(context: str) -> Iterator[None]:
    """Convert exceptions from `tokenizers`, including Rust panics, to an `InputError` that starts with `context`."""
    try:
        yield
    except (QKVError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException, not an Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{context}: {reason[:300]}") from None


@contextmanager
def suppress_stderr() -> Iterator[None]:
    """Redirect file descriptor 2 to /dev/null.

    Rust prints panics to standard error before Python can catch them. The converted exception contains the message
    instead.
    """
    sys.stderr.flush()
    try:
        original = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(null)


def parse_encodable_json(text: str) -> Any:  # noqa: ANN401 - any JSON value, checked by the callers
    """Parse JSON and check that all strings can be encoded as UTF-8.

    Unpaired surrogates (written as escapes) would otherwise fail later, wherever the string is first used.
    """
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value
