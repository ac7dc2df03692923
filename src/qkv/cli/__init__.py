"""What `qkv` does on the command line: arguments in, one call, results printed."""

import sys
from typing import Annotated

import typer

import qkv
from qkv.cli.classify import classify
from qkv.cli.convert import convert
from qkv.cli.cost import cost
from qkv.cli.data import data
from qkv.cli.demo import demo
from qkv.cli.doctor import doctor
from qkv.cli.embed import embed
from qkv.cli.evaluate import evaluate
from qkv.cli.explore import explore
from qkv.cli.fill import fill
from qkv.cli.finetune import finetune
from qkv.cli.generate import generate
from qkv.cli.lesson import lesson
from qkv.cli.look import look
from qkv.cli.models import models
from qkv.cli.similar import similar
from qkv.cli.together import exit_code
from qkv.cli.tokenizer import tokenizer
from qkv.cli.train import train
from qkv.cli.translate import translate
from qkv.cli.verify import verify
from qkv.cli.words import words
from qkv.errors import QKVError

# Plain help text: laying it out with rich would triple the time `qkv --help` takes.
app = typer.Typer(
    name="qkv",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(lesson)
app.command()(train)
app.command()(finetune)
app.command()(generate)
app.command()(translate)
app.command()(evaluate)
app.command()(fill)
app.command()(classify)
app.command()(embed)
app.command()(similar)
app.command()(words)
app.command()(look)
app.command()(convert)
app.command()(verify)
app.command()(models)
app.command()(explore)
app.command()(doctor)
app.add_typer(tokenizer, name="tokenizer")
app.add_typer(data, name="data")
app.add_typer(cost, name="cost")


def main() -> None:
    """Exit 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C."""
    try:
        app(prog_name="qkv")
    except QKVError as error:
        print(f"qkv: error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def _show_version(wanted: bool) -> bool:
    if wanted:
        print(f"qkv {qkv.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """The Transformer, whole: build it, train it, run it, look inside.

    \b
    Examples:
      qkv demo                                     what the shipped models do, then the explorer
      qkv lesson                                   the lectures' examples: what there is to see
      qkv lesson walkthrough --plot a.png          one attention step by step, with its picture
      qkv generate stories "Once upon a time"      a story from the model that ships with qkv
      qkv train gpt --text book.txt --minutes 5    your own text in, a trained GPT out
      qkv evaluate stories --text stories.txt      how well a model guesses a text
      qkv translate es-en "No lo sé."              Spanish into English
      qkv explore                                  every head of every layer, in the browser
      qkv cost gpt2                                parameters, FLOPs and bytes, before they are spent
      qkv doctor                                   what this machine is, and what will be fast on it
    """
