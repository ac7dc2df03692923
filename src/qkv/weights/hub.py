"""A model by its name on the hub: `org/model`, downloaded once by `huggingface_hub`."""

import os
from pathlib import Path

from qkv.errors import InputError, MissingExtraError

WANTED = [
    "*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt",
    "modules.json", "*_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json",
]  # fmt: skip
"""Nothing that runs, nothing pickled."""


def download(name: str, *, cache: Path | None = None) -> Path:
    """The folder of the newest snapshot, from the cache where it is there already.

    The environment's HF_ENDPOINT is asked, else the hub itself; a token is huggingface_hub's own business.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingExtraError(
            f"{name}: there is no such folder here; to load it from the hub, install qkv[hub]"
        ) from None
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        # Weights in folders inside a repository are the same model for other programs.
        folder = api.snapshot_download(
            name, allow_patterns=WANTED, ignore_patterns=["*/*.safetensors"], cache_dir=cache
        )
    except Exception as error:  # noqa: BLE001 - each of its versions raises others, from several HTTP libraries
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{name}: there is no such folder here, and the hub gave no model: {reason}") from None
    return Path(folder)
