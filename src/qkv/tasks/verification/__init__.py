"""Does a model say the same on every road? The laws of tests/agreement, for a model of one's own."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path

import torch

from qkv.choices import CheckStatus
from qkv.tasks.devices import resolve_device
from qkv.tasks.loader import load_pretrained
from qkv.tasks.verification import computation_checks, storage_checks
from qkv.tasks.verification.case import VerificationCase, NotCheckedError

__all__ = ["CHECKS", "DEFAULT_TEXTS", "Check", "CheckResult", "verify"]

DEFAULT_TEXTS = (
    "Once upon a time there was a cat.",
    "¿Dónde está la biblioteca? El niño comió doce manzanas y se fue a casa.",
    "A film that is neither short nor good, but I would see it again: 7/10.",
    "The animal didn't cross the street because it was too tired.",
    "The girl took the boat and rowed to the island. There she found a house, and behind its red door a dog. " * 2,
)
ROUNDING_TOLERANCE = 1e-5
"""As a share of the largest logit: several times what the order of float32 sums changes."""
CROSS_LIBRARY_TOLERANCE = 1e-4
"""Other programs take another order at every place."""
INT8_WEIGHT_TOLERANCE = 0.501
"""Scales are rounded up to 16 bits, so a half may look a little more."""
INT8_OUTPUT_TOLERANCE = 0.1
"""int8 leaves trained models within a few hundredths."""


@dataclass(frozen=True)
class Check:
    """`difference` gives how far apart the two sides of `compared` are."""

    difference: Callable[[VerificationCase], float]
    tolerance: float
    comparison: str
    is_quick: bool = True


_DEVICE_CHECKS = {"device": Check(computation_checks.compare_with_cpu, CROSS_LIBRARY_TOLERANCE, "this device against the CPU, both plain")}
_COMPUTATION_CHECKS = {
    "fused": Check(computation_checks.compare_fused, ROUNDING_TOLERANCE, "fused attention against plain"),
    "cached": Check(computation_checks.compare_cached, ROUNDING_TOLERANCE, "half a text, then token by token, against whole"),
    "batched": Check(computation_checks.compare_batched, ROUNDING_TOLERANCE, "a text beside another against it alone"),
    "padded": Check(computation_checks.compare_padded, ROUNDING_TOLERANCE, "garbage as padding, left and right, against none"),
    "packed": Check(computation_checks.compare_packed, ROUNDING_TOLERANCE, "a text behind another in a row against it alone"),
    "greedy": Check(partial(computation_checks.compare_generated, n_beams=1), ROUNDING_TOLERANCE, "new tokens and their log p against the plain road"),
    "beam": Check(partial(computation_checks.compare_generated, n_beams=3), ROUNDING_TOLERANCE, "log p of what 3 beams found against the plain road"),
    "compiled": Check(computation_checks.compare_compiled, ROUNDING_TOLERANCE, "torch.compile against plain", is_quick=False),
}
_STORAGE_CHECKS = {
    "saved": Check(partial(storage_checks.compare_round_trip, by=storage_checks.OWN), 0.0, "our folder, read again, against before"),
    "int8 weights": Check(storage_checks.compare_int8_weights, INT8_WEIGHT_TOLERANCE, "int8 steps that a weight moves"),
    "int8": Check(storage_checks.compare_int8_outputs, INT8_OUTPUT_TOLERANCE, "answers with int8 weights against before (rms)"),
    "hf": Check(partial(storage_checks.compare_round_trip, by=storage_checks.HF), 0.0, "Hugging Face folder, read again, against before"),
    "transformers": Check(storage_checks.transformers, CROSS_LIBRARY_TOLERANCE, "transformers on that folder against plain", is_quick=False),
    "gguf": Check(partial(storage_checks.compare_round_trip, by=storage_checks.GGUF), 0.0, "GGUF file (f32), read again, against before"),
    "ct2": Check(storage_checks.compare_ctranslate2, CROSS_LIBRARY_TOLERANCE, "log p by CTranslate2 against plain", is_quick=False),
    "resumed": Check(storage_checks.compare_resumed_training, 0.0, "2 steps with a stop between against without", is_quick=False),
}
CHECKS = _COMPUTATION_CHECKS | _STORAGE_CHECKS


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check of one model ended in."""

    check: str
    comparison: str
    difference: float | None
    """None: there is none, and `reason` says why."""
    tolerance: float
    verdict: CheckStatus
    reason: str | None
    seconds: float


def verify(
    name: str | Path, *, texts: Sequence[str] = DEFAULT_TEXTS, quick: bool = False, device: str = "cpu",
    progress: Callable[[str], object] = lambda _check: None,
) -> Iterator[CheckResult]:  # fmt: skip
    """Every check of MODEL, in turn; `progress` is told its name before. `quick`: those that take a moment.

    `device`: where the fast roads are taken, and compared with the CPU's plain one too. Files are read on the CPU.
    """
    where = resolve_device(device)
    run = Path(name) if (Path(name) / "checkpoints").is_dir() else None
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        case = VerificationCase(loaded=load_pretrained(name), texts=texts, folder=Path(folder), run=run)
        _ = case.plain  # so that it counts for no check, and texts that cannot be used are told at once
        there = None if where.type == "cpu" else case.on(where)
        for check, what in (CHECKS if there is None else _DEVICE_CHECKS | CHECKS).items():
            progress(check)
            own = case if there is None or check in _STORAGE_CHECKS else there
            yield _run_check(check, what, own, leave_out=quick and not what.is_quick)


def _run_check(name: str, check: Check, case: VerificationCase, *, leave_out: bool) -> CheckResult:
    started, difference, reason = time.perf_counter(), None, None
    try:
        if leave_out:
            raise NotCheckedError("it takes long, and --quick was asked for")
        difference = check.difference(case)
        verdict = CheckStatus.PASSED if difference <= check.tolerance else CheckStatus.FAILED
        if not isfinite(difference):
            difference, reason = None, f"the difference is {difference}"
    except NotCheckedError as error:
        verdict, reason = CheckStatus.NOT_CHECKED, str(error)
    except Exception as error:  # noqa: BLE001 - whatever breaks on a road, that road is broken; the others are tried
        verdict, reason = CheckStatus.FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return CheckResult(
        check=name, comparison=check.comparison, difference=difference, tolerance=check.tolerance, verdict=verdict, reason=reason,
        seconds=round(time.perf_counter() - started, 3),
    )  # fmt: skip
