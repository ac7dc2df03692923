"""Small BERTs with random weights, and a matching WordPiece tokenizer."""

from functools import cache
from typing import Any

import torch

from qkv.choices import TokenizerKind
from qkv.config import BERTConfig
from qkv.models import BERT
from qkv.text import Tokenizer, train_tokenizer
from qkv.weights.model_loader import ModelBundle
from tests.weights.loaded_models import TEXTS

SHAPE = {"vocab_size": 97, "context_length": 41, "d_model": 35, "n_heads": 5, "n_layers": 2, "d_ff": 43}


@cache
def wordpiece_tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerKind.WORDPIECE, TEXTS, vocab_size=SHAPE["vocab_size"], lowercase=True)


def random_bert(**settings: Any) -> ModelBundle:
    model = BERT(BERTConfig(**{**SHAPE, **settings}))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=generator).add_(1.0 if "norm" in key and "bias" not in key else 0.0)
    return ModelBundle(model.eval(), wordpiece_tokenizer())
