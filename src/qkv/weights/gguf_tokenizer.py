"""The tokenizer inside a GGUF file: read into ours, and written from ours."""

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from qkv.choices import Role
from qkv.errors import WeightsError
from qkv.text import Tokenizer
from qkv.weights.pieces import Pieces, tokenizer_from_pieces

ROLES = {
    "bos_token_id": Role.BEGIN,
    "eos_token_id": Role.END,
    "unknown_token_id": Role.UNKNOWN,
    "padding_token_id": Role.PAD,
}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Kind(IntEnum):
    """What a piece is, in GGUF's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER = 4
    UNUSED = 5
    BYTE = 6


def read_tokenizer(given: Mapping[str, Any]) -> Tokenizer:
    """`given`: the file's `tokenizer.ggml.…` settings, without that beginning."""
    roles = {role: given[key] for key, role in ROLES.items() if key in given}
    for role, number in roles.items():
        if not 0 <= number < len(given["tokens"]):
            raise WeightsError(f"{role.value} is id {number}, but the tokenizer has {len(given['tokens'])} pieces")
    match given["model"]:
        case "gpt2":
            return _read_byte_level(given, roles)
        case "llama":
            kinds = given.get("token_type", [Kind.NORMAL] * len(given["tokens"]))
            return tokenizer_from_pieces(
                Pieces(
                    tokens=given["tokens"],
                    scores=given["scores"],
                    control=frozenset(i for i, kind in enumerate(kinds) if kind in (Kind.CONTROL, Kind.UNKNOWN)),
                    roles={Role.UNKNOWN: 0, **roles},
                    add_blank=given.get("add_space_prefix", True),
                    add_begin=given.get("add_bos_token", True),
                )
            )
        case other:
            raise WeightsError(f"a tokenizer of kind {other!r} is not supported; gpt2 and llama are")


def write_tokenizer(tokenizer: Tokenizer, *, n_rows: int) -> dict[str, Any]:
    """The settings that `read_tokenizer` takes, for a model with so many rows; unused ones get a name."""
    state = json.loads(tokenizer.backend.to_str())
    if state["model"]["type"] != "BPE":
        raise WeightsError(f"a {state['model']['type']} tokenizer has no form in GGUF; a BPE has")
    names = {number: token for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    tokens = [names.get(i, f"[unused{i}]") for i in range(n_rows)]
    begin = tokenizer.find(Role.BEGIN)
    bare = tokenizer.encode("a", add_specials=False)
    settings: dict[str, Any] = {
        "tokens": tokens,
        "token_type": [int(_kind(tokenizer, i, names)) for i in range(n_rows)],
        "add_bos_token": begin is not None and tokenizer.encode("a") == [begin, *bare],
        **{key: number for key, role in ROLES.items() if (number := tokenizer.find(role)) is not None},
    }
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in state["model"]["merges"]]
    if isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
        spelt = [" ".join(pair) for pair in merges]
        return {"model": "gpt2", "pre": _name_of(state["pre_tokenizer"]), "merges": spelt, **settings}
    if not state["model"]["byte_fallback"] or state["pre_tokenizer"] is not None:
        raise WeightsError("this BPE tokenizer has no form in GGUF; byte-level and SentencePiece's have")
    scores: dict[str, float] = {}
    for rank, pair in enumerate(merges):
        scores.setdefault("".join(pair), -float(rank))
    steps = [step["type"] for step in state["normalizer"]["normalizers"]]
    return {
        "model": "llama",
        "scores": [scores.get(token, 0.0) for token in tokens],
        "add_space_prefix": "Prepend" in steps,
        **settings,
    }


def _read_byte_level(given: Mapping[str, Any], roles: Mapping[Role, int]) -> Tokenizer:
    tokens, name = given["tokens"], given.get("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise WeightsError(f"tokenizer.ggml.pre={name!r} is not supported; known: {', '.join(PRE_TOKENIZERS)}")
    merges = [tuple(pair.split(" ")) for pair in given["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = PRE_TOKENIZERS[name]
    backend.decoder = decoders.ByteLevel()
    kinds = given.get("token_type", [Kind.NORMAL] * len(tokens))
    named = {i for i, kind in enumerate(kinds) if kind == Kind.CONTROL} | set(roles.values())
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(named)])
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i, kind in enumerate(kinds) if kind == Kind.USER])
    begin = roles.get(Role.BEGIN)
    if begin is not None and given.get("add_bos_token", name == "llama-bpe"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[begin]} $A", pair=f"{tokens[begin]} $A $B:1", special_tokens=[(tokens[begin], begin)]
        )
    return Tokenizer(backend, {role: tokens[i] for role, i in roles.items()})


def _kind(tokenizer: Tokenizer, number: int, names: Mapping[int, str]) -> Kind:
    if number not in names:
        return Kind.UNUSED
    if number == tokenizer.find(Role.UNKNOWN) and number not in (tokenizer.find(Role.BEGIN), tokenizer.find(Role.END)):
        return Kind.UNKNOWN
    if number in tokenizer.special_ids:
        return Kind.CONTROL
    if number in tokenizer.backend.get_added_tokens_decoder():
        return Kind.USER
    token = names[number]
    return Kind.BYTE if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else Kind.NORMAL


def _byte_level(*, use_regex: bool = True) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


PRE_TOKENIZERS: dict[str, Any] = {
    "gpt-2": _byte_level(),
    "default": _byte_level(),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), _byte_level(use_regex=False)]
    ),
}
"""How a text is cut before pieces are sought, by llama.cpp's names; where one has several, the first is written."""


def _name_of(state: Mapping[str, Any] | None) -> str:
    for name, known in PRE_TOKENIZERS.items():
        if json.loads(known.__getstate__()) == state:
            return name
    kind = None if state is None else state["type"]
    raise WeightsError(f"a byte-level tokenizer cut by {kind} has no name in GGUF; known: {', '.join(PRE_TOKENIZERS)}")
