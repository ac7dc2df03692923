"""How do the pages of `--help` look: commands in groups with an example each, values in plain words?"""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

OVERVIEW = {
    "See what there is": (
        ("qkv demo", "what the shipped models do"),
        ("qkv models", "shipped models and your own runs"),
        ("qkv lesson walkthrough", "the lectures' examples, in numbers"),
        ("qkv doctor", "this machine: what is fast here"),
    ),
    "Use a model": (
        ('qkv generate stories "Once upon a time"', "go on from a text"),
        ('qkv translate es-en "No lo sé."', "Spanish into English"),
        ('qkv fill bert "A cup of [MASK]."', "guess hidden words"),
        ('qkv classify sentiment "what a joy"', "tell the class of a text"),
        ('qkv embed bert "A cat sleeps."', "texts as vectors"),
        ('qkv similar bert "tea" --among lines.txt', "the lines nearest to a text"),
        ("qkv words bert king queen dog", "words near and far"),
    ),
    "Make your own": (
        ("qkv train gpt --text book.txt --minutes 5", "also bert, and translate --pairs"),
        ("qkv finetune bert --data train.tsv", "labelled texts in, classifier out"),
        ("qkv tokenizer train book.txt --out mine", "cut text into pieces"),
        ("qkv data show run", "the batches that training sees"),
    ),
    "Look inside": (
        ("qkv explore", "every head of every layer, a page"),
        ('qkv look bert "The dog ran." --view map', "the same as a table or a picture"),
    ),
    "Measure": (
        ("qkv evaluate stories --text book.txt", "loss, BLEU or accuracy"),
        ("qkv verify stories", "the same answer on every road?"),
        ("qkv cost gpt2", "what a model costs, unbuilt"),
    ),
    "Take it elsewhere": (("qkv convert stories s.gguf --to gguf", "also hf, ct2, int8"),),
}
"""What `qkv` alone shows: each command once, as one would type it."""
EXITS = "Exit: 0 done, 1 failed (disk, network, a check), 2 bad input, 130 or 143 stopped by Ctrl-C or SIGTERM."
_LEFT = max(len(example) for group in OVERVIEW.values() for example, _ in group)
_PLAIN = {
    r"<list\[(.+)\]>": r"<\1>",
    r"<int( range)?>": "N",
    r"<float( range)?>": "X",
    r"<str>": "TEXT",
    r"<(path|file|directory)>": "PATH",
    r"<(.+)>": r"\1",
}
"""What typer calls a value, and what people do."""


class Command(TyperCommand):
    """One whose values are called N, X, TEXT, PATH, and its arguments as in a manual: MODEL [TEXTS]..."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 - the command library's own
        return [_argument(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - the command library's own
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                name, text = record
                is_argument = parameter.param_type_name == "argument"
                name = _argument(name.partition(" ")[0]) if is_argument else _value(name)
                rows[parameter.param_type_name].append((name, _range(text)))
        for kind, title in (("argument", "Arguments"), ("option", "Options")):
            if rows[kind]:
                with formatter.section(title):
                    formatter.write_dl(rows[kind])


class Overview(TyperGroup):
    """`qkv --help`: every command as an example, in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - the command library's own
        del ctx
        for title, commands in OVERVIEW.items():
            with formatter.section(title):
                for example, what in commands:
                    formatter.write(f"  {example:{_LEFT}}  {what}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - the command library's own
        """After the commands, which are what one looks for."""
        self.format_commands(ctx, formatter)
        Command.format_options(self, ctx, formatter)  # pyright: ignore[reportArgumentType] - asks for parameters alone
        formatter.write_paragraph()
        formatter.write_text("`qkv COMMAND --help` has its options and more examples.")
        formatter.write_text(EXITS)


def _argument(piece: str) -> str:
    """`{model}` is MODEL, `[texts]...` is [TEXTS]..."""
    return re.sub(r"[{}]", "", piece).upper()


def _value(name: str) -> str:
    for odd, plain in _PLAIN.items():
        name = re.sub(odd, plain, name)
    return name


def _range(text: str) -> str:
    """That a count is at least 0 or 1 goes without saying."""
    text = re.sub(r"(; )?\bx>=[01](?=\])", "", text).removesuffix("  []")
    return re.sub(r"\bx>=", "at least ", text)
