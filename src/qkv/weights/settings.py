"""A published `config.json`, read key by key: what nobody asked for is refused, never ignored."""

import re
from collections.abc import Mapping
from typing import Any

from qkv.choices import Activation
from qkv.config.base import nearest
from qkv.errors import ConfigError

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}
"""Published words for an activation; where one has several, the first is the one we write."""

# Dropouts beside the main one and spreads of a random start: they touch training, never a published weight.
_TRAINING = """attention_dropout attn_pdrop embd_pdrop attention_probs_dropout_prob activation_dropout
    classifier_dropout classif_dropout encoder_layerdrop decoder_layerdrop initializer_factor gradient_checkpointing
    problem_type chunk_size_feed_forward pretraining_tp tf_legacy_loss use_bfloat16 finetuning_task"""
_GENERATION = """use_cache output_past output_attentions output_hidden_states output_scores return_dict
    return_dict_in_generate max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens force_bos_token_to_be_generated
    task_specific_params prefix max_joined"""
_NAMES = """model_type architectures _name_or_path name_or_path transformers_version torch_dtype dtype torchscript
    tokenizer_class id2label label2id num_labels _num_labels is_encoder_decoder"""
INERT = frozenset(f"{_TRAINING} {_GENERATION} {_NAMES}".split())
"""Keys that never change what the weights compute."""

ALWAYS = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
}
"""Keys of every family, with the one value that our models have."""


class Settings:
    """Each key is taken once; null means “not set”."""

    def __init__(self, published: Mapping[str, Any], *, tensor_names: frozenset[str] = frozenset()) -> None:
        """`tensor_names`: what the weights file holds, where it is at hand; empty: not known."""
        self.tensor_names = tensor_names
        self.remarks: list[str] = []
        """What the user should be told of, though it is no fault."""
        self.theirs: dict[str, str] = {}
        """The published name of a setting of ours."""
        self._left = dict(published)
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - checked by the config it goes into
        value = self._left.pop(key, None)
        self._taken.add(key)
        return default if value is None else value

    def need(self, key: str) -> Any:  # noqa: ANN401
        if (value := self.take(key)) is None:
            raise ConfigError(f"{key} is missing")
        return value

    def take_number(self, key: str, default: int) -> int:
        """For settings that are reckoned with before a config checks them."""
        value = self.take(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{key}={value!r} is a {type(value).__name__}, not a whole number")
        return value

    def take_table(self, key: str) -> dict[Any, Any]:
        table = self.take(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}={table!r} is a {type(table).__name__}, not a table of settings")
        return table

    def lacks(self, key: str) -> bool:
        """Not even null: the published default holds."""
        return key not in self._left

    def renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The settings that are there, by our names; the config's own defaults stand for the others."""
        self.theirs |= {ours: theirs for theirs, ours in names.items()}
        values = {ours: self.take(theirs) for theirs, ours in names.items()}
        return {ours: value for ours, value in values.items() if value is not None}

    def activation(self, key: str, default: str) -> Activation:
        return activation_of(key, self.take(key, default))

    def both(self, first: str, second: str, *, ours: str) -> dict[str, Any]:
        """As `renamed`: one value for encoder and decoder, which is all our models have."""
        value, other = self._left.get(first), self.take(second)
        if value != other:
            raise ConfigError(f"{first}={value} and {second}={other} must be equal")
        return self.renamed({first: ours})

    def in_their_words(self, said: str) -> str:
        """What a config of ours says of its settings, with the names that the file has."""
        return re.sub(r"\w+", lambda word: self.theirs.get(word[0], word[0]), said)

    def expect(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            given = self.take(key, value)
            if given != value:
                raise ConfigError(f"{key}={given!r} is not supported; it must be {value!r}")

    def finish(self, *, inert: frozenset[str] = frozenset()) -> None:
        """Refuse what is left, save token ids and what never changes what the weights compute."""
        self.expect(ALWAYS)
        left = [
            key
            for key, value in self._left.items()
            if value is not None and key not in INERT | inert and not key.endswith(("_token_id", "_token_ids"))
        ]
        if left:
            key, value = left[0], self._left[left[0]]
            hint = nearest(key, sorted(self._taken))
            more = f" (and {len(left) - 1} more: {', '.join(left[1:6])})" if left[1:] else ""
            raise ConfigError(f"unknown setting {key}={value!r} in the published config{hint}{more}")


def activation_of(key: str, word: object) -> Activation:
    if not isinstance(word, str) or word not in ACTIVATIONS:
        raise ConfigError(f"{key}={word!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[word]


def activation_word(activation: Activation) -> str:
    return next(word for word, known in ACTIVATIONS.items() if known is activation)


def written(config: object, names: Mapping[str, str]) -> dict[str, Any]:
    """Our settings by their published names."""
    return {theirs: getattr(config, ours) for theirs, ours in names.items()}
