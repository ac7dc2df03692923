"""The Transformer, whole. Each name below is imported when first used, so `import qkv` is instant."""

import os
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

# torch's threads wait for each other by spinning, for milliseconds if left alone: where other programs want the cores
# too, a small training step then takes 10 to 30 times as long. 2,000 turns (about 0.1 ms) outlast the usual gap between
# two products: a quiet machine loses 2 to 4 % of a training step. torch reads this when it is loaded, so it is here.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

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
    "intervene",
    "estimate",
    "explore",
    "finetune",
    "load",
    "load_config",
    "preset",
    "record",
    "train",
]

_HOME = {
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
    if name not in _HOME:
        raise AttributeError(f"module 'qkv' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
