"""How a profile is shown: on standard error, beside the results."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.text_tables import table
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.training.profiler import Profile

Profiled = Annotated[bool, typer.Option("--profile", help="Say where the time goes, and how near it is to the bound.")]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="As --profile; also every call, for ui.perfetto.dev.")
]

BEATEN = "—"
_BEATEN_SAID = (
    f"{BEATEN}: faster than the bound, which takes all from memory: part comes from a cache, or is counted as matrix "
    "products (one token's attention is)"
)


def check_trace(trace: Path | None) -> None:
    """Before the work, not after."""
    if trace is not None and trace.suffix != ".json":
        raise InputError(f"--trace {trace}: the name must end in .json")
    if trace is not None and not trace.parent.is_dir():
        raise InputError(f"--trace {trace}: there is no folder {trace.parent}")


def show_profile(profile: "Profile", what: str, *, no_bound: str = "") -> None:
    """`what`: `one step of 4,096 tokens`. `no_bound`: why none is known, where that is so."""
    from qkv.cost.units import format_bytes, format_flops

    head = [f"{what}: {1000 * profile.seconds:,.1f} ms"]
    if (least := profile.bound) is not None and (rates := profile.rates) is not None:
        said = f"{format_flops(rates.matmul_flops)}/s and {format_bytes(int(rates.bandwidth))}/s, as measured here"
        if least <= profile.seconds:
            head[0] += f", {_percent(least / profile.seconds)} of the bound reached"
        head.append(f"at least {1000 * least:,.1f} ms at {said}{' (beaten)' if least > profile.seconds else ''}")
    elif no_bound:
        head.append(f"AT LEAST and REACHED are empty: {no_bound}")
    spent = sorted(profile.seconds_by_kind.items(), key=lambda item: -item[1])
    rows = []
    for kind, seconds in spent:
        least = profile.bounds.get(kind)
        if seconds / profile.seconds < 0.0005 and not least:
            continue
        of_bound = "" if not (least and seconds) else _percent(least / seconds) if least <= seconds else BEATEN
        bound = "" if least is None else f"{1000 * least:,.2f}"
        rows.append((kind.value, f"{1000 * seconds:,.2f}", _percent(seconds / profile.seconds), bound, of_bound))
    lines = table(("TIME GOES TO", "MS", "SHARE", "AT LEAST MS", "REACHED"), rows)
    if any(row[-1] == BEATEN for row in rows):
        lines.append(_BEATEN_SAID)
    print("\n".join([*head, *lines]), file=sys.stderr)


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.0995 else f"{share:.1%}".replace("%", " %")
