"""`qkv doctor`: what is this machine, what will be fast on it, what is missing?"""

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.text_tables import table

EXTRAS = {
    "plot": (("matplotlib",), "pictures: --plot, qkv look, loss curves"),
    "serve": (("fastapi", "uvicorn"), "the page: qkv explore"),
    "eval": (("sacrebleu",), "BLEU and chrF"),
    "formats": (("gguf", "sentencepiece", "ctranslate2", "zstandard"), "GGUF, Marian, CTranslate2, .zst"),
    "hub": (("huggingface_hub",), "models by their name on the hub"),
    "notebook": (("anywidget",), "qkv.explore in a notebook"),
}
"""Of pyproject.toml: what each needs, and what it is for."""
A_STEP = 6 * 124e6
"""FLOPs of training GPT-2 (124M) on one token, its attention not counted."""
USUAL_SHARE = 0.3

Finding = tuple[str, str, str]
"""What was looked at, what is there, what that means."""


def doctor(*, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Tell about this machine: torch, processor, GPU, memory, compiler, optional packages, and what will be fast.

    Takes a few seconds: a matrix product is timed.

    \b
    Examples:
      qkv doctor
      qkv doctor --json
    """
    found = [*_machine(), *_speed(), *_extras()]
    if as_json:
        print(json.dumps({name: {"found": here, "means": means} for name, here, means in found}, ensure_ascii=False))
    else:
        print("\n".join(table(["WHAT", "HERE", "WHICH MEANS"], found, left=3)))


def _machine() -> list[Finding]:
    import torch

    from qkv import __version__
    from qkv.data.token_store_writer import available_cores

    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    compiles = "training.compile=true works" if compiler else "training.compile=true needs one on a CPU"
    return [
        ("qkv", __version__, ""),
        ("Python", platform.python_version(), sys.executable),
        ("torch", str(torch.__version__), f"uses {torch.get_num_threads()} of {available_cores()} cores (OMP_NUM_THREADS)"),
        ("its threads", _waiting(), "turns they wait awake; fewer suit a busy machine"),
        ("processor", torch.backends.cpu.get_cpu_capability(), platform.machine()),
        ("memory", _memory(), ""),
        ("C++ compiler", compiler or "none", compiles),
        _gpu(),
    ]


def _waiting() -> str:
    """As the OpenMP of torch's Linux builds reads it: turns come before the policy."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    return next(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return ("GPU", "none that torch sees", "enough for the shipped models; large ones train for days")
    properties = torch.cuda.get_device_properties(0)
    others = f" and {torch.cuda.device_count() - 1} more" if torch.cuda.device_count() > 1 else ""
    return (
        "GPU",
        f"{properties.name}{others}",
        f"{properties.total_memory / 2**30:.0f} GiB; commands use it unless told otherwise (--device)",
    )


def _speed() -> list[Finding]:
    from qkv.cli.device_options import chosen_device
    from qkv.cost.calibration import list_calibrations
    from qkv.training.recipe_selection import measure_matmul_flops

    device = chosen_device("auto")
    rate = measure_matmul_flops(device)
    n_tokens = USUAL_SHARE * rate / A_STEP
    calibrated = ", ".join(path.stem for path in list_calibrations())
    return [
        (
            "matrix products",
            f"{rate / 1e9:,.0f} GFLOP/s",
            f"GPT-2 (124M) would train on about {n_tokens:,.0f} tokens/s",
        ),
        ("calibrated", calibrated or "no", "" if calibrated else "`qkv cost calibrate` lets `qkv cost` predict times"),
    ]


def _extras() -> list[Finding]:
    rows = []
    for extra, (packages, purpose) in EXTRAS.items():
        missing = [package for package in packages if _version(package) is None]
        here = f"without {', '.join(missing)}" if missing else "there"
        means = f"{purpose}: pip install 'qkv[{extra}]'" if missing else purpose
        rows.append((f"[{extra}]", here, means))
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> str:
    """Whole and free, where the system tells."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return "not told by this system"
    kib = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in info.read_text().splitlines())
    }
    return f"{kib['MemTotal'] / 2**20:.0f} GiB, {kib['MemAvailable'] / 2**20:.0f} free"
