"""Tokens per second of training batches, made on one CPU core: masked words for BERT, pairs for translation."""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import Report
from benchmarks.runner import Asked
from qkv.choices import SpecialTokenStyle, TokenizerKind
from qkv.config.masking import MaskingConfig
from qkv.data.masked_batches import MaskedBatches
from qkv.data.pair_batches import PairBatches
from qkv.data.pair_store import PairStore, encode_pairs, write_pairs
from qkv.data.sentence_store import prepare_sentences
from qkv.text import train_tokenizer

N_BATCHES = 10
"""Batches that are timed together."""
WORDS = [f"{first}{middle}{last}" for first in "bcdfgk" for middle in ("ana", "ero", "ilu") for last in ("", "s", "t")]
ROWS = {"masked words": (256, 128), "pairs": (500, 32)}
"""Rows of a batch, and tokens of a row at most."""


def batches(asked: Asked) -> Report:
    """Measure both kinds of batches; the best of the repeats counts."""
    load = machine.others_load()
    with tempfile.TemporaryDirectory() as folder:
        makers = {
            "masked words": _masked_batches(Path(folder) / "text"),
            "pairs": _pair_batches(Path(folder) / "pairs"),
        }
        rates = {kind: max(_tokens_per_second(make) for _ in range(asked.repeats)) for kind, make in makers.items()}
    return Report(
        name="batches",
        what=f"Batches made on one CPU core from small stores of random words; best of {asked.repeats} × {N_BATCHES}.",
        columns=["batches", "rows", "tokens of a row at most", "tokens/s"],
        rows=[[kind, *map(str, ROWS[kind]), f"{rate:,.0f}"] for kind, rate in rates.items()],
        notes=[],
        versions={},
        load=load,
    )


def _tokens_per_second(make: Callable[[int], int]) -> float:
    """`make` builds batch t and returns how many tokens it has."""
    make(0)
    started = time.process_time()
    n_tokens = sum(make(t) for t in range(1, N_BATCHES + 1))
    return n_tokens / (time.process_time() - started)


def _sentences(n: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))).capitalize() + "." for _ in range(n)]


def _masked_batches(folder: Path) -> Callable[[int], int]:
    documents = [" ".join(_sentences(20, seed)) for seed in range(200)]
    folder.mkdir()
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    tokenizer = train_tokenizer(TokenizerKind.WORDPIECE, documents, vocab_size=307, lowercase=True)
    source = prepare_sentences([folder / "text.txt"], folder / "store", tokenizer=tokenizer)
    batch_size, length = ROWS["masked words"]
    maker = MaskedBatches(
        source=source, tokenizer=tokenizer, config=MaskingConfig(), length=length, batch_size=batch_size, seed=0
    )

    def make(t: int) -> int:
        return maker.batch(t).ids.numel()

    return make


def _pair_batches(folder: Path) -> Callable[[int], int]:
    sources, targets = _sentences(5000, 1), _sentences(5000, 2)
    tokenizer = train_tokenizer(
        TokenizerKind.BPE, sources + targets, vocab_size=400, style=SpecialTokenStyle.SEQ2SEQ, spaced=True
    )
    write_pairs({"pairs": list(zip(sources, targets, strict=True))}, folder, dropped={})
    encode_pairs(folder, {"source": tokenizer, "target": tokenizer}, progress=lambda _label: lambda _n, _all: None)
    store = PairStore.open(folder)
    batch_size, length = ROWS["pairs"]
    maker = PairBatches(store=store, times=store.times({}), length=length, batch_size=batch_size, seed=0, join=0.0)

    def make(t: int) -> int:
        return maker.batch(t).n_tokens

    return make
