"""The `qkv` command-line interface."""

import os
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
from qkv.cli.help import OverviewGroup, SimplifiedMetavarCommand
from qkv.cli.inspect import inspect
from qkv.cli.lesson import lesson
from qkv.cli.models import models
from qkv.cli.process import exit_code
from qkv.cli.similar import similar
from qkv.cli.tokenizer import tokenizer
from qkv.cli.train import train
from qkv.cli.translate import translate
from qkv.cli.verify import verify
from qkv.cli.words import words
from qkv.errors import QKVError

# Plain help text: formatting it with rich would triple the run time of `qkv --help`.
app = typer.Typer(
    name="qkv",
    cls=OverviewGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo,
    lesson,
    train,
    finetune,
    generate,
    translate,
    evaluate,
    fill,
    classify,
    embed,
    similar,
    words,
    inspect,
    convert,
    verify,
    models,
    explore,
    doctor,
):
    app.command(cls=SimplifiedMetavarCommand)(command)
app.add_typer(tokenizer, name="tokenizer")
app.add_typer(data, name="data")
app.add_typer(cost, name="cost")


def main() -> None:
    """Run the command line, or print the help if there are no arguments.

    A `QKVError` is printed on one line, and the process exits with the status listed in `qkv --help`.
    """
    limit_openmp_spinning()
    try:
        app(sys.argv[1:] or ["--help"], prog_name="qkv")
    except QKVError as error:
        print(f"qkv: error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def limit_openmp_spinning() -> None:
    """Let idle OpenMP threads spin for at most about 0.1 ms. This must be called before torch is imported.

    By default, torch's idle threads spin for milliseconds. If other programs use the same cores, this makes a small
    training step 10 to 30 times as slow. A spin of 2,000 iterations is longer than the usual gap between two matmuls,
    and the setting costs only 2 to 4 % of a training step on an idle machine.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def _print_version(requested: bool) -> bool:
    if requested:
        print(f"qkv {qkv.__version__}")
        raise typer.Exit
    return requested


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train, run and inspect Transformer models, and estimate their cost."""
