"""A SentencePiece model as a tokenizer: by its own ids (T5), or by those of a vocab.json beside it (Marian)."""

import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from qkv.errors import InputError
from qkv.text.sentencepiece_file import UNIGRAM, PieceKind, SentencePieceFile, read_sentencepiece

SPACE_SYMBOL = "▁"
END, UNKNOWN, PAD = "</s>", "<unk>", "<pad>"
UNUSED_SCORE = -1e6
"""The score of what this file has no piece for: far below any sum of log p, so that no text is cut into it."""


def build_sentencepiece_backend(
    file: Path, vocabulary: Mapping[str, int] | None = None, *, n_sentinels: int = 0
) -> tokenizers.Tokenizer:
    """`vocabulary`: piece to id, where the file's own order is not the ids'. An end follows every text.

    Of a piece that is not in `vocabulary` smaller ones are made, where Marian's own tokenizer gives <unk>.
    `n_sentinels`: `<extra_id_99>` … `<extra_id_0>`, which T5 has after the pieces of its file.
    """
    read = read_sentencepiece(file)
    if read.model_type != UNIGRAM:
        raise InputError(f"{file}: is of model_type {read.model_type}, not {UNIGRAM} (unigram); give a tokenizer.json")
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(n_sentinels))]
    scores = {piece: UNUSED_SCORE if kind is PieceKind.UNUSED else score for piece, score, kind in read.pieces}
    scores |= dict.fromkeys(sentinels, 0.0)
    names = list(scores) if vocabulary is None else _pieces_in_id_order(file, vocabulary)
    for needed in (END, UNKNOWN):
        if needed not in names:
            raise InputError(f"{file}: there is no {needed} among the {len(names)} pieces")
    model = models.Unigram(
        [(name, scores.get(name, UNUSED_SCORE)) for name in names],
        unk_id=names.index(UNKNOWN),
        byte_fallback="<0x0A>" in names,
    )
    control = {piece for piece, _, kind in read.pieces if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN)}
    special = [name for name in names if name in control | {END, UNKNOWN, PAD, *sentinels}]
    # Multilingual models are told a language by a token such as >>fr<<, which users write before their text.
    languages = [name for name in names if re.fullmatch(r">>.+<<", name)]
    backend = tokenizers.Tokenizer(model)
    _set_text_pipeline(backend, read, special)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in languages])
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B:1 {END}:1", special_tokens=[(END, names.index(END))]
    )
    return backend


def _pieces_in_id_order(file: Path, vocabulary: Mapping[str, int]) -> list[str]:
    names = sorted(vocabulary, key=lambda name: vocabulary[name])
    for number, name in enumerate(names):
        if vocabulary[name] != number:
            raise InputError(f"{file}: the vocabulary beside it has no id {number}; ids must go from 0 without gaps")
    return names


def _set_text_pipeline(backend: tokenizers.Tokenizer, read: SentencePieceFile, special: list[str]) -> None:
    """How a text becomes what the pieces are looked for in, and back."""
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(read.charsmap)] if read.charsmap else []
    if read.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if read.add_dummy_prefix else "never"
    # A control token that a text spells is text: its first character stands apart, so that the piece is not found.
    spelt = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in special)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE_SYMBOL, prepend_scheme=scheme, split=read.split_by_whitespace),
            pre_tokenizers.Split(Regex(spelt), "isolated"),
        ]
    )
    words = decoders.Metaspace(replacement=SPACE_SYMBOL, prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), words]) if _has_byte_pieces(read) else words


def _has_byte_pieces(read: SentencePieceFile) -> bool:
    return any(kind is PieceKind.BYTE for *_, kind in read.pieces)
