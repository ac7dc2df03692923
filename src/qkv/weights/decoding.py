"""How an encoder–decoder wants its texts begun and cut: what `config.json` and `generation_config.json` say of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkv.errors import WeightsError
from qkv.weights.folder import read_settings

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What the weights do not say; our own translators have `max_joined` alone."""

    first: int | None = None
    """What a text begins with, which is not given back; None: the tokenizer says it."""
    then: int | None = None
    """What every text has after that, at no cost (BART's <s>)."""
    never: frozenset[int] = frozenset()
    """What no text may hold, such as Marian's padding."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """T5's: task to the words that must stand before a source (`translate English to German: `)."""
    max_joined: int | None = None
    """Sentences of one text are translated together up to so many tokens; None: as many as the context holds."""

    def settings(self) -> dict[str, Any]:
        """By their published names, those that are set."""
        named = {
            "decoder_start_token_id": self.first, "forced_bos_token_id": self.then, "max_joined": self.max_joined
        }  # fmt: skip
        found: dict[str, Any] = {name: number for name, number in named.items() if number is not None}
        if self.never:
            found["bad_words_ids"] = [[number] for number in sorted(self.never)]
        if self.prefixes:
            found["task_specific_params"] = {task: {"prefix": words} for task, words in self.prefixes.items()}
        return found


def read_decoding(folder: Path, settings: Mapping[str, Any]) -> Decoding:
    """`settings`: of `config.json`. Where `generation_config.json` says something too, that holds."""
    file = folder / GENERATION_FILE
    more = read_settings(file) if file.is_file() else {}
    given = {**settings, **{key: value for key, value in more.items() if value is not None}}
    return Decoding(
        first=_number(folder, given, "decoder_start_token_id"),
        then=_number(folder, given, "forced_bos_token_id"),
        never=_never(folder, given.get("bad_words_ids")),
        prefixes=_prefixes(folder, given),
        max_joined=_number(folder, given, "max_joined", least=1),
    )


def _number(folder: Path, given: Mapping[str, Any], key: str, *, least: int = 0) -> int | None:
    number = given.get(key)
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < least):
        raise WeightsError(f"{folder}: {key}={number!r} is no {'number of tokens' if least else 'token id'}")
    return number


def _never(folder: Path, words: object) -> frozenset[int]:
    if words is None:
        return frozenset()
    found: set[int] = set()
    for word in words if isinstance(words, list) else [words]:
        # A word of several tokens would need another search.
        if not isinstance(word, list) or len(word) != 1 or not isinstance(word[0], int):
            raise WeightsError(f"{folder}: bad_words_ids has {word!r}; supported: lists of one token id each")
        found.add(word[0])
    return frozenset(found)


def _prefixes(folder: Path, given: Mapping[str, Any]) -> dict[str, str]:
    tasks = given.get("task_specific_params") or {}
    if not isinstance(tasks, dict):
        raise WeightsError(f"{folder}: task_specific_params={tasks!r} is no table")
    said = {task: own.get("prefix") for task, own in tasks.items() if isinstance(own, dict)}
    found = {task: words for task, words in said.items() if isinstance(words, str) and words.strip()}
    alone = given.get("prefix")
    return {"prefix": alone} if not found and isinstance(alone, str) and alone.strip() else found
