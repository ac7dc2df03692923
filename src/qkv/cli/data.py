"""`qkv data`: make a token store of texts, or look at the batches that training will see."""

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import TokenizerKind
from qkv.cli.data_split import split
from qkv.cli.help import Command
from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from qkv.data import TokenStore
    from qkv.data.sentence_store import SentenceStore
    from qkv.data.token_batches import TokenBatch
    from qkv.text import Tokenizer

data = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True,
    help="""Prepare texts for training, or look at batches.

    \b
    Examples:
      qkv data prepare book.txt --out store --size 4096
      qkv data show store --batch 3
      qkv data split spa-eng.tsv --out es-en
    """,
)  # fmt: skip
data.command(cls=Command)(split)


@data.command(cls=Command)
def prepare(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Texts, tables, folders; - is stdin.")],
    *,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New, empty, or this very store unfinished.")],
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A tokenizer; without, one is trained on the texts.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Ids of the tokenizer that is trained; 8192 unless said.")
    ] = None,
    kind: Annotated[
        TokenizerKind | None, typer.Option(help="Its kind; bpe unless said, wordpiece with --sentences.")
    ] = None,
    sentences: Annotated[
        bool, typer.Option("--sentences", help="Part documents into sentences, as BERT's pairs need them.")
    ] = False,
    field: Annotated[str, typer.Option(help="Key of a .jsonl line; name or number of a column.")] = "text",
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; every core unless said.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Turn texts into a memory-mapped store of token ids.

    .txt (documents parted by a line <|endoftext|>), .jsonl, .csv, .tsv, each also .gz .xz .zst. Stopped or killed,
    the same command goes on after the last finished shard; the result is the same to the byte.

    \b
    Examples:
      qkv data prepare book.txt --out store --size 4096
      qkv data prepare stories/ reviews.jsonl --out store --tokenizer my-tokenizer --workers 8
    """
    from qkv.cli.progress import say
    from qkv.data import is_unfinished, prepare_store
    from qkv.data.sentence_store import prepare_sentences
    from qkv.data.text_sources import find_sources

    find_sources(files)
    if is_unfinished(out):
        say(f"{out}: going on with an unfinished store")
    kind = TokenizerKind.WORDPIECE if sentences and tokenizer is None and kind is None else kind
    chosen = _tokenizer(files, out, tokenizer, size=size, kind=kind, field=field)
    make = prepare_sentences if sentences else prepare_store
    store = _timed(partial(make, files, out, tokenizer=chosen, field=field, n_workers=workers))
    _print_store(store, as_json=as_json)


def _timed(make: "Callable[..., TokenStore | SentenceStore]") -> "TokenStore":
    from qkv.cli.progress import bar, say
    from qkv.data import TokenStore

    started = time.perf_counter()
    with bar("tokenizing") as move:
        made = make(progress=move)
    store = made if isinstance(made, TokenStore) else made.store
    seconds = time.perf_counter() - started
    say(f"{seconds:.1f} s, {store.n_tokens / seconds:,.0f} tokens a second")
    return store


def _print_store(store: "TokenStore", *, as_json: bool) -> None:
    counts = {
        "documents": store.n_documents, "tokens": store.n_tokens, "bytes": store.n_bytes,
        "vocab_size": store.vocab_size, "shards": len(store.index.shards),
    }  # fmt: skip
    if as_json:
        print(json.dumps({"folder": str(store.folder), **counts}))
    else:
        print(f"{store.folder}: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items()))


@data.command(cls=Command)
def show(
    store: Annotated[Path, typer.Argument(help="A folder made by qkv data prepare, or a run's.")],
    *,
    batch: Annotated[int, typer.Option(min=0, help="Which batch, counted from 0.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn: order, pairs, hidden words.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 32,
    packed: Annotated[bool, typer.Option("--packed", help="Keep attention within a document.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="First check every byte against its hash.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each row.")] = False,
) -> None:
    """Print a batch token by token: what goes in, what is to be predicted, for which document.

    Of a store of sentences (--sentences, or a bert's run) it shows BERT's pairs: what was hidden, and how.

    \b
    Examples:
      qkv data show store --batch 3 --rows 2
      qkv data show store --packed --length 64 --json
      qkv data show bert-run --rows 4
    """
    from qkv.cli.masked_examples import show_masked
    from qkv.config import MaskingConfig, load_recipe
    from qkv.data import TokenStore
    from qkv.data.sentence_store import SENTENCES_FILE
    from qkv.data.token_batches import TokenBatches

    examples = None
    if (store / "recipe.toml").is_file():
        examples, store = load_recipe(store / "recipe.toml").masking, store / "data" / "train"
    opened = TokenStore.open(store, verify=verify)
    if (store / SENTENCES_FILE).exists():
        config = examples or MaskingConfig()
        show_masked(store, config, batch=batch, rows=rows, length=length, seed=seed, as_json=as_json)
        return
    batches = TokenBatches(source=opened, context_length=length, batch_size=rows, seed=seed, cross_documents=not packed)
    asked = batches.batch(batch)
    if as_json:
        _print_json(asked)
    else:
        _print_rows(asked, opened.tokenizer())


def _tokenizer(
    files: list[str], out: Path, path: Path | None, *, size: int | None, kind: TokenizerKind | None, field: str
) -> "Tokenizer":
    from qkv.cli.tokenizer import refuse_used, train_on
    from qkv.data import is_unfinished
    from qkv.text import load_tokenizer

    if path is not None and (size is not None or kind is not None):
        raise InputError("--tokenizer names one that is trained: leave out --size and --kind")
    if path is not None:
        return load_tokenizer(path)
    if is_unfinished(out) and (out / "tokenizer.json").is_file():
        return load_tokenizer(out)
    if "-" in files:
        raise InputError("standard input can be read only once: train a tokenizer first, and name it by --tokenizer")
    if not is_unfinished(out):
        refuse_used(out)
    return train_on(files, kind=kind or TokenizerKind.BPE, size=size or 8192, field=field)


def _print_rows(batch: "Batch", tokenizer: "Tokenizer") -> None:
    from qkv.tensors import IGNORE_INDEX

    def spelt(number: int) -> str:
        text = tokenizer.decode([number], skip_special_tokens=False)
        return json.dumps(tokenizer.id_to_token(number) if "\ufffd" in text else text, ensure_ascii=False)

    for row, (ids, targets) in enumerate(zip(batch.ids.tolist(), batch.targets.tolist(), strict=True)):
        documents = None if batch.document_ids is None else batch.document_ids[row].tolist()
        print(f"row {row}: {int(batch.counts[row])} targets")
        for place, (given, wanted) in enumerate(zip(ids, targets, strict=True)):
            aim = "nothing" if wanted == IGNORE_INDEX else f"{wanted:>6} {spelt(wanted)}"
            document = "" if documents is None else f"document {documents[place]:<6} "
            print(f"{place:>5}  {document}{given:>6} {spelt(given):<14} → {aim}")


def _print_json(batch: "Batch") -> None:
    documents = None if batch.document_ids is None else batch.document_ids.tolist()
    for row, (ids, targets) in enumerate(zip(batch.ids.tolist(), batch.targets.tolist(), strict=True)):
        line = {"ids": ids, "targets": targets, "documents": None if documents is None else documents[row]}
        print(json.dumps({**line, "n_targets": int(batch.counts[row])}))
