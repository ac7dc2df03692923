"""Small token stores for tests, and a token source that computes its tokens."""

from functools import cache
from pathlib import Path

import numpy as np

from qkv.choices import TokenizerKind
from qkv.data import TokenStore, prepare_store
from qkv.text import Tokenizer, train_tokenizer

TEXTS = [f"Story {n}: " + "the cat sat on the mat and slept. " * (n % 7 + 1) + "ñ😀" for n in range(23)]


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerKind.BPE, TEXTS, vocab_size=277)


def write_texts(folder: Path) -> list[Path]:
    """Write three files: documents with separators, JSON lines, and a single document."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "a.txt", folder / "b.jsonl", folder / "c.txt"]
    paths[0].write_text("\n<|endoftext|>\n".join(TEXTS[:11]))
    paths[1].write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[11:-1]))
    paths[2].write_text(TEXTS[-1])
    return paths


def small_store(folder: Path, **options) -> TokenStore:
    return prepare_store(write_texts(folder / "texts"), folder / "store", tokenizer=tokenizer(), **options)


class ComputedTokens:
    """A token source in which token i is a function of i, with documents of `length` tokens."""

    end_id = 0

    def __init__(self, n_tokens: int, length: int) -> None:
        self.n_tokens = n_tokens
        self.length = length
        self.n_documents = -(-n_tokens // length)

    def read(self, start, stop):
        positions = np.arange(start, stop, dtype=np.int64)
        ends = (positions % self.length == self.length - 1) | (positions == self.n_tokens - 1)
        return np.where(ends, self.end_id, positions % 9973 + 1)

    def document_ids(self, start, stop):
        return np.arange(start, stop, dtype=np.int64) // self.length
