"""Download models from the Hugging Face Hub by name (`org/model`)."""

import os
from pathlib import Path

from qkv.errors import InputError, MissingExtraError

ALLOWED_PATTERNS = [
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "modules.json",
    "*_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
]
"""The file name patterns to download. They exclude executable and pickled files."""


def download_safetensors_snapshot(name: str, *, cache: Path | None = None) -> Path:
    """Download the latest snapshot of a model unless it is already in the cache, and return its folder.

    The environment variable HF_ENDPOINT overrides the default endpoint. `huggingface_hub` handles access tokens.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingExtraError(
            f"{name}: not a local folder; downloads from the Hugging Face Hub require huggingface_hub; "
            "install it with: pip install 'qkv[hub]'"
        ) from None
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        # Weights in subfolders are copies of the same model for other frameworks, so they are not downloaded.
        folder = api.snapshot_download(
            name, allow_patterns=ALLOWED_PATTERNS, ignore_patterns=["*/*.safetensors"], cache_dir=cache
        )
    except Exception as error:  # noqa: BLE001 - versions of the library raise different errors of several HTTP clients
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{name}: not a local folder, and the download from the Hugging Face Hub failed: {reason}"
        ) from None
    return Path(folder)
