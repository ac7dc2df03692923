"""Which heads a published encoder has, and what its classes are called."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from qkv.choices import ProblemKind
from qkv.config import BERTConfig
from qkv.errors import ConfigError
from qkv.weights.names import Rename, linear
from qkv.weights.settings import Settings

_PROBLEMS = {
    "single_label_classification": ProblemKind.ONE_CLASS,
    "multi_label_classification": ProblemKind.SEVERAL_LABELS,
    "regression": ProblemKind.NUMBER,
}


class Head(StrEnum):
    POOLER = "pooler"
    MASKED_WORD = "masked-word head"
    NEXT_SENTENCE = "next-sentence head"
    CLASSES = "classification head"


def heads_in(
    given: Settings, *, architectures: Mapping[str, tuple[Head, ...]], telling: Mapping[Head, str], prefix: str
) -> set[Head]:
    """From the tensors where they are known: a file often holds other heads than its config says.

    `architectures`: the heads of each class of `transformers`, the bare backbone first. `telling`: the tensor that a
    head cannot be without. A head that the config promises and the file lacks is remarked on.
    """
    match given.take("architectures", []):
        case []:
            architecture = next(iter(architectures))
        case [str(architecture), *_] if architecture in architectures:
            pass
        case others:
            raise ConfigError(f"architectures={others!r} is not supported; known: {', '.join(architectures)}")
    promised = architectures[architecture]
    if not given.tensor_names:
        return set(promised)
    bare = {name.removeprefix(prefix) for name in given.tensor_names}
    found = {head for head, name in telling.items() if name in bare}
    given.remarks += [
        f"the weights hold no {head} ({telling[head]}), though the config says {architecture}: the model is without it"
        for head in promised
        if head not in found
    ]
    return found


def head_settings(heads: set[Head], given: Settings) -> dict[str, Any]:
    """Our settings for these heads; class names are those of `id2label`, unless they are mere numbers."""
    settings = {
        "pooler": Head.POOLER in heads,
        "masked_word_head": Head.MASKED_WORD in heads,
        "next_sentence_head": Head.NEXT_SENTENCE in heads,
    }
    if Head.CLASSES not in heads:
        return settings
    names = _names(given.take_table("id2label"))
    problem = given.take("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise ConfigError(f"problem_type={problem!r} is not supported; known: {', '.join(_PROBLEMS)}")
    return {
        **settings,
        "n_classes": len(names) or given.take("num_labels", 2),
        **({"class_names": names} if names and names != _numbered(len(names)) else {}),
        **({} if problem is None else {"problem": _PROBLEMS[problem]}),
    }


def _names(labels: dict[Any, Any]) -> tuple[str, ...]:
    by_number = {str(number): str(name) for number, name in labels.items()}
    numbers = [str(i) for i in range(len(labels))]
    if set(by_number) != set(numbers):
        raise ConfigError(f"id2label has the keys {', '.join(by_number)}; they must be 0 … {len(labels) - 1}")
    return tuple(by_number[number] for number in numbers)


def written_classes(config: BERTConfig) -> dict[str, Any]:
    if config.n_classes is None:
        return {}
    names = config.class_names or _numbered(config.n_classes)
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": next(word for word, problem in _PROBLEMS.items() if problem is config.problem),
    }


def those_of(config: BERTConfig, lines: list[Rename]) -> list[Rename]:
    """Without the lines of heads that the config has not."""
    is_there = {
        "pooler": config.pooler,
        "masked_word": config.masked_word_head,
        "next_sentence": config.next_sentence_head,
        "classifier": config.n_classes is not None,
    }
    return [line for line in lines if is_there.get(line.ours[0].partition(".")[0], True)]


def unembedding(config: BERTConfig, *, bias: str, matrix: str) -> list[Rename]:
    """One bias under two names. A tied matrix is never written, so the bias stands by itself."""
    lines = [Rename(bias, ("masked_word.unembedding.bias",)), *linear(matrix, "masked_word.unembedding")]
    return lines if config.tie_embeddings else lines[::-1]


def _numbered(n_classes: int) -> tuple[str, ...]:
    """What Hugging Face calls classes that nobody named."""
    return tuple(f"LABEL_{i}" for i in range(n_classes))
