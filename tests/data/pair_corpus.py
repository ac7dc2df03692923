"""Small translation pairs and stores for tests."""

import random
from functools import cache
from pathlib import Path

from qkv.choices import SpecialTokenStyle, TokenizerKind
from qkv.data.pair_store import PairStore, tokenize_and_delete_pair_texts, write_pair_texts_and_counts
from qkv.text import Tokenizer, train_tokenizer

LETTERS = "abcdefgh"


def reversed_pairs(n: int, *, shortest: int = 1, longest: int = 6, seed: int = 0) -> list[tuple[str, str]]:
    """Lowercase letters as sources, and the same letters reversed in uppercase as targets."""
    generator = random.Random(seed)
    texts = [generator.choices(LETTERS, k=generator.randint(shortest, longest)) for _ in range(n)]
    return [(" ".join(text), " ".join(text[::-1]).upper()) for text in texts]


def write_tsv(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return path


@cache
def pair_tokenizer() -> Tokenizer:
    texts = [" ".join(LETTERS), " ".join(LETTERS.upper())] * 9
    return train_tokenizer(
        TokenizerKind.BPE, texts, vocab_size=280, style=SpecialTokenStyle.SEQ2SEQ, add_prefix_space=True
    )


def pair_store(folder: Path, files: dict[str, list[tuple[str, str]]]) -> PairStore:
    write_pair_texts_and_counts(files, folder, dropped={})
    tokenize_and_delete_pair_texts(
        folder, dict.fromkeys(("source", "target"), pair_tokenizer()), progress=lambda _: lambda _n, _all: None
    )
    return PairStore.open(folder)
