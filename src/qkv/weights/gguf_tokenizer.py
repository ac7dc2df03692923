"""Convert the tokenizer settings in GGUF files to our tokenizers and back."""

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from qkv.choices import SpecialToken
from qkv.errors import WeightsError
from qkv.text import Tokenizer
from qkv.weights.sentencepiece import SentencePieceVocab, build_sentencepiece_tokenizer

SPECIAL_TOKEN_KEYS = {
    "bos_token_id": SpecialToken.BOS,
    "eos_token_id": SpecialToken.EOS,
    "unknown_token_id": SpecialToken.UNK,
    "padding_token_id": SpecialToken.PAD,
}
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class GGUFTokenType(IntEnum):
    """The token types defined by the GGUF format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER = 4
    UNUSED = 5
    BYTE = 6


def read_gguf_tokenizer(settings: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer from the `tokenizer.ggml.*` settings in a GGUF file. The keys in `settings` omit the prefix."""
    tokens = settings["tokens"]
    special_ids = {role: settings[key] for key, role in SPECIAL_TOKEN_KEYS.items() if key in settings}
    for role, token_id in special_ids.items():
        if not 0 <= token_id < len(tokens):
            raise WeightsError(f"{role.value} has the id {token_id}, but the tokenizer has only {len(tokens)} tokens")
    match settings["model"]:
        case "gpt2":
            return _build_byte_level_tokenizer(settings, special_ids)
        case "llama":
            types = settings.get("token_type", [GGUFTokenType.NORMAL] * len(tokens))
            control_types = (GGUFTokenType.CONTROL, GGUFTokenType.UNKNOWN)
            return build_sentencepiece_tokenizer(
                SentencePieceVocab(
                    tokens=tokens,
                    scores=settings["scores"],
                    control_ids=frozenset(i for i, token_type in enumerate(types) if token_type in control_types),
                    special_ids={SpecialToken.UNK: 0, **special_ids},
                    add_space_prefix=settings.get("add_space_prefix", True),
                    add_bos=settings.get("add_bos_token", True),
                )
            )
        case other:
            raise WeightsError(f"tokenizer.ggml.model={other!r} is not supported; supported values: gpt2, llama")


def gguf_tokenizer_settings(tokenizer: Tokenizer, *, vocab_size: int) -> dict[str, Any]:
    """Convert a tokenizer to the settings that `read_gguf_tokenizer` reads.

    `vocab_size` is the vocabulary size of the model. Ids that the tokenizer does not use get placeholder names.
    """
    state = json.loads(tokenizer.backend.to_str())
    if state["model"]["type"] != "BPE":
        raise WeightsError(f"GGUF only supports BPE tokenizers, got {state['model']['type']}")
    names = {token_id: token for token, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    tokens = [names.get(i, f"[unused{i}]") for i in range(vocab_size)]
    bos_id = tokenizer.find_special_id(SpecialToken.BOS)
    without_special = tokenizer.encode("a", add_special_tokens=False)
    settings: dict[str, Any] = {
        "tokens": tokens,
        "token_type": [int(_token_type(tokenizer, i, names)) for i in range(vocab_size)],
        "add_bos_token": bos_id is not None and tokenizer.encode("a") == [bos_id, *without_special],
        **{
            key: token_id
            for key, role in SPECIAL_TOKEN_KEYS.items()
            if (token_id := tokenizer.find_special_id(role)) is not None
        },
    }
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in state["model"]["merges"]]
    if isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
        joined_merges = [" ".join(pair) for pair in merges]
        pre_tokenizer = _pre_tokenizer_name(state["pre_tokenizer"])
        return {"model": "gpt2", "pre": pre_tokenizer, "merges": joined_merges, **settings}
    if not state["model"]["byte_fallback"] or state["pre_tokenizer"] is not None:
        raise WeightsError("GGUF only supports byte-level and SentencePiece BPE tokenizers")
    scores: dict[str, float] = {}
    for rank, pair in enumerate(merges):
        scores.setdefault("".join(pair), -float(rank))
    normalizers = [step["type"] for step in state["normalizer"]["normalizers"]]
    return {
        "model": "llama",
        "scores": [scores.get(token, 0.0) for token in tokens],
        "add_space_prefix": "Prepend" in normalizers,
        **settings,
    }


def _build_byte_level_tokenizer(settings: Mapping[str, Any], special_ids: Mapping[SpecialToken, int]) -> Tokenizer:
    tokens, name = settings["tokens"], settings.get("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise WeightsError(
            f"tokenizer.ggml.pre={name!r} is not supported; supported values: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [tuple(pair.split(" ")) for pair in settings["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = PRE_TOKENIZERS[name]
    backend.decoder = decoders.ByteLevel()
    types = settings.get("token_type", [GGUFTokenType.NORMAL] * len(tokens))
    control_ids = {i for i, token_type in enumerate(types) if token_type == GGUFTokenType.CONTROL}
    special = sorted(control_ids | set(special_ids.values()))
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])
    user_ids = [i for i, token_type in enumerate(types) if token_type == GGUFTokenType.USER]
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in user_ids])
    bos_id = special_ids.get(SpecialToken.BOS)
    if bos_id is not None and settings.get("add_bos_token", name == "llama-bpe"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", pair=f"{tokens[bos_id]} $A $B:1", special_tokens=[(tokens[bos_id], bos_id)]
        )
    return Tokenizer(backend, {role: tokens[i] for role, i in special_ids.items()})


def _token_type(tokenizer: Tokenizer, token_id: int, names: Mapping[int, str]) -> GGUFTokenType:
    if token_id not in names:
        return GGUFTokenType.UNUSED
    boundary_ids = (tokenizer.find_special_id(SpecialToken.BOS), tokenizer.find_special_id(SpecialToken.EOS))
    if token_id == tokenizer.find_special_id(SpecialToken.UNK) and token_id not in boundary_ids:
        return GGUFTokenType.UNKNOWN
    if token_id in tokenizer.special_ids:
        return GGUFTokenType.CONTROL
    if token_id in tokenizer.backend.get_added_tokens_decoder():
        return GGUFTokenType.USER
    token = names[token_id]
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return GGUFTokenType.BYTE if is_byte else GGUFTokenType.NORMAL


def _byte_level(*, use_regex: bool = True) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


PRE_TOKENIZERS: dict[str, Any] = {
    "gpt-2": _byte_level(),
    "default": _byte_level(),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"), _byte_level(use_regex=False)]
    ),
}
"""The supported pre-tokenizers, keyed by their llama.cpp names. If one has several names, files use the first."""


def _pre_tokenizer_name(state: Mapping[str, Any] | None) -> str:
    for name, pre_tokenizer in PRE_TOKENIZERS.items():
        if json.loads(pre_tokenizer.__getstate__()) == state:
            return name
    kind = None if state is None else state["type"]
    raise WeightsError(
        f"the pre-tokenizer {kind} is not supported by GGUF; supported pre-tokenizers: {', '.join(PRE_TOKENIZERS)}"
    )
