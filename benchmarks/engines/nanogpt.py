"""Where nanoGPT is: a clone in the folder the user names."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

from benchmarks.engines.speaking import MissingPeerError


def find(peers: str | None) -> Path:
    if peers is None:
        raise MissingPeerError("no folder of peers was named (--peers)")
    folder = Path(peers) / "nanoGPT"
    if not (folder / "model.py").is_file():
        raise MissingPeerError("the folder of peers has no nanoGPT/model.py (a clone of github.com/karpathy/nanoGPT)")
    return folder


def version(folder: Path) -> str:
    """Of its own repository: a mere copy of its files may lie in another's."""
    if not (folder / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def load(folder: Path) -> ModuleType:
    """Its model.py."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
