"""Define the layout of the `--help` pages."""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

OVERVIEW = {
    "Get started": (
        ("qkv demo", "Show what the shipped models can do"),
        ("qkv models", "List shipped models and your runs"),
        ("qkv lesson walkthrough", "Run a worked example"),
        ("qkv doctor", "Check this machine's setup"),
    ),
    "Use a model": (
        ('qkv generate stories "Once upon a time"', "Continue a prompt"),
        ('qkv translate es-en "No lo sé."', "Translate text"),
        ('qkv fill bert "A cup of [MASK]."', "Predict masked words"),
        ('qkv classify sentiment "what a joy"', "Classify text"),
        ('qkv embed bert "A cat sleeps."', "Compute sentence embeddings"),
        ('qkv similar bert "tea" --among lines.txt', "Find the most similar lines"),
        ("qkv words bert king queen dog", "Compare word vectors"),
    ),
    "Train a model": (
        ("qkv train gpt --text book.txt --minutes 5", "Train a GPT, BERT or translator"),
        ("qkv finetune bert --data train.tsv", "Fine-tune on labeled text"),
        ("qkv tokenizer train book.txt --out tok", "Train or inspect a tokenizer"),
        ("qkv data show runs/1", "Prepare or view training data"),
    ),
    "Look inside a model": (
        ("qkv explore", "Open the interactive explorer"),
        ('qkv inspect bert "The dog ran."', "Print or plot attention and more"),
    ),
    "Measure": (
        ("qkv evaluate stories --text book.txt", "Compute loss, BLEU or accuracy"),
        ("qkv verify stories", "Compare optimized and plain code"),
        ("qkv cost gpt2", "Estimate FLOPs, memory and time"),
    ),
    "Export": (("qkv convert stories s.gguf --to gguf", "Convert to another format"),),
}
"""Command groups on the overview page, with an example and a description for each command."""
EXIT_STATUS = (
    "Exit status: 0 on success, 1 on failure (disk, network or a failed check), 2 for invalid input, 130 after Ctrl-C "
    "and 143 after SIGTERM."
)
_EXAMPLE_WIDTH = max(len(example) for group in OVERVIEW.values() for example, _ in group)
_METAVARS = {
    r"<list\[(.+)\]>": r"<\1>",
    r"<int( range)?>": "N",
    r"<float( range)?>": "X",
    r"<str>": "TEXT",
    r"<(path|file|directory)>": "PATH",
    r"<(.+)>": r"\1",
}
"""Regular expressions for typer's names of value types, and the names that replace them on the help pages."""


class SimplifiedMetavarCommand(TyperCommand):
    """A command whose help uses conventional names for values (N, X, TEXT, PATH) and arguments (MODEL [TEXTS]...)."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 - signature of the base class
        return [_format_argument_name(part) for part in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - signature of the base class
        _write_arguments_and_options(self.get_params(ctx), ctx, formatter)


class OverviewGroup(TyperGroup):
    """The top-level command, whose help page lists an example of every command, in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - signature of the base class
        del ctx
        for title, commands in OVERVIEW.items():
            with formatter.section(title):
                for example, description in commands:
                    formatter.write(f"  {example:{_EXAMPLE_WIDTH}}  {description}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - signature of the base class
        """Write the commands before the options because most readers are looking for a command."""
        self.format_commands(ctx, formatter)
        _write_arguments_and_options(self.get_params(ctx), ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text("Run `qkv COMMAND --help` to see the options of a command and more examples.")
        formatter.write_text(EXIT_STATUS)


def _write_arguments_and_options(parameters: list[Any], ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - types of click
    rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for parameter in parameters:
        if (record := parameter.get_help_record(ctx)) is not None:
            name, text = record
            is_argument = parameter.param_type_name == "argument"
            name = _format_argument_name(name.partition(" ")[0]) if is_argument else _format_metavar(name)
            rows[parameter.param_type_name].append((name, _simplify_range(text)))
    for kind, title in (("argument", "Arguments"), ("option", "Options")):
        if rows[kind]:
            with formatter.section(title):
                formatter.write_dl(rows[kind])


def _format_argument_name(name: str) -> str:
    """Format an argument name in upper case without braces. For example, `{model}` becomes `MODEL`."""
    return re.sub(r"[{}]", "", name).upper()


def _format_metavar(option: str) -> str:
    for pattern, metavar in _METAVARS.items():
        option = re.sub(pattern, metavar, option)
    return option


def _simplify_range(text: str) -> str:
    """Remove the ranges x>=0 and x>=1, which are obvious for counts, and spell out other lower limits."""
    text = re.sub(r"(; )?\bx>=[01](?=\])", "", text).removesuffix("  []")
    return re.sub(r"\bx>=", "at least ", text)
