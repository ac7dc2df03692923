"""`qkv verify`: does a model say the same on every road?"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.columns import table
from qkv.cli.model import Model
from qkv.cli.places import Device
from qkv.cli.progress import bars

if TYPE_CHECKING:
    from qkv.tasks.verifying import Result


def verify(
    model: Model,
    *,
    text: Annotated[str | None, typer.Option(help="A file with a text a line, instead of those built in.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out compiling, other programs, training on.")] = False,
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check that a model says the same on every road: cached, batched, padded, compiled, saved, exported …

    What is right, the plain road says: explicit softmax, no cache, one text. DIFFERENCE is the largest, as a share
    of the largest number compared. Computed in float32, on the CPU unless --device says; texts are cut at 64 tokens or
    half the context.
    A check that does not apply, or cannot be made here, is listed with the reason. Exit 1 if one fails.

    \b
    Examples:
      qkv verify stories
      qkv verify run --quick
      qkv verify ./my-hf-folder --text mine.txt --json
    """
    from dataclasses import asdict

    from qkv.choices import Verdict
    from qkv.cli.texts import read_lines_of
    from qkv.tasks.verifying import TEXTS
    from qkv.tasks.verifying import verify as results_of

    texts = TEXTS if text is None else [line for line in read_lines_of(text) if line.strip()]
    with bars() as progress:
        results = list(results_of(model, texts=texts, quick=quick, device=device, progress=progress))
    passed = all(result.verdict is not Verdict.FAILED for result in results)
    if as_json:
        print(json.dumps({"model": model, "passed": passed, "checks": [asdict(result) for result in results]}))
    else:
        rows = [_row(result) for result in results]
        ends = [one.verdict if one.reason is None else f"{one.verdict}: {one.reason}" for one in results]
        lines = table(("CHECK", "COMPARED", "DIFFERENCE", "LIMIT", "SECONDS"), rows, left=2)
        print("\n".join(f"{line}  {end}" for line, end in zip(lines, ["RESULT", *ends], strict=True)))
    if not passed:
        raise typer.Exit(1)


def _row(one: "Result") -> tuple[str, ...]:
    difference = "–" if one.difference is None else f"{one.difference:.1e}" if one.difference else "0"
    return one.check, one.compared, difference, f"{one.limit:g}", f"{one.seconds:.1f}"
