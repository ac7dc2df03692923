"""Read SentencePiece model files (`.spm`, `spiece.model`), and convert unigram models (T5, Marian) to `tokenizers`."""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from qkv.errors import InputError

UNIGRAM = 1
"""Value of `model_type` for unigram models. BPE models have the value 2."""


SPACE_SYMBOL = "▁"
END, UNKNOWN, PAD = "</s>", "<unk>", "<pad>"
UNUSED_SCORE = -1e6
"""Score for ids without a piece in the file. These ids are never used because the score is far below any sum of log p.
"""


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


def build_unigram_sentencepiece_backend(
    file: Path, vocabulary: Mapping[str, int] | None = None, *, n_sentinels: int = 0
) -> tokenizers.Tokenizer:
    """Build a `tokenizers` backend from a SentencePiece model. `</s>` is appended to each text.

    `vocabulary` maps pieces to ids (Marian). By default, the id of a piece is its index in the file (T5). Pieces that
    are missing from the vocabulary are split into smaller ones, whereas Marian's own tokenizer returns <unk>.
    `n_sentinels` is the number of T5 sentinel tokens `<extra_id_99>` … `<extra_id_0>`, which follow the pieces.
    """
    spm = read_sentencepiece(file)
    if spm.model_type != UNIGRAM:
        raise InputError(
            f"{file}: model_type={spm.model_type} is not supported; the only supported value is {UNIGRAM} (unigram). "
            "Use a tokenizer.json instead"
        )
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(n_sentinels))]
    scores = {
        token: UNUSED_SCORE if kind is SentencePieceTokenKind.UNUSED else score for token, score, kind in spm.tokens
    }
    scores |= dict.fromkeys(sentinels, 0.0)
    names = list(scores) if vocabulary is None else _tokens_in_consecutive_id_order(file, vocabulary)
    for needed in (END, UNKNOWN):
        if needed not in names:
            raise InputError(f"{file}: {needed} is missing from the {len(names)} pieces")
    model = models.Unigram(
        [(name, scores.get(name, UNUSED_SCORE)) for name in names],
        unk_id=names.index(UNKNOWN),
        byte_fallback="<0x0A>" in names,
    )
    control = {
        token
        for token, _, kind in spm.tokens
        if kind in (SentencePieceTokenKind.CONTROL, SentencePieceTokenKind.UNKNOWN)
    }
    special = [name for name in names if name in control | {END, UNKNOWN, PAD, *sentinels}]
    # In multilingual models, a token such as >>fr<< at the start of the text selects the target language.
    languages = [name for name in names if re.fullmatch(r">>.+<<", name)]
    backend = tokenizers.Tokenizer(model)
    _set_normalizer_pre_tokenizer_decoder(backend, spm, special)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in languages])
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B:1 {END}:1", special_tokens=[(END, names.index(END))]
    )
    return backend


def _tokens_in_consecutive_id_order(file: Path, vocabulary: Mapping[str, int]) -> list[str]:
    names = sorted(vocabulary, key=lambda name: vocabulary[name])
    for number, name in enumerate(names):
        if vocabulary[name] != number:
            raise InputError(f"{file}: the vocabulary has no id {number}; ids must be consecutive and start at 0")
    return names


def _set_normalizer_pre_tokenizer_decoder(
    backend: tokenizers.Tokenizer, spm: SentencePieceFile, special: list[str]
) -> None:
    """Set the backend's normalizer, pre-tokenizer and decoder."""
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(spm.charsmap)] if spm.charsmap else []
    if spm.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if spm.add_dummy_prefix else "never"
    # Control tokens that occur in a text are treated as ordinary text. Splitting each of them after the first character
    # prevents a match.
    control_pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in special)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE_SYMBOL, prepend_scheme=scheme, split=spm.split_by_whitespace),
            pre_tokenizers.Split(Regex(control_pattern), "isolated"),
        ]
    )
    words = decoders.Metaspace(replacement=SPACE_SYMBOL, prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), words]) if _has_byte_tokens(spm) else words


def _has_byte_tokens(spm: SentencePieceFile) -> bool:
    return any(kind is SentencePieceTokenKind.BYTE for *_, kind in spm.tokens)
