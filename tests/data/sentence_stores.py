"""Small sentence stores for tests. Each document has different words."""

from functools import cache
from pathlib import Path

import numpy as np

from qkv.choices import TokenizerKind
from qkv.config.recipe import MaskingConfig
from qkv.data.masked_batches import MaskedBatches
from qkv.data.sentence_store import SentenceStore, prepare_sentence_store
from qkv.text import Tokenizer, train_tokenizer

N_DOCUMENTS, N_SENTENCES = 29, 13


def sentence(document: int, number: int) -> str:
    return " ".join(f"word{document}x{number}y{n}" for n in range(3 + (document + number) % 5)) + "."


def document(number: int) -> str:
    return " ".join(sentence(number, n).capitalize() for n in range(N_SENTENCES))


@cache
def tokenizer() -> Tokenizer:
    texts = [document(number) for number in range(N_DOCUMENTS)]
    return train_tokenizer(TokenizerKind.WORDPIECE, texts, vocab_size=307, lowercase=True)


def store_of(folder: Path, documents: list[str], **options) -> SentenceStore:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    return prepare_sentence_store([folder / "text.txt"], folder / "store", tokenizer=tokenizer(), **options)


def small_store(folder: Path) -> SentenceStore:
    return store_of(folder, [document(number) for number in range(N_DOCUMENTS)])


def batches(
    source: SentenceStore, *, seq_len: int = 61, batch_size: int = 23, seed: int = 0, **masking
) -> MaskedBatches:
    config = MaskingConfig(**masking)
    return MaskedBatches(
        source=source, tokenizer=tokenizer(), config=config, seq_len=seq_len, batch_size=batch_size, seed=seed
    )


def unmasked(batch) -> np.ndarray:
    """Return the rows of a batch before masking."""
    ids = batch.ids.clone()
    used = batch.targets >= 0
    rows = used.nonzero()[:, 0]
    ids[rows, batch.masked_positions[used]] = batch.targets[used]
    return ids.numpy()
