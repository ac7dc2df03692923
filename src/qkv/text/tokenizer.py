"""Provide a tokenizer class that is a thin immutable wrapper around Hugging Face `tokenizers`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise

import tokenizers

from qkv.choices import SpecialToken
from qkv.errors import InputError
from qkv.text.rust_errors import convert_errors_to_input_error


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
