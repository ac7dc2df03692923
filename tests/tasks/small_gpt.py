"""A small random language model with a small trained tokenizer, in memory or as a folder."""

import json
from functools import cache
from pathlib import Path

from qkv.choices import TokenizerKind
from qkv.config import GPTConfig
from qkv.tasks import LanguageModel
from qkv.text import Tokenizer, save_tokenizer
from qkv.weights.checkpoint_folder import write_folder_atomically_with_manifest
from tests.agreement.model_strategies import build_random_model
from tests.text.samples import trained

CONTEXT = 41


@cache
def small_gpt(kind: TokenizerKind = TokenizerKind.BPE, seed: int = 0, context: int = CONTEXT) -> LanguageModel:
    tokenizer = trained(kind)
    return LanguageModel(small_model(tokenizer, seed=seed, context=context), tokenizer)


def small_model(tokenizer: Tokenizer, *, seed: int = 0, context: int = CONTEXT):
    config = GPTConfig(vocab_size=tokenizer.vocab_size, context_length=context, d_model=12, n_heads=3, n_layers=2)
    return build_random_model(config, seed)


def save_task(task: LanguageModel, folder: Path) -> Path:
    """Save in float32, so that the loaded weights differ in the last digits."""
    tensors = {name: tensor.float() for name, tensor in task.model.named_parameters()}
    settings = json.dumps(task.model.config.model_dump(mode="json", exclude_none=True))
    write_folder_atomically_with_manifest(
        folder, tensors={"model.safetensors": tensors}, text_files={"config.json": settings}
    )
    save_tokenizer(task.tokenizer, folder)
    return folder
