"""`qkv verify`: does a model say the same on every road?"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.device_options import Device
from qkv.cli.model_argument import Model
from qkv.cli.progress import bars
from qkv.cli.text_tables import table

if TYPE_CHECKING:
    from qkv.tasks.verification import CheckResult


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

    from qkv.choices import CheckStatus
    from qkv.cli.text_inputs import read_lines_of
    from qkv.tasks.verification import DEFAULT_TEXTS
    from qkv.tasks.verification import verify as results_of

    texts = DEFAULT_TEXTS if text is None else [line for line in read_lines_of(text) if line.strip()]
    with bars() as progress:
        results = list(results_of(model, texts=texts, quick=quick, device=device, progress=progress))
    passed = all(result.verdict is not CheckStatus.FAILED for result in results)
    if as_json:
        print(json.dumps({"model": model, "passed": passed, "checks": [asdict(result) for result in results]}))
    else:
        rows = [_row(result) for result in results]
        ends = [one.verdict if one.reason is None else f"{one.verdict}: {one.reason}" for one in results]
        lines = table(("CHECK", "COMPARED", "DIFFERENCE", "LIMIT", "SECONDS"), rows, left=2)
        print("\n".join(f"{line}  {end}" for line, end in zip(lines, ["RESULT", *ends], strict=True)))
    if not passed:
        raise typer.Exit(1)


def _row(one: "CheckResult") -> tuple[str, ...]:
    difference = "–" if one.difference is None else f"{one.difference:.1e}" if one.difference else "0"
    return one.check, one.comparison, difference, f"{one.tolerance:g}", f"{one.seconds:.1f}"
