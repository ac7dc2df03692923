"""The `qkv tokenizer` commands: train and show."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import SpecialTokenStyle, TokenizerKind
from qkv.cli.help import SimplifiedMetavarCommand
from qkv.cli.options import iter_input_texts
from qkv.cli.output import print_status, progress_bar
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.text import TokenByteSpan, Tokenizer

TRAINING_CHARACTERS = 100_000_000  # more text slows down training but does not improve the tokenizer

tokenizer = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="""Train a tokenizer or show how it splits texts.

    \b
    Examples:
      qkv tokenizer train book.txt --out my-tokenizer --vocab-size 4096
      qkv tokenizer show bert "unbelievable"
    """,
)


@tokenizer.command("train", cls=SimplifiedMetavarCommand)
def train_and_save(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Text files, tables or folders. Use - for standard input.")
    ],
    *,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Output folder for tokenizer.json. Must be new or empty.")
    ],
    kind: Annotated[TokenizerKind, typer.Option(help="Tokenization algorithm.")] = TokenizerKind.BPE,
    vocab_size: Annotated[int, typer.Option(min=1, help="Maximum vocabulary size, including special tokens.")] = 8192,
    special_tokens: Annotated[
        SpecialTokenStyle | None,
        typer.Option(help="Set of special tokens. By default, the usual set for the algorithm."),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Convert texts to lowercase.")] = False,
    field: Annotated[
        str,
        typer.Option(help="Field that contains the text: a key in .jsonl files, or a column name or number in tables."),
    ] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a tokenizer on the first 100 million characters of the texts.

    \b
    Examples:
      qkv tokenizer train book.txt --out my-tokenizer --vocab-size 4096
      qkv tokenizer train pairs.tsv --field 2 --out words --kind wordpiece --lowercase
    """
    from qkv.text import save_tokenizer

    check_output_folder(out)
    trained = train_tokenizer_on_files(
        files, kind=kind, vocab_size=vocab_size, style=special_tokens, lowercase=lowercase, field=field
    )
    if trained.vocab_size < vocab_size:
        print_status(f"the text is only enough for a vocabulary of {trained.vocab_size} tokens instead of {vocab_size}")
    save_tokenizer(trained, out)
    result = {"folder": str(out), "kind": kind.value, "vocab_size": trained.vocab_size}
    result["special_tokens"] = {role.value: token for role, token in trained.special_tokens.items()}
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        tokens = " ".join(dict.fromkeys(trained.special_tokens.values()))
        print(f"{out}: {kind} tokenizer, {trained.vocab_size:,} tokens, special tokens: {tokens}")


@tokenizer.command("show", cls=SimplifiedMetavarCommand)
def show_token_offsets(
    model: Annotated[
        Path,
        typer.Argument(help="Name of a shipped model, or path to a tokenizer file or to a folder that contains one."),
    ],
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to tokenize. By default, texts are read from standard input, one per line."),
    ] = None,
    *,
    parse_special_tokens: Annotated[
        bool,
        typer.Option(
            "--parse-special-tokens", help="Parse <|endoftext|> and similar strings as special tokens instead of text."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per text.")] = False,
) -> None:
    """Show the tokens of each text.

    Prints one line per text. Each token is printed as "token" id@start:end, where start and end are byte offsets.
    Tokens that contain only part of a character are printed as hexadecimal bytes between < and >.

    \b
    Examples:
      qkv tokenizer show bert "The cat sat."
      qkv tokenizer show vocab.txt --json < lines.txt
    """
    from qkv.text import load_tokenizer
    from qkv.zoo import shipped_model_folders

    loaded = load_tokenizer(model if model.exists() else shipped_model_folders().get(str(model), model))
    for text in iter_input_texts(texts):
        spans = loaded.token_spans_without_template(text, parse_special_tokens=parse_special_tokens)
        if as_json:
            print(json.dumps({"text": text, "tokens": [vars(span) for span in spans]}, ensure_ascii=False))
        else:
            print("  ".join(_format_token_span(span, text.encode()) for span in spans))


def train_tokenizer_on_files(
    files: list[str],
    *,
    kind: TokenizerKind,
    vocab_size: int,
    style: SpecialTokenStyle | None = None,
    lowercase: bool = False,
    field: str = "text",
) -> "Tokenizer":
    """Train a tokenizer on the texts in the given files while showing a progress bar."""
    from qkv.data import read_text_chunks
    from qkv.text import train_tokenizer

    with progress_bar("training the tokenizer") as update:
        texts = read_text_chunks(files, field=field, stop_after_characters=TRAINING_CHARACTERS, progress=update)
        return train_tokenizer(kind, texts, vocab_size=vocab_size, style=style, lowercase=lowercase)


def check_output_folder(folder: Path) -> None:
    """Raise `InputError` if the output folder is not empty, because existing files must never be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: must be a folder, got a file")
    if folder.is_dir() and (first := next(folder.iterdir(), None)) is not None:
        raise InputError(f"--out {folder}: must be a new or empty folder, but contains {first.name}")


def _format_token_span(span: "TokenByteSpan", text: bytes) -> str:
    data = text[span.start : span.end]
    try:
        token = json.dumps(data.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        token = f"<{data.hex(' ')}>"
    return f"{token} {span.id}@{span.start}:{span.end}"
