"""Find and load nanoGPT from a clone in the folder of peers."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

from benchmarks.engines.protocol import MissingPeerError


def find(peers: str | None) -> Path:
    """Return the folder of the nanoGPT clone."""
    if peers is None:
        raise MissingPeerError("no folder of peers was specified (--peers)")
    folder = Path(peers) / "nanoGPT"
    if not (folder / "model.py").is_file():
        raise MissingPeerError("the folder of peers has no nanoGPT/model.py (a clone of github.com/karpathy/nanoGPT)")
    return folder


def version(folder: Path) -> str:
    """Return the commit of the nanoGPT clone, or "unknown" if the folder is not a Git repository.

    This check ensures that the commit of a surrounding repository is not reported.
    """
    if not (folder / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout.strip() or "unknown"


def load(folder: Path) -> ModuleType:
    """Import the module model.py of nanoGPT."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
