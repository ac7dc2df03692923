"""Verify that all implementations of a model agree. The tests in tests/agreement do the same for small models."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path

import torch

from qkv.choices import BackendName, CheckStatus
from qkv.engines import BACKENDS
from qkv.tasks.loader import load_pretrained
from qkv.tasks.verification import computation_checks, storage_checks
from qkv.tasks.verification.case import NotCheckedError, VerificationCase
from qkv.utils import CUDNN_TF32_DISABLED, resolve_device

__all__ = ["CHECKS", "DEFAULT_TEXTS", "Check", "CheckResult", "verify"]

DEFAULT_TEXTS = (
    "Once upon a time there was a cat.",
    "¿Dónde está la biblioteca? El niño comió doce manzanas y se fue a casa.",
    "A film that is neither short nor good, but I would see it again: 7/10.",
    "The animal didn't cross the street because it was too tired.",
    "The girl took the boat and rowed to the island. There she found a house, and behind its red door a dog. " * 2,
)
ROUNDING_TOLERANCE = 1e-5
"""The tolerance for changes in the order of float32 summation, relative to the largest logit."""
CROSS_LIBRARY_TOLERANCE = 1e-4
"""The tolerance for other libraries and devices, which use a different summation order in every operation."""
INT8_WEIGHT_TOLERANCE = 0.501
"""The tolerance for int8 weights in quantization steps.

This is half a step plus a margin because scales are rounded up to 16 significant bits.
"""
INT8_OUTPUT_TOLERANCE = 0.1
"""The tolerance for outputs with int8 weights, which change the outputs of trained models by a few percent."""


@dataclass(frozen=True)
class Check:
    """A comparison of two implementations. `difference` computes how much their outputs differ."""

    difference: Callable[[VerificationCase], float]
    tolerance: float
    comparison: str
    is_quick: bool = True


_DEVICE_CHECKS = {
    "device": Check(
        computation_checks.compare_with_cpu, CROSS_LIBRARY_TOLERANCE, "this device compared with the CPU, both eager"
    )
}
_COMPUTATION_CHECKS = {
    "fused": Check(
        computation_checks.compare_fused_attention, ROUNDING_TOLERANCE, "fused attention compared with eager attention"
    ),
    "cached": Check(
        computation_checks.compare_cached,
        ROUNDING_TOLERANCE,
        "prefill and cached decode steps compared with a full pass",
    ),
    "batched": Check(
        computation_checks.compare_batched, ROUNDING_TOLERANCE, "a batch of two texts compared with a single text"
    ),
    "padded": Check(
        computation_checks.compare_padded,
        ROUNDING_TOLERANCE,
        "random padding on the left and right compared with no padding",
    ),
    "packed": Check(
        computation_checks.compare_packed,
        ROUNDING_TOLERANCE,
        "two texts packed into one row compared with separate rows",
    ),
    "greedy": Check(
        partial(computation_checks.relative_generated_log_prob_error, n_beams=1),
        ROUNDING_TOLERANCE,
        "greedy tokens from cached decode steps compared with eager",
    ),
    "beam": Check(
        partial(computation_checks.relative_generated_log_prob_error, n_beams=3),
        ROUNDING_TOLERANCE,
        "log-probabilities of cached 3-beam search compared with eager",
    ),
    "compiled": Check(
        computation_checks.compare_compiled, ROUNDING_TOLERANCE, "torch.compile compared with eager", is_quick=False
    ),
}
_BACKEND_CHECKS = {
    f"{backend.name} backend": Check(
        partial(computation_checks.compare_backend, backend=backend),
        ROUNDING_TOLERANCE,
        f"greedy and beam search or encoding by the {backend.name} backend compared with eager",
    )
    for backend in BACKENDS
    if backend.name != BackendName.EAGER
}
_STORAGE_CHECKS = {
    "saved": Check(
        partial(storage_checks.max_relative_round_trip_difference, save_format=storage_checks.NATIVE),
        0.0,
        "saved and reloaded in the native format",
    ),
    "int8 weights": Check(
        storage_checks.max_int8_change_in_steps,
        INT8_WEIGHT_TOLERANCE,
        "largest change of a weight by int8, in quantization steps",
    ),
    "int8": Check(
        storage_checks.relative_rms_change_with_int8,
        INT8_OUTPUT_TOLERANCE,
        "outputs with int8 weights compared with float (RMS)",
    ),
    "hf": Check(
        partial(storage_checks.max_relative_round_trip_difference, save_format=storage_checks.HF),
        0.0,
        "saved and reloaded in the Hugging Face format",
    ),
    "transformers": Check(
        storage_checks.compare_outputs_with_transformers,
        CROSS_LIBRARY_TOLERANCE,
        "outputs of transformers compared with eager",
        is_quick=False,
    ),
    "gguf": Check(
        partial(storage_checks.max_relative_round_trip_difference, save_format=storage_checks.GGUF),
        0.0,
        "saved and reloaded as GGUF (f32)",
    ),
    "ct2": Check(
        storage_checks.compare_ctranslate2_log_probs,
        CROSS_LIBRARY_TOLERANCE,
        "log-probabilities of CTranslate2 compared with eager",
        is_quick=False,
    ),
    "resumed": Check(
        storage_checks.compare_resumed_training,
        0.0,
        "2 training steps with a restart compared with no restart",
        is_quick=False,
    ),
}
CHECKS = _COMPUTATION_CHECKS | _BACKEND_CHECKS | _STORAGE_CHECKS


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check."""

    check: str
    comparison: str
    difference: float | None
    """The difference, or `None` if there is none to report. In that case, `reason` contains an explanation."""
    tolerance: float
    verdict: CheckStatus
    reason: str | None
    seconds: float


