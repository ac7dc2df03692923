"""Registry of the model families that can be trained."""

from qkv.errors import ConfigError
from qkv.training.bert import BERTFamily
from qkv.training.family import Family
from qkv.training.gpt import GPTFamily
from qkv.training.translation import TranslationFamily

FAMILIES: dict[str, Family] = {
    "gpt": GPTFamily(),
    "bert": BERTFamily(),
    "seq2seq": TranslationFamily(),
    "rnn": TranslationFamily(),
}


def get_family(name: str) -> Family:
    """Return the model family with the given name.

    Raises `ConfigError` if the family cannot be trained.
    """
    if name not in FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)} for training, got {name!r}")
    return FAMILIES[name]
