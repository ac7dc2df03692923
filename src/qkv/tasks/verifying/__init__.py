"""Does a model say the same on every road? The laws of tests/agreement, for a model of one's own."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path

import torch

from qkv.choices import Verdict
from qkv.tasks.devices import torch_device
from qkv.tasks.loading import load_weights
from qkv.tasks.verifying import computed, stored
from qkv.tasks.verifying.case import Case, NotCheckedError

__all__ = ["CHECKS", "TEXTS", "Check", "Result", "verify"]

TEXTS = (
    "Once upon a time there was a cat.",
    "¿Dónde está la biblioteca? El niño comió doce manzanas y se fue a casa.",
    "A film that is neither short nor good, but I would see it again: 7/10.",
    "The animal didn't cross the street because it was too tired.",
    "The girl took the boat and rowed to the island. There she found a house, and behind its red door a dog. " * 2,
)
EQUAL = 1e-5
"""As a share of the largest logit: several times what the order of float32 sums changes."""
OTHERS = 1e-4
"""Other programs take another order at every place."""
HALF_A_STEP = 0.501
"""Scales are rounded up to 16 bits, so a half may look a little more."""
SMALL = 0.1
"""int8 leaves trained models within a few hundredths."""


@dataclass(frozen=True)
class Check:
    """`difference` gives how far apart the two sides of `compared` are."""

    difference: Callable[[Case], float]
    limit: float
    compared: str
    is_quick: bool = True


_ELSEWHERE = {"device": Check(computed.on_cpu, OTHERS, "this device against the CPU, both plain")}
_COMPUTED = {
    "fused": Check(computed.fused, EQUAL, "fused attention against plain"),
    "cached": Check(computed.cached, EQUAL, "half a text, then token by token, against whole"),
    "batched": Check(computed.batched, EQUAL, "a text beside another against it alone"),
    "padded": Check(computed.padded, EQUAL, "garbage as padding, left and right, against none"),
    "packed": Check(computed.packed, EQUAL, "a text behind another in a row against it alone"),
    "greedy": Check(partial(computed.written, n_beams=1), EQUAL, "new tokens and their log p against the plain road"),
    "beam": Check(partial(computed.written, n_beams=3), EQUAL, "log p of what 3 beams found against the plain road"),
    "compiled": Check(computed.compiled, EQUAL, "torch.compile against plain", is_quick=False),
}
_STORED = {
    "saved": Check(partial(stored.comes_back, by=stored.OWN), 0.0, "our folder, read again, against before"),
    "int8 weights": Check(stored.int8_weights, HALF_A_STEP, "int8 steps that a weight moves"),
    "int8": Check(stored.int8_answers, SMALL, "answers with int8 weights against before (rms)"),
    "hf": Check(partial(stored.comes_back, by=stored.HF), 0.0, "Hugging Face folder, read again, against before"),
    "transformers": Check(stored.transformers, OTHERS, "transformers on that folder against plain", is_quick=False),
    "gguf": Check(partial(stored.comes_back, by=stored.GGUF), 0.0, "GGUF file (f32), read again, against before"),
    "ct2": Check(stored.ct2, OTHERS, "log p by CTranslate2 against plain", is_quick=False),
    "resumed": Check(stored.resumed, 0.0, "2 steps with a stop between against without", is_quick=False),
}
CHECKS = _COMPUTED | _STORED


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one check of one model ended in."""

    check: str
    compared: str
    difference: float | None
    """None: there is none, and `reason` says why."""
    limit: float
    verdict: Verdict
    reason: str | None
    seconds: float


def verify(
    name: str | Path, *, texts: Sequence[str] = TEXTS, quick: bool = False, device: str = "cpu",
    progress: Callable[[str], object] = lambda _check: None,
) -> Iterator[Result]:  # fmt: skip
    """Every check of MODEL, in turn; `progress` is told its name before. `quick`: those that take a moment.

    `device`: where the fast roads are taken, and compared with the CPU's plain one too. Files are read on the CPU.
    """
    where = torch_device(device)
    run = Path(name) if (Path(name) / "checkpoints").is_dir() else None
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        case = Case(loaded=load_weights(name), texts=texts, folder=Path(folder), run=run)
        _ = case.plain  # so that it counts for no check, and texts that cannot be used are told at once
        there = None if where.type == "cpu" else case.on(where)
        for check, what in (CHECKS if there is None else _ELSEWHERE | CHECKS).items():
            progress(check)
            own = case if there is None or check in _STORED else there
            yield _result(check, what, own, leave_out=quick and not what.is_quick)


def _result(name: str, check: Check, case: Case, *, leave_out: bool) -> Result:
    started, difference, reason = time.perf_counter(), None, None
    try:
        if leave_out:
            raise NotCheckedError("it takes long, and --quick was asked for")
        difference = check.difference(case)
        verdict = Verdict.PASSED if difference <= check.limit else Verdict.FAILED
        if not isfinite(difference):
            difference, reason = None, f"the difference is {difference}"
    except NotCheckedError as error:
        verdict, reason = Verdict.NOT_CHECKED, str(error)
    except Exception as error:  # noqa: BLE001 - whatever breaks on a road, that road is broken; the others are tried
        verdict, reason = Verdict.FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Result(
        check=name, compared=check.compared, difference=difference, limit=check.limit, verdict=verdict, reason=reason,
        seconds=round(time.perf_counter() - started, 3),
    )  # fmt: skip
