"""The `qkv data` commands: prepare, show and split."""

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import TokenizerKind
from qkv.cli.data_split import split
from qkv.cli.help import SimplifiedMetavarCommand
from qkv.cli.output import print_status, progress_bar
from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from qkv.data import TokenStore
    from qkv.data.sentence_store import SentenceStore
    from qkv.data.token_batches import TokenBatch
    from qkv.text import Tokenizer

data = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="""Prepare texts for training, or show training batches.

    \b
    Examples:
      qkv data prepare book.txt --out store --vocab-size 4096
      qkv data show store --batch 3
      qkv data split spa-eng.tsv --out es-en
    """,
)
data.command(cls=SimplifiedMetavarCommand)(split)


@data.command(cls=SimplifiedMetavarCommand)
def prepare(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Text files, tables or folders. Use - for standard input.")
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Output folder. Must be new or empty, or contain an unfinished store to resume."
        ),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Tokenizer to use. By default, a tokenizer is trained on the texts."),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary size of the trained tokenizer (default: 8192).")
    ] = None,
    kind: Annotated[
        TokenizerKind | None,
        typer.Option(help="Algorithm of the trained tokenizer (default: bpe, or wordpiece with --sentences)."),
    ] = None,
    sentences: Annotated[
        bool, typer.Option("--sentences", help="Split documents into sentences, as required for BERT pre-training.")
    ] = False,
    field: Annotated[
        str,
        typer.Option(help="Field that contains the text: a key in .jsonl files, or a column name or number in tables."),
    ] = "text",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of threads (default: the number of cores).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tokenize texts into a memory-mapped token store.

    Supports .txt files (with documents separated by <|endoftext|> lines), .jsonl, .csv and .tsv files. Files can be
    compressed (.gz, .xz, .zst). If the command is interrupted, run it again to continue after the last finished shard.
    The result is byte-identical to the result of an uninterrupted run.

    \b
    Examples:
      qkv data prepare book.txt --out store --vocab-size 4096
      qkv data prepare stories/ reviews.jsonl --out store --tokenizer my-tokenizer --workers 8
    """
    from qkv.data import is_unfinished, prepare_store
    from qkv.data.documents import parse_text_sources
    from qkv.data.sentence_store import prepare_sentence_store

    parse_text_sources(files)
    if is_unfinished(out):
        print_status(f"{out}: resuming an unfinished store")
    kind = TokenizerKind.WORDPIECE if sentences and tokenizer is None and kind is None else kind
    loaded = _load_or_train_tokenizer(files, out, tokenizer, vocab_size=vocab_size, kind=kind, field=field)
    prepare_function = prepare_sentence_store if sentences else prepare_store
    store = _prepare_store_and_print_throughput(
        partial(prepare_function, files, out, tokenizer=loaded, field=field, n_workers=workers)
    )
    _print_store_summary(store, as_json=as_json)


def _prepare_store_and_print_throughput(prepare_function: "Callable[..., TokenStore | SentenceStore]") -> "TokenStore":
    """Prepare a token store, show a progress bar, and print the throughput."""
    from qkv.data import TokenStore

    started = time.perf_counter()
    with progress_bar("tokenizing") as update:
        prepared = prepare_function(progress=update)
    store = prepared if isinstance(prepared, TokenStore) else prepared.store
    seconds = time.perf_counter() - started
    print_status(f"{seconds:.1f} s, {store.n_tokens / seconds:,.0f} tokens/s")
    return store


def _print_store_summary(store: "TokenStore", *, as_json: bool) -> None:
    counts = {
        "documents": store.n_documents,
        "tokens": store.n_tokens,
        "bytes": store.n_bytes,
        "vocab_size": store.vocab_size,
        "shards": len(store.index.shards),
    }
    if as_json:
        print(json.dumps({"folder": str(store.folder), **counts}))
    else:
        print(
            f"{store.folder}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['bytes']:,} "
            f"bytes, vocabulary size {counts['vocab_size']:,}, {counts['shards']:,} shards"
        )


@data.command("show", cls=SimplifiedMetavarCommand)
def show_batch(
    store: Annotated[Path, typer.Argument(help="Folder created by `qkv data prepare`, or a run folder.")],
    *,
    batch: Annotated[int, typer.Option(min=0, help="Index of the batch, starting at 0.")] = 0,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Random seed for the order of examples, the choice of sentence pairs and the masking."
        ),
    ] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of rows in the batch.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Number of tokens per row.")] = 32,
    packed: Annotated[
        bool,
        typer.Option(
            "--packed", help="Restrict attention to one document, and print which document each token belongs to."
        ),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the checksums of all files before printing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
) -> None:
    """Print a training batch token by token, with the targets and documents.

    For a store prepared with --sentences or a BERT run, prints sentence pairs and masked tokens.

    \b
    Examples:
      qkv data show store --batch 3 --batch-size 2
      qkv data show store --packed --seq-len 64 --json
      qkv data show bert-run --batch-size 4
    """
    from qkv.cli.masked_examples import print_masked_batch
    from qkv.config import MaskingConfig, load_recipe
    from qkv.data import TokenStore
    from qkv.data.sentence_store import SENTENCES_FILE
    from qkv.data.token_batches import TokenBatches

    masking = None
    if (store / "recipe.toml").is_file():
        masking, store = load_recipe(store / "recipe.toml").masking, store / "data" / "train"
    token_store = TokenStore.open(store, verify=verify)
    if (store / SENTENCES_FILE).exists():
        config = masking or MaskingConfig()
        print_masked_batch(
            store, config, batch_index=batch, batch_size=batch_size, seq_len=seq_len, seed=seed, as_json=as_json
        )
        return
    batches = TokenBatches(
        source=token_store, seq_len=seq_len, batch_size=batch_size, seed=seed, cross_documents=not packed
    )
    token_batch = batches.batch(batch)
    if as_json:
        _print_batch_json(token_batch)
    else:
        _print_batch_tokens_and_targets(token_batch, token_store.tokenizer())


def _load_or_train_tokenizer(
    files: list[str],
    resumable_store: Path,
    tokenizer_path: Path | None,
    *,
    vocab_size: int | None,
    kind: TokenizerKind | None,
    field: str,
) -> "Tokenizer":
    from qkv.cli.tokenizer import check_output_folder, train_tokenizer_on_files
    from qkv.data import is_unfinished
    from qkv.text import load_tokenizer

    if tokenizer_path is not None and (vocab_size is not None or kind is not None):
        raise InputError(
            "--tokenizer cannot be combined with --vocab-size or --kind, which apply only to a new tokenizer"
        )
    if tokenizer_path is not None:
        return load_tokenizer(tokenizer_path)
    if is_unfinished(resumable_store) and (resumable_store / "tokenizer.json").is_file():
        return load_tokenizer(resumable_store)
    if "-" in files:
        raise InputError(
            "cannot train a tokenizer on standard input because standard input can be read only once; use an existing "
            "tokenizer with --tokenizer"
        )
    if not is_unfinished(resumable_store):
        check_output_folder(resumable_store)
    return train_tokenizer_on_files(files, kind=kind or TokenizerKind.BPE, vocab_size=vocab_size or 8192, field=field)


def _print_batch_tokens_and_targets(batch: "TokenBatch", tokenizer: "Tokenizer") -> None:
    from qkv.tensors import IGNORE_INDEX

    def quote_token(token_id: int) -> str:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        return json.dumps(tokenizer.id_to_token(token_id) if "\ufffd" in text else text, ensure_ascii=False)

    for row, (ids, targets) in enumerate(zip(batch.ids.tolist(), batch.targets.tolist(), strict=True)):
        documents = None if batch.document_ids is None else batch.document_ids[row].tolist()
        print(f"row {row}: {int(batch.counts[row])} targets")
        for position, (token_id, target_id) in enumerate(zip(ids, targets, strict=True)):
            target = "ignored" if target_id == IGNORE_INDEX else f"{target_id:>6} {quote_token(target_id)}"
            document = "" if documents is None else f"document {documents[position]:<6} "
            print(f"{position:>5}  {document}{token_id:>6} {quote_token(token_id):<14} → {target}")


def _print_batch_json(batch: "TokenBatch") -> None:
    documents = None if batch.document_ids is None else batch.document_ids.tolist()
    for row, (ids, targets) in enumerate(zip(batch.ids.tolist(), batch.targets.tolist(), strict=True)):
        line = {"ids": ids, "targets": targets, "documents": None if documents is None else documents[row]}
        print(json.dumps({**line, "n_targets": int(batch.counts[row])}))
