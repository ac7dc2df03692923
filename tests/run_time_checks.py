"""How the tests check qkv's annotations while it runs: beartype, told about two hints it cannot read."""

from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype
from pydantic import ModelWrapValidatorHandler

# Each function is decorated alone, so beartype does not know which class `Self` is.
NOT_CHECKED = FrozenDict({Self: Any, ModelWrapValidatorHandler[Self]: Any})

check = beartype(conf=BeartypeConf(hint_overrides=NOT_CHECKED))
