"""The `qkv verify` command."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from qkv.cli.options import DeviceOption, ModelArgument, iter_file_or_stdin_lines
from qkv.cli.output import format_table, sequential_progress_bars

if TYPE_CHECKING:
    from qkv.tasks.verification import CheckResult


def verify(
    model: ModelArgument,
    *,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File with one text per line to use instead of the built-in texts."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Skip the slow checks: torch.compile, comparison with other libraries and resuming training.",
        ),
    ] = False,
    device: DeviceOption = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that all implementations of a model (cached, batched, padded, compiled, exported) give the same results.

    The reference is the eager implementation with an explicit softmax, which processes one text at a time without a
    cache. DIFFERENCE is the largest absolute difference divided by the largest absolute value. All checks run in
    float32. Texts are truncated to 64 tokens or half the context length. For checks that do not apply to the model or
    cannot run on this machine, the reason is printed. The exit status is 1 if a check fails.

    \b
    Examples:
      qkv verify stories
      qkv verify run --quick
      qkv verify ./my-hf-folder --text texts.txt --json
    """
    from dataclasses import asdict

    from qkv.choices import CheckStatus
    from qkv.tasks.verification import DEFAULT_TEXTS
    from qkv.tasks.verification import verify as run_checks

    texts = DEFAULT_TEXTS if text is None else [line for line in iter_file_or_stdin_lines(text) if line.strip()]
    with sequential_progress_bars() as progress:
        results = list(run_checks(model, texts=texts, quick=quick, device=device, progress=progress))
    passed = all(result.verdict is not CheckStatus.FAILED for result in results)
    if as_json:
        print(json.dumps({"model": model, "passed": passed, "checks": [asdict(result) for result in results]}))
    else:
        rows = [_format_check_result_row(result) for result in results]
        lines = format_table(("CHECK", "COMPARED", "DIFFERENCE", "LIMIT", "SECONDS"), rows, n_left_aligned=2)
        # The last column is not padded because the reasons in it can be long.
        outcomes = [
            result.verdict if result.reason is None else f"{result.verdict}: {result.reason}" for result in results
        ]
        print("\n".join(f"{line}  {outcome}" for line, outcome in zip(lines, ["RESULT", *outcomes], strict=True)))
    if not passed:
        raise typer.Exit(1)


def _format_check_result_row(result: "CheckResult") -> tuple[str, ...]:
    difference = "–"
    if result.difference is not None:
        difference = f"{result.difference:.1e}" if result.difference else "0"
    return result.check, result.comparison, difference, f"{result.tolerance:g}", f"{result.seconds:.1f}"
