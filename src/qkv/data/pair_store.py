"""Store translation pairs on disk as two token stores whose documents are aligned.

pairs.json    number of pairs per file, and number of dropped pairs by reason
source/       a token store
target/       a token store
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qkv.config.base import Config
from qkv.data.documents import ProgressCallback
from qkv.data.file_io import convert_os_errors_to_disk_error, read_json_object, write_atomically
from qkv.data.pair_files import Pair
from qkv.data.token_store import INDEX_FILE, NonNegativeInt, TokenStore
from qkv.data.token_store_writer import is_unfinished, prepare_store
from qkv.errors import ConfigError, InputError
from qkv.text import Tokenizer

PAIRS_FILE, TEXTS_FILE = "pairs.json", "pairs.jsonl"
SIDES = ("source", "target")


class PairStoreIndex(Config):
    """Index of a pair store: number of pairs in each file, in storage order, and number of dropped pairs by reason."""

    files: dict[str, NonNegativeInt]
    dropped: dict[str, NonNegativeInt]


def write_pair_texts_and_counts(
    files: Mapping[str, Iterable[Pair]], folder: Path, *, dropped: Mapping[str, int]
) -> None:
    """Write the texts of all pairs to a file that `tokenize_and_delete_pair_texts` reads.

    `dropped` is evaluated after all pairs have been read.
    """
    with convert_os_errors_to_disk_error(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
        counts = dict.fromkeys(files, 0)
        with (folder / TEXTS_FILE).open("w", encoding="utf-8") as stream:
            for name, pairs in files.items():
                for pair in pairs:
                    stream.write(json.dumps(dict(zip(SIDES, pair, strict=True))) + "\n")
                    counts[name] += 1
    write_atomically(
        folder / PAIRS_FILE, PairStoreIndex(files=counts, dropped=dict(dropped)).model_dump_json().encode()
    )


def tokenize_and_delete_pair_texts(
    folder: Path, tokenizers: Mapping[str, Tokenizer], *, progress: Callable[[str], ProgressCallback]
) -> None:  # fmt: skip
    """Tokenize the texts written by `write_pair_texts_and_counts` and delete them. Interrupted calls can be resumed."""
    texts = folder / TEXTS_FILE
    for side in SIDES:
        if is_unfinished(folder / side) or not (folder / side / INDEX_FILE).exists():
            bar = progress(f"tokenizing the {side}s")
            prepare_store([texts], folder / side, tokenizer=tokenizers[side], field=side, progress=bar)
    with convert_os_errors_to_disk_error(texts, 0):
        texts.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class PairStore:
    """A complete store of translation pairs. Sentence lengths do not include the end token."""

    source: TokenStore
    target: TokenStore
    record: PairStoreIndex

    @classmethod
    def open(cls, folder: Path) -> "PairStore":
        path = folder / PAIRS_FILE
        try:
            record = PairStoreIndex(**read_json_object(path))
        except (ConfigError, TypeError) as error:
            raise InputError(f"{path}: {error}") from None
        stores = [TokenStore.open(folder / side) for side in SIDES]
        for store in stores:
            if store.n_documents != sum(record.files.values()):
                raise InputError(
                    f"{path}: expected {sum(record.files.values())} pairs, but {store.folder} has {store.n_documents}"
                )
        return cls(source=stores[0], target=stores[1], record=record)

    def __len__(self) -> int:
        return self.source.n_documents

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Position of each sentence's first token, with shape (side, pair)."""
        ends = np.stack([store.document_ends() for store in (self.source, self.target)])
        return np.concatenate([np.zeros((2, 1), np.int64), ends[:, :-1]], axis=1)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens in each sentence, with shape (side, pair)."""
        ends = np.stack([store.document_ends() for store in (self.source, self.target)])
        return ends - self.starts - 1

    def pair_repeats(self, repeat: Mapping[str, int]) -> NDArray[np.int64]:
        """Return the number of times that each pair is used per epoch, given the number for each file."""
        counts = [np.full(n, repeat.get(name, 1)) for name, n in self.record.files.items()]
        return np.concatenate(counts).astype(np.int64)

    @cached_property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Source and target tokenizers, which are equal if the vocabulary is joint."""
        return self.source.tokenizer(), self.target.tokenizer()

    def text(self, side: int, number: int) -> str:
        """Decode the sentence with the given number. `side` is 0 for the source and 1 for the target."""
        store = (self.source, self.target)[side]
        return self.tokenizers[side].decode(store.document(number)[:-1].tolist())


def iterate_pair_texts(folder: Path, *, side: str | None, repeat: Mapping[str, int], step: int = 1) -> Iterator[str]:
    """Yield every `step`-th text on one side or both sides of the stored pairs, for example to train a tokenizer.

    The texts are those written by `write_pair_texts_and_counts`. Texts from repeated files are yielded repeatedly.
    """
    counts = PairStoreIndex(**read_json_object(folder / PAIRS_FILE)).files
    pair_repeats = chain.from_iterable([repeat.get(name, 1)] * n for name, n in counts.items())
    with (folder / TEXTS_FILE).open(encoding="utf-8") as stream:
        for line, n_repeats in islice(zip(stream, pair_repeats, strict=True), None, None, step):
            record = json.loads(line)
            for _ in range(n_repeats):
                yield from record.values() if side is None else (record[side],)
