"""Configs for models, training, fine-tuning and sampling, which can be read from and written to TOML and JSON files.

Configs are frozen and validated on construction. This package never imports torch.
"""

from qkv.config.base import Config
from qkv.config.model import (
    BERTConfig,
    GPTConfig,
    ModelConfig,
    RNNConfig,
    RopeScaling,
    SentenceEmbedding,
    Seq2SeqConfig,
    TransformerConfig,
    config_from_dict,
    load_config,
    save_config,
)
from qkv.config.presets import PRESETS, preset
from qkv.config.recipe import (
    DataConfig,
    FinetuningConfig,
    FinetuningSettings,
    MaskingConfig,
    PairsConfig,
    Recipe,
    TokenizerConfig,
    TrainingConfig,
    load_finetuning,
    load_recipe,
)
from qkv.config.sampling import BeamConfig, SamplingConfig

__all__ = [
    "PRESETS",
    "BERTConfig",
    "BeamConfig",
    "Config",
    "DataConfig",
    "FinetuningConfig",
    "FinetuningSettings",
    "GPTConfig",
    "MaskingConfig",
    "ModelConfig",
    "PairsConfig",
    "RNNConfig",
    "Recipe",
    "RopeScaling",
    "SamplingConfig",
    "SentenceEmbedding",
    "Seq2SeqConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "TransformerConfig",
    "config_from_dict",
    "load_config",
    "load_finetuning",
    "load_recipe",
    "preset",
    "save_config",
]
