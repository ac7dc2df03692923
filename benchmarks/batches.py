"""Benchmark how fast one CPU core creates training batches for masked language modeling and translation."""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import machine
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions
from qkv.choices import SpecialTokenStyle, TokenizerKind
from qkv.config.recipe import MaskingConfig
from qkv.data.masked_batches import MaskedBatches
from qkv.data.pair_batches import PairBatches
from qkv.data.pair_store import PairStore, tokenize_and_delete_pair_texts, write_pair_texts_and_counts
from qkv.data.sentence_store import prepare_sentence_store
from qkv.text import train_tokenizer

N_BATCHES = 10
"""Number of batches that are timed together."""
WORDS = [f"{first}{middle}{last}" for first in "bcdfgk" for middle in ("ana", "ero", "ilu") for last in ("", "s", "t")]
ROWS = {"masked LM": (256, 128), "pairs": (500, 32)}
"""Rows per batch and maximum number of tokens per row."""


def batches(options: BenchmarkOptions) -> Report:
    """Measure how fast both types of batches are created. The best repeat counts."""
    load = machine.load_average()
    with tempfile.TemporaryDirectory() as folder:
        makers = {
            "masked LM": _masked_batches(Path(folder) / "text"),
            "pairs": _pair_batches(Path(folder) / "pairs"),
        }
        rates = {kind: max(_tokens_per_second(make) for _ in range(options.repeats)) for kind, make in makers.items()}
    return Report(
        name="batches",
        description=(
            f"Batches of random words created on one CPU core; best of {options.repeats} × {N_BATCHES} batches."
        ),
        columns=["batches", "rows", "max tokens per row", "tokens/s"],
        rows=[[kind, *map(str, ROWS[kind]), f"{rate:,.0f}"] for kind, rate in rates.items()],
        notes=[],
        versions={},
        load=load,
    )


def _tokens_per_second(make: Callable[[int], int]) -> float:
    """Measure how many tokens per CPU second `make` produces. It builds batch t and returns its number of tokens."""
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
    source = prepare_sentence_store([folder / "text.txt"], folder / "store", tokenizer=tokenizer)
    batch_size, length = ROWS["masked LM"]
    maker = MaskedBatches(
        source=source, tokenizer=tokenizer, config=MaskingConfig(), seq_len=length, batch_size=batch_size, seed=0
    )

    def make(t: int) -> int:
        return maker.batch(t).ids.numel()

    return make


def _pair_batches(folder: Path) -> Callable[[int], int]:
    sources, targets = _sentences(5000, 1), _sentences(5000, 2)
    tokenizer = train_tokenizer(
        TokenizerKind.BPE, sources + targets, vocab_size=400, style=SpecialTokenStyle.SEQ2SEQ, add_prefix_space=True
    )
    write_pair_texts_and_counts({"pairs": list(zip(sources, targets, strict=True))}, folder, dropped={})
    tokenize_and_delete_pair_texts(
        folder, {"source": tokenizer, "target": tokenizer}, progress=lambda _label: lambda _n, _all: None
    )
    store = PairStore.open(folder)
    batch_size, length = ROWS["pairs"]
    maker = PairBatches(
        store=store, repeats=store.pair_repeats({}), seq_len=length, batch_size=batch_size, seed=0, join_fraction=0.0
    )

    def make(t: int) -> int:
        return maker.batch(t).n_tokens

    return make
