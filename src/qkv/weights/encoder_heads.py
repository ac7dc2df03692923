"""Detect which heads a published encoder has, and map their settings and tensor names to ours."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from qkv.choices import ProblemType
from qkv.config import BERTConfig
from qkv.errors import ConfigError
from qkv.weights.name_table import NameMapping, weight_and_bias_mappings
from qkv.weights.published_config import PublishedConfig

_PROBLEM_TYPES = {
    "single_label_classification": ProblemType.SINGLE_LABEL,
    "multi_label_classification": ProblemType.MULTI_LABEL,
    "regression": ProblemType.REGRESSION,
}


class EncoderHead(StrEnum):
    """The possible heads on top of an encoder. The values are used in messages."""

    POOLER = "pooler"
    MASKED_LM = "masked-LM head"
    NEXT_SENTENCE = "next-sentence head"
    CLASSIFIER = "classification head"


def detect_heads_and_add_remarks(
    published: PublishedConfig,
    *,
    architectures: Mapping[str, tuple[EncoderHead, ...]],
    marker_tensors: Mapping[EncoderHead, str],
    prefix: str,
) -> set[EncoderHead]:
    """Detect which output heads a published model has.

    Uses the tensor names if they are available, and the config otherwise.

    The heads in a weights file often differ from those in its config. For each head that appears only in the config, a
    message is added to `published.remarks`. `architectures` maps the name of each `transformers` class to its heads,
    starting with the bare backbone. `marker_tensors` maps each head to a tensor that all files with this head contain.
    """
    match published.pop("architectures", []):
        case []:
            architecture = next(iter(architectures))
        case [str(architecture), *_] if architecture in architectures:
            pass
        case others:
            raise ConfigError(
                f"architectures={others!r} is not supported; supported values: {', '.join(architectures)}"
            )
    stated = architectures[architecture]
    if not published.tensor_names:
        return set(stated)
    names = {name.removeprefix(prefix) for name in published.tensor_names}
    heads = {head for head, name in marker_tensors.items() if name in names}
    published.remarks += [
        f"the config specifies {architecture}, but the weights do not contain a {head} ({marker_tensors[head]}), "
        f"so the loaded model has no {head}"
        for head in stated
        if head not in heads
    ]
    return heads


def pop_encoder_head_settings(heads: set[EncoderHead], published: PublishedConfig) -> dict[str, Any]:
    """Return our config settings for the given heads. The class names are read from `id2label`."""
    settings = {
        "pooler": EncoderHead.POOLER in heads,
        "masked_lm_head": EncoderHead.MASKED_LM in heads,
        "next_sentence_head": EncoderHead.NEXT_SENTENCE in heads,
    }
    if EncoderHead.CLASSIFIER not in heads:
        return settings
    names = _parse_id2label(published.pop_dict("id2label"))
    problem_type = published.pop("problem_type")
    if problem_type is not None and problem_type not in _PROBLEM_TYPES:
        raise ConfigError(
            f"problem_type={problem_type!r} is not supported; supported values: {', '.join(_PROBLEM_TYPES)}"
        )
    return {
        **settings,
        "n_classes": len(names) or published.pop("num_labels", 2),
        **({"class_names": names} if names and names != _default_class_names(len(names)) else {}),
        **({} if problem_type is None else {"problem_type": _PROBLEM_TYPES[problem_type]}),
    }


def _parse_id2label(id2label: dict[Any, Any]) -> tuple[str, ...]:
    by_id = {str(class_id): str(name) for class_id, name in id2label.items()}
    expected = [str(i) for i in range(len(id2label))]
    if set(by_id) != set(expected):
        raise ConfigError(
            f"the keys of id2label must be the integers from 0 to {len(id2label) - 1}, got {', '.join(by_id)}"
        )
    return tuple(by_id[class_id] for class_id in expected)


def to_hf_classifier_settings(config: BERTConfig) -> dict[str, Any]:
    """Return the class names and problem type of a classification head in Hugging Face's format."""
    if config.n_classes is None:
        return {}
    names = config.class_names or _default_class_names(config.n_classes)
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": next(name for name, value in _PROBLEM_TYPES.items() if value is config.problem_type),
    }


def drop_absent_head_mappings(config: BERTConfig, mappings: list[NameMapping]) -> list[NameMapping]:
    """Remove the mappings of heads that the config does not have."""
    has_head = {
        "pooler": config.pooler,
        "masked_lm": config.masked_lm_head,
        "next_sentence": config.next_sentence_head,
        "classifier": config.n_classes is not None,
    }
    return [mapping for mapping in mappings if has_head.get(mapping.parameters[0].partition(".")[0], True)]


def masked_lm_unembedding_mappings(config: BERTConfig, *, bias: str, matrix: str) -> list[NameMapping]:
    """Return the name mappings for the unembedding of the masked-LM head, whose bias has two published names.

    The first name is used for writing. A tied matrix is not written, so the bias is written separately.
    """
    mappings = [
        NameMapping(bias, ("masked_lm.unembedding.bias",)),
        *weight_and_bias_mappings(matrix, "masked_lm.unembedding"),
    ]
    return mappings if config.tie_embeddings else mappings[::-1]


def _default_class_names(n_classes: int) -> tuple[str, ...]:
    """Return the names that Hugging Face assigns to unnamed classes."""
    return tuple(f"LABEL_{i}" for i in range(n_classes))
