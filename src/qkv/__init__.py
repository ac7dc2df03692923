"""Build, train, run and inspect Transformer models, and estimate their cost.

Public names are imported on first use to keep `import qkv` fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkv.config import BERTConfig, FinetuningSettings, GPTConfig, RNNConfig, Seq2SeqConfig, load_config, preset
    from qkv.cost import estimate
    from qkv.inspection import intervene, record
    from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq, build
    from qkv.serving.notebook import explore
    from qkv.tasks import load
    from qkv.tasks.finetune import finetune
    from qkv.tasks.training import train

__version__ = "0.1.0"

__all__ = [
    "BERT",
    "GPT",
    "BERTConfig",
    "FinetuningSettings",
    "GPTConfig",
    "RNNConfig",
    "RNNSeq2Seq",
    "Seq2Seq",
    "Seq2SeqConfig",
    "__version__",
    "build",
    "estimate",
    "explore",
    "finetune",
    "intervene",
    "load",
    "load_config",
    "preset",
    "record",
    "train",
]

_MODULES = {
    "BERT": "qkv.models",
    "BERTConfig": "qkv.config",
    "FinetuningSettings": "qkv.config",
    "GPT": "qkv.models",
    "GPTConfig": "qkv.config",
    "RNNConfig": "qkv.config",
    "RNNSeq2Seq": "qkv.models",
    "Seq2Seq": "qkv.models",
    "Seq2SeqConfig": "qkv.config",
    "build": "qkv.models",
    "intervene": "qkv.inspection",
    "estimate": "qkv.cost",
    "explore": "qkv.serving.notebook",
    "finetune": "qkv.tasks.finetune",
    "load": "qkv.tasks",
    "load_config": "qkv.config",
    "preset": "qkv.config",
    "record": "qkv.inspection",
    "train": "qkv.tasks.training",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'qkv' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # so that the next access does not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
