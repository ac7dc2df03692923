"""A BERT that is small enough to be fine-tuned in a second, and tasks that it can learn."""

import random
from pathlib import Path

from qkv.choices import TokenizerKind
from qkv.config import BERTConfig
from qkv.models import BERT
from qkv.text import Tokenizer, train_tokenizer
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import save_hf

GOOD, BAD = ("fine", "lovely", "great"), ("dull", "awful", "poor")
PLAIN = ("the", "film", "was", "story", "it", "and")


def words(seed: int, kind: tuple[str, ...]) -> str:
    rng = random.Random(seed)
    text = [*rng.choices(PLAIN, k=rng.randrange(2, 9)), rng.choice(kind)]
    rng.shuffle(text)
    return " ".join(text)


def reviews(n: int, *, seed: int = 0) -> list[tuple[str, str]]:
    return [(words(seed + i, GOOD if i % 3 else BAD), "good" if i % 3 else "bad") for i in range(n)]


def small_tokenizer() -> Tokenizer:
    texts = [" ".join((*GOOD, *BAD, *PLAIN))] * 9
    return train_tokenizer(TokenizerKind.WORDPIECE, texts, vocab_size=150)


def small_bert(tokenizer: Tokenizer, *, seed: int = 1, **changes) -> BERT:
    config = BERTConfig(
        vocab_size=tokenizer.vocab_size,
        context_length=23,
        n_layers=2,
        d_model=22,
        n_heads=2,
        d_ff=37,
        init_std=0.1,
        masked_lm_head=True,
        next_sentence_head=True,
    )
    return BERT(config.replace(**changes), seed=seed)


def model_folder(path: Path, **changes) -> Path:
    tokenizer = small_tokenizer()
    save_hf(ModelBundle(small_bert(tokenizer, **changes), tokenizer), path)
    return path


def write_tsv(path: Path, rows: list[tuple], header: str = "text\tlabel") -> Path:
    path.write_text("\n".join([header, *("\t".join(map(str, row)) for row in rows)]) + "\n")
    return path
