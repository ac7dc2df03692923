"""What every config is: frozen, keyword-only, and refused in one line when it cannot be."""

from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from qkv.errors import ConfigError

Count = Annotated[int, Field(strict=True, ge=1)]
"""A whole number of things there must be at least one of."""
MIN_SIMILARITY = 0.65
"""Of difflib's likeness: a word with two letters exchanged (gtp) is nearer, one with a few in common is not."""
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Config(BaseModel):
    """Base of all settings; a bad value raises `ConfigError`, never pydantic's own error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _convert_validation_error(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:  # noqa: ANN401
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError(_format_validation_error(cls, error)) from None

    def replace(self, **changes: Any) -> Self:  # noqa: ANN401
        """A copy with some settings changed, checked anew.

        Only settings that were given are kept: what was derived (such as d_ff from d_model) is derived again.
        """
        return type(self)(**{**self.model_dump(exclude_unset=True), **changes})


def suggest_closest(word: str, known: list[str]) -> str:
    """“; did you mean 'x'?”, or nothing where no known word is near or begins with it."""
    longer = [one for one in known if len(word) > 2 and one.startswith(word)]
    close = longer or get_close_matches(word, known, n=1, cutoff=MIN_SIMILARITY)
    return f"; did you mean '{close[0]}'?" if close else ""


def _format_validation_error(cls: type[Config], error: ValidationError) -> str:
    # A misspelt key is also a missing one; the misspelling is what the reader must be told.
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    field = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            what = f"unknown key '{field}'{suggest_closest(field, list(cls.model_fields))}"
        case "missing":
            what = f"{field} is missing"
        case _:
            what = f"{field}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return _table_prefix(cls) + what


def _table_prefix(cls: type[Config]) -> str:
    """“training: ” for `TrainingConfig`, as a recipe calls it; a class's own name says nothing to who writes a file."""
    name = cls.__name__
    table = name.removesuffix("Config").removesuffix("Settings")
    return "" if table == name else f"{table.lower()}: "
