"""Small GPTs with random weights, and matching tokenizers."""

from functools import cache

import torch

from qkv.choices import SpecialToken, TokenizerKind
from qkv.config import GPTConfig
from qkv.models import GPT
from qkv.text import Tokenizer, train_tokenizer
from qkv.weights.model_loader import ModelBundle
from qkv.weights.sentencepiece import SentencePieceVocab, build_sentencepiece_tokenizer

TEXTS = ["The cat sat on the mat, and the dog sat by the cat.\nThen both slept. El niño comió 12 manzanas 😀."] * 5
VOCAB_SIZE = 307
LLAMA = {
    "activation": "silu", "gated": True, "norm": "rms", "positions": "rotary",
    "attention_bias": False, "feed_forward_bias": False,
}  # fmt: skip
SHAPES = {
    "gpt2": GPTConfig(vocab_size=VOCAB_SIZE, context_length=83, d_model=35, n_heads=5, n_layers=2),
    "llama, group size 2": GPTConfig(
        vocab_size=VOCAB_SIZE, context_length=89, d_model=36, n_heads=6, n_kv_heads=3, n_layers=3, d_ff=47, **LLAMA
    ),
    "llama, group size 5, untied": GPTConfig(
        vocab_size=VOCAB_SIZE, context_length=79, d_model=40, n_heads=5, n_kv_heads=1, n_layers=2, d_ff=64,
        tie_embeddings=False, rope_theta=5000.0, norm_eps=1e-6, **LLAMA,
    ),
}  # fmt: skip


@cache
def byte_level_tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerKind.BPE, TEXTS, vocab_size=VOCAB_SIZE)


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """Tokenizer like that of Llama 2: tokens with scores, and bytes for all other characters."""
    words = ["▁", "▁t", "h", "e", "he", "▁the", "c", "a", "t", "at", "cat", "▁c", "▁cat", "s", "▁s", "▁sat", "▁sa"]
    reserved = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return build_sentencepiece_tokenizer(
        SentencePieceVocab(
            tokens=[*reserved, *words],
            scores=[0.0] * len(reserved) + [-float(i) for i in range(len(words))],
            control_ids=frozenset({0, 1, 2}),
            special_ids={SpecialToken.UNK: 0, SpecialToken.BOS: 1, SpecialToken.EOS: 2},
        )
    )


def random_model(name: str, *, tokenizer: Tokenizer | None = None) -> ModelBundle:
    model = GPT(SHAPES[name])
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=generator).add_(1.0 if "norm" in key and "bias" not in key else 0.0)
    return ModelBundle(model.eval(), tokenizer or byte_level_tokenizer())


def assert_same_weights(first: ModelBundle, second: ModelBundle) -> None:
    expected, actual = first.model.state_dict(), second.model.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())
