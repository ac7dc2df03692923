"""Build BPE tokenizers from SentencePiece vocabularies with scores (Llama 2, llama2.c, GGUF).

SentencePiece repeatedly merges the adjacent pair that forms the piece with the highest score, whereas `tokenizers`
requires an ordered list of merges. This list is derived from the scores. It contains every split of a piece into two
other pieces, in decreasing order of the score of the piece.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from qkv.choices import SpecialToken
from qkv.errors import WeightsError
from qkv.text import Tokenizer

SPACE_SYMBOL = "▁"


@dataclass(frozen=True, kw_only=True)
class SentencePieceVocab:
    """A vocabulary in id order. Tokens contain ▁ instead of spaces, and byte tokens have the form `<0x0A>`."""

    tokens: Sequence[str]
    scores: Sequence[float]
    control_ids: frozenset[int]
    """The ids that encoding a text never produces."""
    special_ids: Mapping[SpecialToken, int]
    add_space_prefix: bool = True
    """Whether a space is prepended to every text."""
    add_bos: bool = True
    """Whether the BOS token is prepended to every text."""


def build_sentencepiece_tokenizer(vocab: SentencePieceVocab) -> Tokenizer:
    """Build a tokenizer that encodes and decodes text like SentencePiece."""
    token_to_id = _token_to_id(vocab)
    unknown_id = vocab.special_ids.get(SpecialToken.UNK)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=token_to_id,
            merges=_merges_from_scores(vocab),
            unk_token=None if unknown_id is None else vocab.tokens[unknown_id],
            byte_fallback="<0x0A>" in token_to_id,
            fuse_unk=True,
        )
    )
    steps = [normalizers.Replace(" ", SPACE_SYMBOL)]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE_SYMBOL), *steps] if vocab.add_space_prefix else list(steps)
    )
    strip = [decoders.Strip(" ", left=1)] if vocab.add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = sorted(vocab.control_ids | set(vocab.special_ids.values()))
    backend.add_special_tokens([AddedToken(vocab.tokens[i], special=True, normalized=False) for i in special])
    bos_id = vocab.special_ids.get(SpecialToken.BOS)
    if vocab.add_bos and bos_id is not None:
        token = vocab.tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B:1", special_tokens=[(token, bos_id)]
        )
    return Tokenizer(backend, {role: vocab.tokens[i] for role, i in vocab.special_ids.items()})


def _token_to_id(vocab: SentencePieceVocab) -> dict[str, int]:
    token_to_id = {token: token_id for token_id, token in enumerate(vocab.tokens)}
    if len(token_to_id) < len(vocab.tokens):
        raise WeightsError(
            f"the tokenizer has duplicate tokens: {len(vocab.tokens)} tokens, but only {len(token_to_id)} distinct ones"
        )
    return token_to_id


def _merges_from_scores(vocab: SentencePieceVocab) -> list[tuple[str, str]]:
    ranks = {
        token: (-score, token_id)
        for token_id, (token, score) in enumerate(zip(vocab.tokens, vocab.scores, strict=True))
        if token_id not in vocab.control_ids
    }
    splits = [
        (ranks[token], ranks[token[:i]], ranks[token[i:]], token[:i], token[i:])
        for token in ranks
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    return [(first, second) for *_, first, second in sorted(splits)]
