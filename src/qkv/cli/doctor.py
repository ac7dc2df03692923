"""The `qkv doctor` command."""

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from qkv.cli.options import select_device
from qkv.cli.output import format_table

EXTRAS = {
    "plot": (("matplotlib",), "figures: --plot, qkv inspect, loss curves"),
    "serve": (("fastapi", "uvicorn"), "the explorer: qkv explore"),
    "eval": (("sacrebleu",), "BLEU and chrF"),
    "formats": (("gguf", "sentencepiece", "ctranslate2", "zstandard"), "GGUF, Marian, CTranslate2, .zst"),
    "hub": (("huggingface_hub",), "models from the Hugging Face Hub"),
    "notebook": (("anywidget",), "qkv.explore in notebooks"),
}
"""Packages and purpose of each optional dependency group in pyproject.toml."""
GPT2_TRAINING_FLOPS_PER_TOKEN = 6 * 124e6
"""FLOPs per token for training GPT-2 (124M parameters), excluding attention scores."""
TYPICAL_MFU = 0.3
"""Typical FLOP rate of training as a fraction of the matmul rate."""

DiagnosticRow = tuple[str, str, str]
"""Name of a check, its value on this machine, and an explanation."""


def doctor(*, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print the hardware, versions and optional packages of this machine, and how they affect performance.

    Takes a few seconds because it times a matrix multiplication.

    \b
    Examples:
      qkv doctor
      qkv doctor --json
    """
    rows = [*_environment_rows(), *_backend_rows(), *_matmul_rate_and_calibration_rows(), *_extra_rows()]
    if as_json:
        print(json.dumps({name: {"value": value, "note": note} for name, value, note in rows}, ensure_ascii=False))
    else:
        print("\n".join(format_table(["CHECK", "VALUE", "NOTE"], rows, n_left_aligned=3)))


def _environment_rows() -> list[DiagnosticRow]:
    import torch

    from qkv import __version__
    from qkv.data.token_store_writer import available_cores

    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    compile_note = "training.compile=true works" if compiler else "training.compile=true on a CPU requires a compiler"
    return [
        ("qkv", __version__, ""),
        ("Python", platform.python_version(), sys.executable),
        (
            "torch",
            str(torch.__version__),
            f"uses {torch.get_num_threads()} of {available_cores()} cores (OMP_NUM_THREADS)",
        ),
        ("OpenMP wait", _openmp_wait_setting(), "how long idle threads spin; reduce it on a busy machine"),
        ("CPU", torch.backends.cpu.get_cpu_capability(), platform.machine()),
        ("memory", _memory_summary(), ""),
        ("C++ compiler", compiler or "none", compile_note),
        _gpu_row(),
    ]


def _openmp_wait_setting() -> str:
    """Return the setting of the environment variable that determines how long idle OpenMP threads spin.

    GOMP_SPINCOUNT takes precedence over OMP_WAIT_POLICY.
    """
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    return next(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _gpu_row() -> DiagnosticRow:
    import torch

    if not torch.cuda.is_available():
        return (
            "GPU",
            "none found by torch",
            "the shipped models run well on a CPU, but large models do not",
        )
    properties = torch.cuda.get_device_properties(0)
    others = f" and {torch.cuda.device_count() - 1} more" if torch.cuda.device_count() > 1 else ""
    return (
        "GPU",
        f"{properties.name}{others}",
        f"{properties.total_memory / 2**30:.0f} GiB; used by default (see --device)",
    )


def _backend_rows() -> list[DiagnosticRow]:
    """Return, for each model family, the backend that runs it on this machine, and why the others do not.

    Small models with the architecture of the shipped ones stand for their families.
    """
    import torch

    from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig
    from qkv.engines import explain_backends
    from qkv.models import build

    sizes: dict[str, Any] = {"vocab_size": 8, "d_model": 8}
    shape: dict[str, Any] = {**sizes, "context_length": 8, "n_heads": 2}
    configs = {
        "GPT": GPTConfig(**shape, n_layers=1),
        "BERT": BERTConfig(**shape, n_layers=1),
        "seq2seq": Seq2SeqConfig(**shape, n_encoder_layers=1, n_decoder_layers=1),
        "RNN": RNNConfig(**sizes, n_encoder_layers=1, n_decoder_layers=1),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for family, config in configs.items():
        with torch.inference_mode():
            selected, reasons = explain_backends(build(config).eval().to(device))
        rows.append((f"{family} backend", selected, "; ".join(f"{name}: {why}" for name, why in reasons.items())))
    return rows


def _matmul_rate_and_calibration_rows() -> list[DiagnosticRow]:
    from qkv.cost.calibration import list_calibrations
    from qkv.training.recipe_selection import measure_matmul_flops

    device = select_device("auto")
    rate = measure_matmul_flops(device)
    tokens_per_second = TYPICAL_MFU * rate / GPT2_TRAINING_FLOPS_PER_TOKEN
    calibrations = ", ".join(path.stem for path in list_calibrations())
    return [
        (
            "matmul rate",
            f"{rate / 1e9:,.0f} GFLOP/s",
            f"GPT-2 (124M) would train at about {tokens_per_second:,.0f} tokens/s",
        ),
        (
            "calibration",
            calibrations or "none",
            "" if calibrations else "run `qkv cost calibrate` to predict times on this machine",
        ),
    ]


def _extra_rows() -> list[DiagnosticRow]:
    rows = []
    for extra, (packages, purpose) in EXTRAS.items():
        missing = [package for package in packages if _package_version(package) is None]
        status = f"missing {', '.join(missing)}" if missing else "installed"
        note = f"{purpose} (pip install 'qkv[{extra}]')" if missing else purpose
        rows.append((f"[{extra}]", status, note))
    return rows


def _package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_summary() -> str:
    """Return a description of the total and available memory, which can be determined only on Linux."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return "unknown on this system"
    kib = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in info.read_text().splitlines())
    }
    return f"{kib['MemTotal'] / 2**20:.0f} GiB, {kib['MemAvailable'] / 2**20:.0f} available"