def verify(
    name: str | Path,
    *,
    texts: Sequence[str] = DEFAULT_TEXTS,
    quick: bool = False,
    device: str = "cpu",
    progress: Callable[[str], object] = lambda _check: None,
) -> Iterator[CheckResult]:
    """Run all checks on a model, and yield their results.

    `progress` is called with the name of each check before the check runs. `quick` skips slow checks. If `device` is
    not the CPU, the computations run on that device, and their results are also compared with those on the CPU. Checks
    of file formats always run on the CPU.
    """
    torch_device = resolve_device(device)
    run = Path(name) if (Path(name) / "checkpoints").is_dir() else None
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        case = VerificationCase(loaded=load_pretrained(name), texts=texts, folder=Path(folder), run=run)
        # Compute the outputs first so that their time is not attributed to a check and unusable texts raise an error
        # immediately.
        _ = case.reference_outputs
        device_case = None if torch_device.type == "cpu" else case.to_device(torch_device)
        for check, check_spec in (CHECKS if device_case is None else _DEVICE_CHECKS | CHECKS).items():
            progress(check)
            check_case = case if device_case is None or check in _STORAGE_CHECKS else device_case
            yield _run_check(check, check_spec, check_case, skip=quick and not check_spec.is_quick)


def _run_check(name: str, check: Check, case: VerificationCase, *, skip: bool) -> CheckResult:
    start_time, difference, reason = time.perf_counter(), None, None
    try:
        if skip:
            raise NotCheckedError("skipped by --quick because this check is slow")
        # Recurrent models on a GPU would otherwise differ by more than the tolerances.
        with CUDNN_TF32_DISABLED:
            difference = check.difference(case)
        verdict = CheckStatus.PASSED if difference <= check.tolerance else CheckStatus.FAILED
        if not isfinite(difference):
            difference, reason = None, f"the difference is {difference}"
    except NotCheckedError as error:
        verdict, reason = CheckStatus.NOT_CHECKED, str(error)
    except Exception as error:  # noqa: BLE001 - any exception fails this check, and the others still run
        verdict, reason = CheckStatus.FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return CheckResult(
        check=name,
        comparison=check.comparison,
        difference=difference,
        tolerance=check.tolerance,
        verdict=verdict,
        reason=reason,
        seconds=round(time.perf_counter() - start_time, 3),
    )
