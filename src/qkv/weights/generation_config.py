"""Read the generation settings of encoder–decoders from `config.json` and `generation_config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkv.errors import WeightsError
from qkv.weights.checkpoint_folder import read_json_object

GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Generation settings that are not part of the model config. Native translation models only use `max_joined`."""

    decoder_start_id: int | None = None
    """The id of the decoder's start token, which is not part of the result. If `None`, the tokenizer defines it."""
    forced_bos_id: int | None = None
    """The id of a token that always follows the start token and does not affect the score (`<s>` in BART)."""
    suppressed_ids: frozenset[int] = frozenset()
    """The ids of tokens that are never generated, such as Marian's padding token."""
    task_prefixes: Mapping[str, str] = field(default_factory=dict)
    """The prefix that T5 requires before each source text (`translate English to German: `), keyed by task."""
    max_joined: int | None = None
    """The maximum number of tokens in sentences that are translated together. `None` means the context length."""

    def to_hf_dict(self) -> dict[str, Any]:
        """Return the non-default settings, keyed by their names in the published config."""
        values = {
            "decoder_start_token_id": self.decoder_start_id,
            "forced_bos_token_id": self.forced_bos_id,
            "max_joined": self.max_joined,
        }
        settings: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
        if self.suppressed_ids:
            settings["bad_words_ids"] = [[token_id] for token_id in sorted(self.suppressed_ids)]
        if self.task_prefixes:
            settings["task_specific_params"] = {task: {"prefix": text} for task, text in self.task_prefixes.items()}
        return settings


def read_generation_config(folder: Path, config_json: Mapping[str, Any]) -> GenerationConfig:
    """Read the generation settings from a model folder.

    `config_json` contains the parsed contents of `config.json`. Settings in `generation_config.json` take precedence.
    """
    file = folder / GENERATION_CONFIG_FILE
    overrides = read_json_object(file) if file.is_file() else {}
    settings = {**config_json, **{key: value for key, value in overrides.items() if value is not None}}
    return GenerationConfig(
        decoder_start_id=_read_optional_int(folder, settings, "decoder_start_token_id"),
        forced_bos_id=_read_optional_int(folder, settings, "forced_bos_token_id"),
        suppressed_ids=_parse_bad_words_ids(folder, settings.get("bad_words_ids")),
        task_prefixes=_read_task_prefixes_or_default(folder, settings),
        max_joined=_read_optional_int(folder, settings, "max_joined", minimum=1),
    )


def _read_optional_int(folder: Path, settings: Mapping[str, Any], key: str, *, minimum: int = 0) -> int | None:
    value = settings.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
        raise WeightsError(f"{folder}: {key} must be an integer of at least {minimum}, got {value!r}")
    return value


def _parse_bad_words_ids(folder: Path, bad_words_ids: object) -> frozenset[int]:
    if bad_words_ids is None:
        return frozenset()
    suppressed: set[int] = set()
    for word in bad_words_ids if isinstance(bad_words_ids, list) else [bad_words_ids]:
        # Suppressing a sequence of several tokens would require a different search algorithm, so it is not supported.
        if not isinstance(word, list) or len(word) != 1 or not isinstance(word[0], int):
            raise WeightsError(
                f"{folder}: each entry of bad_words_ids must be a list with a single token id, got {word!r}"
            )
        suppressed.add(word[0])
    return frozenset(suppressed)


def _read_task_prefixes_or_default(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    tasks = settings.get("task_specific_params") or {}
    if not isinstance(tasks, dict):
        raise WeightsError(f"{folder}: task_specific_params must be an object, got {tasks!r}")
    candidates = {task: params.get("prefix") for task, params in tasks.items() if isinstance(params, dict)}
    prefixes = {task: text for task, text in candidates.items() if isinstance(text, str) and text.strip()}
    default = settings.get("prefix")
    return {"prefix": default} if not prefixes and isinstance(default, str) and default.strip() else prefixes
