"""How a profile is shown: on standard error, beside the results."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.columns import table
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.training.profiling import Profile

Profiled = Annotated[bool, typer.Option("--profile", help="Say where the time goes, and how near it is to the bound.")]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="As --profile; also every call, for ui.perfetto.dev.")
]


def check_trace(trace: Path | None) -> None:
    """Before the work, not after."""
    if trace is not None and trace.suffix != ".json":
        raise InputError(f"--trace {trace}: the name must end in .json")
    if trace is not None and not trace.parent.is_dir():
        raise InputError(f"--trace {trace}: there is no folder {trace.parent}")


def show_profile(profile: "Profile", what: str) -> None:
    """`what`: `one step of 4,096 tokens`."""
    from qkv.cost.readable import readable_bytes, readable_flops

    head = [f"{what}: {1000 * profile.seconds:,.1f} ms"]
    if (least := profile.bound) is not None and (rates := profile.rates) is not None:
        said = f"{readable_flops(rates.products)}/s and {readable_bytes(int(rates.memory))}/s, as measured here"
        head[0] += f", {_percent(least / profile.seconds)} of the bound reached"
        head.append(f"at least {1000 * least:,.1f} ms at {said}")
    spent = sorted(profile.spent.items(), key=lambda item: -item[1])
    rows = []
    for kind, seconds in spent:
        least = profile.bounds.get(kind)
        if seconds / profile.seconds < 0.0005 and not least:
            continue
        of_bound = "" if not (least and seconds) else _percent(least / seconds)
        bound = "" if least is None else f"{1000 * least:,.2f}"
        rows.append((kind.value, f"{1000 * seconds:,.2f}", _percent(seconds / profile.seconds), bound, of_bound))
    lines = table(("TIME GOES TO", "MS", "SHARE", "AT LEAST MS", "REACHED"), rows)
    print("\n".join([*head, *lines]), file=sys.stderr)


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.0995 else f"{share:.1%}".replace("%", " %")
