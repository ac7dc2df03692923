"""Read published `config.json` files, and reject unknown settings."""

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
"""The supported activations, keyed by their published names. If one has several names, we write the first."""

# Secondary dropout rates and initialization settings, which affect training but not the outputs of published weights.
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
"""Keys that never affect the outputs of a model with published weights."""

FIXED_VALUES = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
}
"""Settings that exist for all model types and for which our models support only one value."""


class PublishedConfig:
    """The settings in a published config, which are removed as they are read. Null values count as missing."""

    def __init__(self, settings: Mapping[str, Any], *, tensor_names: frozenset[str] = frozenset()) -> None:
        """Create a reader for `settings`.

        `tensor_names` are the tensor names in the weights file, or empty if unknown.
        """
        self.tensor_names = tensor_names
        self.remarks: list[str] = []
        """Notes for the user that are not errors."""
        self.published_names: dict[str, str] = {}
        """A map from the name of each of our settings that was read to the published name."""
        self._remaining = dict(settings)
        self._used_keys: set[str] = set()

    def pop(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON values, validated by the config
        """Remove a setting and return its value, or `default` if it is missing or null."""
        value = self._remaining.pop(key, None)
        self._used_keys.add(key)
        return default if value is None else value

    def pop_required(self, key: str) -> Any:  # noqa: ANN401
        """Remove a setting and return its value, or raise an error if the setting is missing."""
        if (value := self.pop(key)) is None:
            raise ConfigError(f"{key} is missing")
        return value

    def pop_int(self, key: str, default: int) -> int:
        """Remove a setting, check that it is an integer, and return it.

        Use this method for values that are needed before our config validates them.
        """
        value = self.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{key} must be an integer, got {value!r} of type {type(value).__name__}")
        return value

    def pop_dict(self, key: str) -> dict[Any, Any]:
        """Remove a setting whose value is an object, and return the value or, if it is missing, an empty dict."""
        value = self.pop(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{key} must be an object, got {value!r} of type {type(value).__name__}")
        return value

    def is_absent(self, key: str) -> bool:
        """Return whether a key is absent, in which case the published default applies. Null counts as present."""
        return key not in self._remaining

    def pop_renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Remove the settings in `names`, and return those that are not missing, keyed by our names.

        `names` maps published names to our names.
        """
        self.published_names |= {field: key for key, field in names.items()}
        values = {field: self.pop(key) for key, field in names.items()}
        return {field: value for field, value in values.items() if value is not None}

    def pop_activation(self, key: str, default: str) -> Activation:
        return parse_activation(key, self.pop(key, default))

    def pop_equal_pair(self, first: str, second: str, *, field: str) -> dict[str, Any]:
        """Remove an encoder and a decoder setting, which must be equal, and return them as one setting of ours."""
        value, other = self._remaining.get(first), self.pop(second)
        if value != other:
            raise ConfigError(f"{first} and {second} must be equal, got {first}={value} and {second}={other}")
        return self.pop_renamed({first: field})

    def use_published_names(self, message: str) -> str:
        """Replace our setting names with the published names in an error message."""
        return re.sub(r"\w+", lambda word: self.published_names.get(word[0], word[0]), message)

    def pop_expected_values(self, values: Mapping[str, Any]) -> None:
        """Remove the given settings, and raise an error if any of them is present with a different value."""
        for key, expected in values.items():
            value = self.pop(key, expected)
            if value != expected:
                raise ConfigError(f"{key}={value!r} is not supported; the only supported value is {expected!r}")

    def reject_unknown(self, *, ignored_keys: frozenset[str] = frozenset()) -> None:
        """Raise an error for any remaining setting except token ids and keys that do not affect the outputs."""
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
    """Return the activation with a given published name. `key` is the name of the setting in error messages."""
    if not isinstance(name, str) or name not in ACTIVATION_NAMES:
        raise ConfigError(f"{key}={name!r} is not supported; supported values: {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def activation_name(activation: Activation) -> str:
    """Return the published name of an activation."""
    return next(name for name, value in ACTIVATION_NAMES.items() if value is activation)


def to_published_settings(config: object, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of our config, keyed by their published names.

    `names` maps published names to our field names.
    """
    return {key: getattr(config, field) for key, field in names.items()}
