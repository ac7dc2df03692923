"""Runtime type checker of the tests: beartype, configured to ignore two hints that it does not support."""

from typing import Any, Self

from beartype import BeartypeConf, FrozenDict, beartype
from pydantic import ModelWrapValidatorHandler

# Functions are decorated individually, so beartype does not know the class that `Self` refers to.
NOT_CHECKED = FrozenDict({Self: Any, ModelWrapValidatorHandler[Self]: Any})

check = beartype(conf=BeartypeConf(hint_overrides=NOT_CHECKED))
