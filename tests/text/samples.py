"""Texts and small trained tokenizers for tests."""

import os
from functools import cache
from pathlib import Path

import pytest

from qkv.choices import SpecialTokenStyle, TokenizerKind
from qkv.text import Tokenizer, train_tokenizer

TEXTS = [
    "The cat sat on the mat, and the dog sat by the cat.\nThen both of them slept.",
    "El niño comió una manzana; después durmió. ¿Qué más quería?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 😀 👩‍👩‍👧 …",
    "It's  two  blanks,\ttabs and\n\nblank lines; 1,234 numbers don't matter.",
] * 7
DATA = Path(os.environ.get("QKV_DATA", Path(__file__).parents[3] / "shared" / "data"))


def published(name: str) -> Path:
    path = DATA / "weights" / name
    if not path.is_file():
        pytest.skip(f"{name} is not available; set QKV_DATA to the folder of published files")
    return path


@cache
def trained(kind: TokenizerKind, style: SpecialTokenStyle | None = None, vocab_size: int = 401) -> Tokenizer:
    return train_tokenizer(kind, TEXTS, vocab_size=vocab_size, style=style)
