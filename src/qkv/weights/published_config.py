"""Reader for published `config.json` files that rejects all settings it does not understand."""

import re
from collections.abc import Mapping
from typing import Any

from qkv.choices import Activation
from qkv.config.base import did_you_mean_suffix
from qkv.errors import ConfigError

ACTIVATION_NAMES = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
"""Published names of activations. If an activation has several names, we write the first one."""

# Secondary dropouts and initialization settings: they affect training, but not the outputs of published weights.
_TRAINING_KEYS = """attention_dropout attn_pdrop embd_pdrop attention_probs_dropout_prob activation_dropout
    classifier_dropout classif_dropout encoder_layerdrop decoder_layerdrop initializer_factor gradient_checkpointing
    problem_type chunk_size_feed_forward pretraining_tp tf_legacy_loss use_bfloat16 finetuning_task"""
_GENERATION_KEYS = """use_cache output_past output_attentions output_hidden_states output_scores return_dict
    return_dict_in_generate max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens force_bos_token_to_be_generated
    task_specific_params prefix max_joined"""
_METADATA_KEYS = """model_type architectures _name_or_path name_or_path transformers_version torch_dtype dtype
    torchscript tokenizer_class id2label label2id num_labels _num_labels is_encoder_decoder"""
IGNORED_KEYS = frozenset(f"{_TRAINING_KEYS} {_GENERATION_KEYS} {_METADATA_KEYS}".split())
"""Keys that never affect the computation of the weights."""

FIXED_VALUES = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
}
"""Keys shared by all model types, each with the only value that our models support."""


class PublishedConfig:
    """Settings of a published config. Each key is popped once. Null values count as missing."""

    def __init__(self, settings: Mapping[str, Any], *, tensor_names: frozenset[str] = frozenset()) -> None:
        """`tensor_names` are the names in the weights file, or empty if they are not known."""
        self.tensor_names = tensor_names
        self.remarks: list[str] = []
        """Messages for the user that are not errors."""
        self.published_names: dict[str, str] = {}
        """Published name of each of our settings that was read."""
        self._remaining = dict(settings)
        self._used_keys: set[str] = set()

    def pop(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON values, validated by the config
        """Remove a setting and return its value, or `default` if it is missing or null."""
        value = self._remaining.pop(key, None)
        self._used_keys.add(key)
        return default if value is None else value

    def pop_required(self, key: str) -> Any:  # noqa: ANN401
        """Remove a required setting and return its value."""
        if (value := self.pop(key)) is None:
            raise ConfigError(f"{key} is missing")
        return value

    def pop_int(self, key: str, default: int) -> int:
        """Remove an integer setting, for values that are used before a config validates them."""
        value = self.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{key} must be an integer, got {value!r} of type {type(value).__name__}")
        return value

    def pop_dict(self, key: str) -> dict[Any, Any]:
        """Remove a setting that is an object, and return an empty dict if it is missing."""
        value = self.pop(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{key} must be an object, got {value!r} of type {type(value).__name__}")
        return value

    def is_absent(self, key: str) -> bool:
        """Whether the key is absent (null counts as present), so that the published default applies."""
        return key not in self._remaining

    def pop_renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Remove the settings in `names` (published name to our name) and return those that are set by our names."""
        self.published_names |= {field: key for key, field in names.items()}
        values = {field: self.pop(key) for key, field in names.items()}
        return {field: value for field, value in values.items() if value is not None}

    def pop_activation(self, key: str, default: str) -> Activation:
        return parse_activation(key, self.pop(key, default))

    def pop_equal_pair(self, first: str, second: str, *, field: str) -> dict[str, Any]:
        """Remove an encoder and a decoder setting that must be equal. Our models have a single setting for both."""
        value, other = self._remaining.get(first), self.pop(second)
        if value != other:
            raise ConfigError(f"{first} and {second} must be equal, got {first}={value} and {second}={other}")
        return self.pop_renamed({first: field})

    def use_published_names(self, message: str) -> str:
        """Replace our setting names in an error message by the published names."""
        return re.sub(r"\w+", lambda word: self.published_names.get(word[0], word[0]), message)

    def pop_expected_values(self, values: Mapping[str, Any]) -> None:
        """Remove settings that must have the given values if present."""
        for key, expected in values.items():
            value = self.pop(key, expected)
            if value != expected:
                raise ConfigError(f"{key}={value!r} is not supported; the only supported value is {expected!r}")

    def reject_unknown(self, *, ignored_keys: frozenset[str] = frozenset()) -> None:
        """Raise an error for remaining settings, except token ids and keys that do not affect the computation."""
        self.pop_expected_values(FIXED_VALUES)
        unknown = [
            key
            for key, value in self._remaining.items()
            if value is not None
            and key not in IGNORED_KEYS | ignored_keys
            and not key.endswith(("_token_id", "_token_ids"))
        ]
        if unknown:
            key, value = unknown[0], self._remaining[unknown[0]]
            hint = did_you_mean_suffix(key, sorted(self._used_keys))
            more = f" (and {len(unknown) - 1} more: {', '.join(unknown[1:6])})" if unknown[1:] else ""
            raise ConfigError(f"unknown setting {key}={value!r} in the published config{hint}{more}")


def parse_activation(key: str, name: object) -> Activation:
    """Return the activation with a published name. `key` is the setting for error messages."""
    if not isinstance(name, str) or name not in ACTIVATION_NAMES:
        raise ConfigError(f"{key}={name!r} is not supported; supported values: {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def activation_name(activation: Activation) -> str:
    """Return the published name of an activation."""
    return next(name for name, value in ACTIVATION_NAMES.items() if value is activation)


def to_published_settings(config: object, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a config under their published names. `names` maps published names to our fields."""
    return {key: getattr(config, field) for key, field in names.items()}
