"""Convert SentencePiece unigram models (T5, Marian) to `tokenizers`."""

import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from qkv.errors import InputError
from qkv.text.sentencepiece_file import UNIGRAM, SentencePieceFile, SentencePieceTokenKind, read_sentencepiece

SPACE_SYMBOL = "▁"
END, UNKNOWN, PAD = "</s>", "<unk>", "<pad>"
UNUSED_SCORE = -1e6
"""Score for ids without a piece in the file. These ids are never used because the score is far below any sum of log p.
"""


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
