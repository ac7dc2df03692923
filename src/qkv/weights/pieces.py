"""A tokenizer from a list of pieces with scores, as SentencePiece's BPE has them (Llama 2, llama2.c, GGUF).

SentencePiece joins the two neighbours whose piece has the best score; `tokenizers` joins by a list of merges. The
list is made from the scores: every way to cut a piece into two others, best pieces first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from qkv.choices import Role
from qkv.errors import WeightsError
from qkv.text import Tokenizer

BLANK = "▁"


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A vocabulary in the order of its ids; a blank is written ▁, a byte `<0x0A>`."""

    tokens: Sequence[str]
    scores: Sequence[float]
    control: frozenset[int]
    """Ids that no text spells."""
    roles: Mapping[Role, int]
    add_blank: bool = True
    """A blank goes before every text."""
    add_begin: bool = True
    """The token for the beginning goes before every text."""


def tokenizer_from_pieces(pieces: Pieces) -> Tokenizer:
    vocabulary = _vocabulary(pieces)
    unknown = pieces.roles.get(Role.UNKNOWN)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(pieces),
            unk_token=None if unknown is None else pieces.tokens[unknown],
            byte_fallback="<0x0A>" in vocabulary,
            fuse_unk=True,
        )
    )
    steps = [normalizers.Replace(" ", BLANK)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), *steps] if pieces.add_blank else list(steps))
    strip = [decoders.Strip(" ", left=1)] if pieces.add_blank else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    named = sorted(pieces.control | set(pieces.roles.values()))
    backend.add_special_tokens([AddedToken(pieces.tokens[i], special=True, normalized=False) for i in named])
    begin = pieces.roles.get(Role.BEGIN)
    if pieces.add_begin and begin is not None:
        token = pieces.tokens[begin]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B:1", special_tokens=[(token, begin)]
        )
    return Tokenizer(backend, {role: pieces.tokens[i] for role, i in pieces.roles.items()})


def _vocabulary(pieces: Pieces) -> dict[str, int]:
    vocabulary = {token: number for number, token in enumerate(pieces.tokens)}
    if len(vocabulary) < len(pieces.tokens):
        raise WeightsError(f"the tokenizer names {len(pieces.tokens)} pieces, but only {len(vocabulary)} differ")
    return vocabulary


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    ranks = {
        token: (-score, number)
        for number, (token, score) in enumerate(zip(pieces.tokens, pieces.scores, strict=True))
        if number not in pieces.control
    }
    cuts = [
        (ranks[token], ranks[token[:i]], ranks[token[i:]], token[:i], token[i:])
        for token in ranks
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    return [(first, second) for *_, first, second in sorted(cuts)]
