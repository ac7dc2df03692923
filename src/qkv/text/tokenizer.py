"""Text to ids and back: one thin, frozen layer over Hugging Face `tokenizers`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise

import tokenizers

from qkv.choices import SpecialToken
from qkv.errors import InputError
from qkv.text.rust_errors import convert_rust_errors


@dataclass(frozen=True)
class TokenSpan:
    """One token of a text, and the UTF-8 bytes of the text it stands for."""

    id: int
    token: str
    """As the vocabulary spells it (`Ġdog`, `##ing`)."""
    start: int
    end: int


@dataclass(frozen=True)
class Encoding:
    ids: list[int]
    segments: list[int]
    """0 for the first text and what stands around it, 1 for the second."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A trained tokenizer.

    **A user's text is text**: where it spells a special token (`<|endoftext|>`), the spelling is encoded
    letter by letter, so no one can smuggle in a control token; `parse_special_tokens=True` asks for the other reading.
    What a file says about truncation and padding is switched off: nothing is ever cut in silence.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[SpecialToken, str]
    """The special token that plays each role; one token may play two."""
    name: str = "the tokenizer"
    """What errors call it: its file, where it has one."""

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        for role, token in self.special_tokens.items():
            if self.backend.token_to_id(token) is None:
                raise InputError(f"{role}={token!r} is not in the tokenizer's vocabulary")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the greatest id: the rows an embedding needs, even where ids have gaps."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that give the same ids and the same roles."""
        state = json.dumps([self.backend.to_str(), sorted(self.special_tokens.items())])
        return blake2b(state.encode(), digest_size=32).hexdigest()

    def find_special_id(self, role: SpecialToken) -> int | None:
        """The id that plays a role, or None where no token does."""
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    def special_id(self, role: SpecialToken) -> int:
        """As `find_special_id`, for those who cannot go on without."""
        found = self.find_special_id(role)
        if found is None:
            known = ", ".join(role.value for role in self.special_tokens) or "none"
            raise InputError(f"{self.name} has no {role.value} (it has: {known})")
        return found

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Every id that is a control token, with a role or without."""
        added = self.backend.get_added_tokens_decoder()
        roles = {self.special_id(role) for role in self.special_tokens}
        return frozenset(roles | {token_id for token_id, token in added.items() if token.special})

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> list[int]:
        """`add_special_tokens` puts around the text what the tokenizer's template says ([CLS] … [SEP], or nothing)."""
        with convert_rust_errors("the text cannot be encoded"):
            check_encodable(text)
            backend = self.special_parsing_backend if parse_special_tokens else self.backend
            return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, parse_special_tokens: bool = False
    ) -> list[list[int]]:
        """Many texts at once: the same ids, in less time, and other Python threads run meanwhile."""
        with convert_rust_errors("the texts cannot be encoded"):
            for text in texts:
                check_encodable(text)
            backend = self.special_parsing_backend if parse_special_tokens else self.backend
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]

    def encode_pair(self, first: str, second: str, *, parse_special_tokens: bool = False) -> Encoding:
        """Two texts in one sequence, as BERT reads them: [CLS] first [SEP] second [SEP]."""
        with convert_rust_errors("the pair cannot be encoded"):
            check_encodable(first)
            check_encodable(second)
            backend = self.special_parsing_backend if parse_special_tokens else self.backend
            encoding = backend.encode(first, second)
            return Encoding(ids=encoding.ids, segments=encoding.type_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that are no whole character become U+FFFD."""
        self._check_ids(ids)
        with convert_rust_errors("the ids cannot be decoded"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str:
        """How the vocabulary spells an id; empty for a gap in the ids."""
        self._check_ids([token_id])
        return self.backend.id_to_token(token_id) or ""

    def token_spans(self, text: str, *, parse_special_tokens: bool = False) -> list[TokenSpan]:
        """The text's own tokens with their bytes. Several may share the bytes of one character they divide."""
        with convert_rust_errors("the text cannot be encoded"):
            check_encodable(text)
            backend = self.special_parsing_backend if parse_special_tokens else self.backend
            encoding = backend.encode(text, add_special_tokens=False)
        spans = self._byte_level_spans(encoding.tokens, text) or _byte_spans(encoding.offsets, text)
        return [
            TokenSpan(id=token_id, token=token, start=start, end=end)
            for token_id, token, (start, end) in zip(encoding.ids, encoding.tokens, spans, strict=True)
        ]

    @cached_property
    def special_parsing_backend(self) -> tokenizers.Tokenizer:
        """A backend that reads spelt special tokens as tokens.

        It is a copy, for the switch is the backend's state and other threads may be using it.
        """
        return tokenizers.Tokenizer.from_str(self.backend.to_str())

    def _byte_level_spans(self, tokens: list[str], text: str) -> list[tuple[int, int]] | None:
        """Exact even inside a character: in a byte-level vocabulary each letter of a token is one byte."""
        if not isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel):
            return None
        ends = [0]
        for token in tokens:
            ends.append(ends[-1] + len(token))
        return list(pairwise(ends)) if ends[-1] == len(text.encode()) else None

    def _check_ids(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InputError(f"id {token_id} is outside the tokenizer's vocabulary of {self.vocab_size}")


def _byte_spans(offsets: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    ends = [0]
    for character in text:
        ends.append(ends[-1] + len(character.encode()))
    return [(ends[start], ends[end]) for start, end in offsets]


def check_encodable(text: str) -> None:
    if not text.isascii():  # a flag of the string: costs nothing
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"character {error.start} of the text is half a surrogate pair") from None
