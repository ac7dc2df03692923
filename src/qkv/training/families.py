"""Which family a recipe trains."""

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


def family_of(name: str) -> Family:
    if name not in FAMILIES:
        raise ConfigError(f"family={name!r} cannot be trained yet; these can: {', '.join(FAMILIES)}")
    return FAMILIES[name]
