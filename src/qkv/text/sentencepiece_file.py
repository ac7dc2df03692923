"""Read SentencePiece model files (`.spm`, `spiece.model`)."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from qkv.errors import InputError

UNIGRAM = 1
"""Value of `model_type` for unigram models. BPE models have the value 2."""


class SentencePieceTokenKind(IntEnum):
    """Kind of a SentencePiece piece. The enum values match sentencepiece_model.proto."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """The piece is never matched in texts."""
    USER_DEFINED = 4
    """The piece is always a single token."""
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class SentencePieceFile:
    """Fields of sentencepiece_model.proto that affect tokenization."""

    tokens: list[tuple[str, float, SentencePieceTokenKind]]
    """Spelling, log p and kind of each piece, sorted by id."""
    model_type: int = UNIGRAM
    split_by_whitespace: bool = True
    charsmap: bytes = b""
    """Compiled table of character replacements, which may be empty."""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_sentencepiece(file: Path) -> SentencePieceFile:
    """Parse a SentencePiece model file.

    The protobuf message is parsed here because the sentencepiece library does not expose all fields.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        return _parse_sentencepiece_model(data)
    except (IndexError, ValueError, struct.error) as error:
        raise InputError(f"{file}: not a SentencePiece model: {error}") from None


def _parse_sentencepiece_model(data: bytes) -> SentencePieceFile:
    tokens: list[tuple[str, float, SentencePieceTokenKind]] = []
    trainer: dict[int, bytes | int] = {}
    normalizer: dict[int, bytes | int] = {}
    for number, value in _iterate_protobuf_fields(data):
        match number:
            case 1:
                token_fields = dict(_iterate_protobuf_fields(_expect_bytes(value)))
                if 1 not in token_fields:
                    raise ValueError(f"vocabulary entry {len(tokens)} has no text (field 1)")
                (score,) = struct.unpack("<f", _expect_bytes(token_fields.get(2, b"\0" * 4)))
                tokens.append(
                    (
                        _expect_bytes(token_fields[1]).decode(),
                        score,
                        SentencePieceTokenKind(int(token_fields.get(3, SentencePieceTokenKind.NORMAL))),
                    )
                )
            case 2:
                trainer = dict(_iterate_protobuf_fields(_expect_bytes(value)))
            case 3:
                normalizer = dict(_iterate_protobuf_fields(_expect_bytes(value)))
            case _:
                pass
    if not tokens:
        raise ValueError("the model has 0 pieces")
    return SentencePieceFile(
        tokens=tokens,
        model_type=int(trainer.get(3, UNIGRAM)),
        split_by_whitespace=bool(trainer.get(22, True)),
        charsmap=_expect_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, True)),
        remove_extra_whitespaces=bool(normalizer.get(4, True)),
    )


def _expect_bytes(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ValueError(f"expected bytes, got the number {value}")  # noqa: TRY004 - the file is invalid
    return value


def _iterate_protobuf_fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and value of each field of a protobuf message.

    Values are integers (varints) or bytes (including fixed-width numbers).
    """
    offset = 0
    while offset < len(data):
        key, offset = _read_varint(data, offset)
        match key & 7:
            case 0:
                value, offset = _read_varint(data, offset)
                yield key >> 3, value
                continue
            case 1:
                n = 8
            case 2:
                n, offset = _read_varint(data, offset)
            case 5:
                n = 4
            case kind:
                raise ValueError(f"byte {offset}: invalid wire type {kind}")
        if offset + n > len(data):
            raise ValueError(f"byte {offset}: expected a field of {n} bytes, but only {len(data) - offset} remain")
        yield key >> 3, data[offset : offset + n]
        offset += n


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Decode a varint (seven bits per byte, least significant first) and return the number and the next offset."""
    number = shift = 0
    while True:
        byte = data[offset]
        number |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return number, offset
        if shift > 63:
            raise ValueError(f"byte {offset}: a varint exceeds 64 bits")
