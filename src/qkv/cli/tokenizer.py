"""`qkv tokenizer`: train one on your own text, or see how one cuts a text into pieces."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.choices import SpecialTokenStyle, TokenizerKind
from qkv.cli.help import Command
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.text import Tokenizer, TokenSpan

TRAINING_CHARACTERS = 100_000_000  # more text makes a tokenizer slower, not better

tokenizer = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True,
    help="""Train a tokenizer, or look at one.

    \b
    Examples:
      qkv tokenizer train book.txt --out mine --size 4096
      qkv tokenizer show bert "unbelievable"
    """,
)  # fmt: skip


@tokenizer.command(cls=Command)
def train(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Texts, tables, folders; - is stdin.")],
    *,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New or empty; tokenizer.json goes here.")],
    kind: Annotated[TokenizerKind, typer.Option(help="What its pieces are.")] = TokenizerKind.BPE,
    size: Annotated[int, typer.Option(min=1, help="At most so many ids, special ones included.")] = 8192,
    specials: Annotated[
        SpecialTokenStyle | None, typer.Option(help="Special tokens; by default the kind's usual ones.")
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Make no difference between A and a.")] = False,
    field: Annotated[str, typer.Option(help="Key of a .jsonl line; name or number of a column.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Train a tokenizer on texts (their first 100 million characters).

    \b
    Examples:
      qkv tokenizer train book.txt --out my-tokenizer --size 4096
      qkv tokenizer train pairs.tsv --field 2 --out words --kind wordpiece --lowercase
    """
    from qkv.cli.progress import say
    from qkv.text import save_tokenizer

    refuse_used(out)
    trained = train_on(files, kind=kind, size=size, style=specials, lowercase=lowercase, field=field)
    if trained.vocab_size < size:
        say(f"the text gives {trained.vocab_size} ids, fewer than the {size} asked")
    save_tokenizer(trained, out)
    result = {"folder": str(out), "kind": kind.value, "vocab_size": trained.vocab_size}
    result["specials"] = {role.value: token for role, token in trained.special_tokens.items()}
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(f"{out}: {kind} of {trained.vocab_size:,} ids, {' '.join(dict.fromkeys(trained.special_tokens.values()))}")


@tokenizer.command(cls=Command)
def show(
    model: Annotated[
        Path, typer.Argument(help="A shipped name, a folder that holds a tokenizer (a model's), or its file.")
    ],
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT…", help="None: one a line from stdin.")] = None,
    *,
    parse_special_tokens: Annotated[
        bool, typer.Option("--parse-specials", help="Read <|endoftext|> and the like as tokens, not as text.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each text.")] = False,
) -> None:
    """Show the pieces of each text, one line a text: "piece" id@first byte:end.

    Part of a character is shown as its bytes, in hexadecimal between < and >.

    \b
    Examples:
      qkv tokenizer show bert "The cat sat."
      qkv tokenizer show vocab.txt --json < lines.txt
    """
    from qkv.cli.text_inputs import given_texts
    from qkv.text import load_tokenizer
    from qkv.zoo import shipped

    loaded = load_tokenizer(model if model.exists() else shipped().get(str(model), model))
    for text in given_texts(texts):
        pieces = loaded.token_spans(text, parse_special_tokens=parse_special_tokens)
        if as_json:
            print(json.dumps({"text": text, "pieces": [vars(piece) for piece in pieces]}, ensure_ascii=False))
        else:
            print("  ".join(_shown(piece, text.encode()) for piece in pieces))


def train_on(
    files: list[str],
    *,
    kind: TokenizerKind,
    size: int,
    style: SpecialTokenStyle | None = None,
    lowercase: bool = False,
    field: str = "text",
) -> "Tokenizer":
    """With a bar on standard error while the texts are read."""
    from qkv.cli.progress import bar
    from qkv.data import read_texts
    from qkv.text import train_tokenizer

    with bar("training the tokenizer") as move:
        texts = read_texts(files, field=field, max_characters=TRAINING_CHARACTERS, progress=move)
        return train_tokenizer(kind, texts, vocab_size=size, style=style, lowercase=lowercase)


def refuse_used(folder: Path) -> None:
    """Before any work: nothing is ever written among a user's own files."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: is a file, not a folder")
    if folder.is_dir() and (held := next(folder.iterdir(), None)) is not None:
        raise InputError(f"--out {folder}: is not empty (it holds {held.name}); name a new folder")


def _shown(piece: "Piece", text: bytes) -> str:
    data = text[piece.start : piece.end]
    try:
        spelt = json.dumps(data.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        spelt = f"<{data.hex(' ')}>"
    return f"{spelt} {piece.id}@{piece.start}:{piece.end}"
