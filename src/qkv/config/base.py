"""Base class for all configs. Configs are frozen, keyword-only and validated on construction."""

from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from qkv.errors import ConfigError

Count = Annotated[int, Field(strict=True, ge=1)]
"""A positive integer."""
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A number from 0 (inclusive) to 1 (exclusive)."""
MIN_SIMILARITY = 0.65
"""Minimum difflib similarity ratio for a suggestion.

A word with two letters swapped ("gtp" for "gpt") scores above this threshold. Two words that share only a few letters
score below it.
"""


class Config(BaseModel):
    """Base class for all configs. Invalid values raise `ConfigError` instead of pydantic's `ValidationError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _convert_validation_error(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError(_format_first_validation_error(cls, error)) from None

    def replace(self, **changes: Any) -> Self:  # noqa: ANN401
        """Return a validated copy with some fields changed.

        Only explicitly set fields are copied. Derived defaults (such as d_ff, which depends on d_model) are recomputed
        from the changed fields.
        """
        return type(self)(**{**self.model_dump(exclude_unset=True), **changes})


def did_you_mean_suffix(word: str, candidates: list[str]) -> str:
    """Return " (did you mean 'x'?)" with the most similar candidate, or an empty string if no candidate is similar.

    If the word has at least three letters, candidates that start with the word take precedence.
    """
    completions = [candidate for candidate in candidates if len(word) > 2 and candidate.startswith(word)]
    closest = completions or get_close_matches(word, candidates, n=1, cutoff=MIN_SIMILARITY)
    return f" (did you mean '{closest[0]}'?)" if closest else ""


def _format_first_validation_error(cls: type[Config], error: ValidationError) -> str:
    """Describe one of the validation errors in a single line. Unknown keys take precedence over other errors."""
    # A misspelled required key causes two errors: an unknown key and a missing key. The unknown key is the cause.
    first = min(error.errors(include_url=False), key=lambda details: details["type"] != "extra_forbidden")
    field = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            problem = f"unknown key '{field}'{did_you_mean_suffix(field, list(cls.model_fields))}"
        case "missing":
            problem = f"{field} is missing"
        case _:
            problem = f"{field}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return _table_error_prefix(cls) + problem


def _table_error_prefix(cls: type[Config]) -> str:
    """Return an error prefix with the recipe table that a class configures, e.g. "training: " for `TrainingConfig`."""
    name = cls.__name__
    table = name.removesuffix("Config").removesuffix("Settings")
    return "" if table == name else f"{table.lower()}: "
