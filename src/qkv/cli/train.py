"""`qkv train`: your own text in, a trained model out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.device_options import chosen_device, next_run_folder
from qkv.cli.option_checks import Context, refuse_others
from qkv.cli.profile_report import Profiled, Trace
from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from qkv.config import Recipe

What = Annotated[
    str | None, typer.Argument(help="`gpt` or `bert` to train on --text, `translate` on --pairs, or a RECIPE.toml.")
]
More = Annotated[list[str] | None, typer.Argument(help="More text files; for a recipe, settings such as a.b=c.")]
Text = Annotated[list[str] | None, typer.Option(help="A text file or folder to train on; may be given again.")]
Pairs = Annotated[list[str] | None, typer.Option(help="source⇥target a line (.tsv, .xz too); may be given again.")]
Target = Annotated[
    str | None, typer.Option(metavar="ENDING", help="--pairs name sources alone; targets are beside: corpus.es, .en")
]
NextSentence = Annotated[
    bool, typer.Option("--next-sentence/--no-next-sentence", help="bert: also learn which text follows which.")
]
RNN = Annotated[bool, typer.Option("--rnn", help="Translate by an RNN with attention, not by a Transformer.")]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0.05, help="Time to train for, once the texts are read; sets the steps, and moves them with the pace."
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Updates to make.")]
Start = Annotated[Path | None, typer.Option("--from", help="A model to begin with.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder, new or empty; else runs/1, runs/2 …")]
Data = Annotated[Path, typer.Option(envvar="QKV_DATA", help="The folder that a recipe's files lie in.")]
Resume = Annotated[Path | None, typer.Option(help="Go on with this run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and train nothing.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write the curves for TensorBoard.")]
Shared = Annotated[
    str | None, typer.Option("--sharding", help="Under torchrun, each process has a copy (ddp) or a piece (fsdp).")
]
GoOn = Annotated[bool, typer.Option("--go-on", help="Where --out holds this run already, go on with it.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Where chance starts; 0 unless the recipe says.")]

_ALWAYS = (
    "what",
    "more",
    "minutes",
    "start",
    "out",
    "dry_run",
    "device",
    "seed",
    "tensorboard",
    "sharding",
    "go_on",
    "profile",
    "trace",
)
_OWN_FILES = {"gpt": ("text",), "bert": ("text", "next_sentence"), "translate": ("pairs", "target", "rnn")}
"""What can be trained without a recipe, and the options that mean something there."""


def train(
    context: Context, what: What = None, more: More = None, *, text: Text = None, pairs: Pairs = None,
    target: Target = None, rnn: RNN = False, next_sentence: NextSentence = True, minutes: Minutes = None,
    steps: Steps = None, start: Start = None, out: Out = None, data: Data = Path(), resume: Resume = None,
    dry_run: DryRun = False, device: Device = "auto", seed: Seed = None, tensorboard: TensorBoard = False,
    sharding: Shared = None, go_on: GoOn = False, profile: Profiled = False, trace: Trace = None,
) -> None:  # fmt: skip
    """Train a model on your own text or pairs, follow a recipe, or go on with a run.

    A run can be stopped with Ctrl-C and resumed: nothing is lost, and the numbers are those of an unbroken run.
    Exit 0 done, 1 failed, 2 bad input, 130 or 143 stopped by Ctrl-C or SIGTERM; a second one leaves at once.

    \b
    Examples:
      qkv train gpt --text book.txt --minutes 5 --out run
      qkv train bert --text reviews.txt --minutes 5 --out run
      qkv train translate --pairs spa-eng.tsv --minutes 10 --out run
      qkv train recipes/shakespeare-char.toml training.steps=200 --data texts --out run
      qkv train --resume run
      qkv train recipe.toml --out run --profile
      torchrun --nproc-per-node 4 -m qkv.cli train recipe.toml --out run      (docs/many-machines.md)
    """
    from qkv.cli.distributed import together
    from qkv.cli.training_run import Beside, dry_run_of, resume_run, start_run
    from qkv.training import DEFAULT_MINUTES, auto_recipe, with_steps

    asked = Beside(tensorboard=tensorboard, profile=profile, trace=trace)
    asked.check()
    with together(chosen_device(device), sharding) as (distributed, where):
        if resume is not None:
            _refuse_beside_resume(context, resume)
            resume_run(resume, where, distributed=distributed, asked=asked)
            return
        if go_on and out is None:
            raise InputError("--go-on needs --out, the run's folder")
        if what in _OWN_FILES:
            refuse_others(context, (*_ALWAYS, "steps", *_OWN_FILES[what]), f"means nothing with {what}")
            minutes = _time(minutes, steps)
            files = [*(text or []), *(pairs or []), *(more or [])]
            choose = _chooser(what, files, is_rnn=rnn, target=target, next_sentence=next_sentence)
            recipe = auto_recipe(files, choose, seconds=60 * (minutes or DEFAULT_MINUTES), device=where)
            recipe = recipe if steps is None else with_steps(recipe, steps)
            recipe = recipe if start is None else _shaped_like(recipe, start)
            data = Path()
        else:
            recipe = _from_file(context, what, more or [], start=start)
        if seed is not None:
            recipe = recipe.replace(training=recipe.training.replace(seed=seed))
        folder = Path(distributed.all_gather_str(str(out or next_run_folder()))[0])
        if dry_run:
            dry_run_of(recipe, where, distributed=distributed, is_timed=minutes is not None)
        elif go_on and distributed.broadcast_from_rank0((folder / "recipe.toml").is_file):
            resume_run(folder, where, distributed=distributed, asked=asked)
        else:
            start_run(recipe, folder, data, device=where, distributed=distributed, minutes=minutes, asked=asked)


def _refuse_beside_resume(context: Context, run: Path) -> None:
    reason = (
        "means nothing with --resume: a run goes on as it was; for more steps raise training.steps in "
        f"{run}/recipe.toml, or begin another run with its weights: --from {run}"
    )
    refuse_others(context, ("resume", "device", "tensorboard", "sharding", "profile", "trace"), reason)


def _from_file(context: Context, what: str | None, overrides: list[str], *, start: Path | None) -> "Recipe":
    from qkv.config import load_recipe

    if what is None:
        raise InputError(
            "what to train? `qkv train gpt --text FILE` (or bert), `qkv train translate --pairs FILE`, "
            "`qkv train RECIPE.toml`, or `qkv train --resume RUN`"
        )
    if not what.endswith(".toml"):
        raise InputError(
            f"'{what}' is neither `gpt` or `bert`, to train on --text, nor `translate`, on --pairs, "
            f"nor a recipe (a file that ends in .toml)"
        )
    recipe = load_recipe(what, tuple(overrides))
    reason = "means nothing with a recipe; its settings are changed so: training.steps=200"
    refuse_others(context, (*_ALWAYS, "data"), reason)
    start = start or (None if recipe.init_from is None else Path(recipe.init_from))
    return recipe if start is None else recipe.replace(init_from=str(start.resolve()))


def _time(minutes: float | None, steps: int | None) -> float | None:
    from qkv.training import DEFAULT_MINUTES

    if minutes is not None and steps is not None:
        raise InputError("--minutes and --steps were both given; choose one")
    return DEFAULT_MINUTES if minutes is None and steps is None else minutes


def _chooser(
    what: str, files: list[str], *, is_rnn: bool, target: str | None, next_sentence: bool
) -> "Callable[..., Recipe]":
    from functools import partial

    from qkv.training import choose_bert_recipe, choose_gpt_recipe, choose_translation_recipe

    if not files and what == "translate":
        raise InputError("no pairs were given: qkv train translate --pairs FILE.tsv")
    if not files:
        raise InputError(f"no text was given: qkv train {what} --text FILE")
    match what:
        case "gpt":
            return choose_gpt_recipe
        case "bert":
            return partial(choose_bert_recipe, next_sentence=next_sentence)
        case _:
            return partial(choose_translation_recipe, is_rnn=is_rnn, target_suffix=target)


def _shaped_like(recipe: "Recipe", start: Path) -> "Recipe":
    """To begin with a model means to have its shape and its tokenizer."""
    from qkv.tasks import load_pretrained, resolve_model_folder

    loaded, folder = load_pretrained(start), resolve_model_folder(start)
    config = loaded.model.config.model_dump(mode="json", exclude={"family", "vocab_size"}, exclude_none=True)
    config["dropout"] = recipe.model["dropout"]
    size = loaded.model.config.vocab_size
    length = min(recipe.training.seq_len, loaded.model.config.context_length)
    return recipe.replace(
        model=config,
        tokenizer={"path": str((folder / "tokenizer.json").resolve()), "vocab_size": size},
        training=recipe.training.replace(seq_len=length, learning_rate=recipe.training.learning_rate / 4),
        init_from=str(start.resolve()),
    )
