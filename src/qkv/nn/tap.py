"""Named points in a model whose activations can be observed or changed."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Tap(nn.Module):
    """Identity module whose value can be observed or replaced from outside the model.

    `inspection` addresses a tap by its module name, for example `blocks.3.attention.weights`. The value is a tensor,
    except at `attention.inputs`, where it is an `AttentionInputs`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._observers: list[Callable[[Any], None]] = []
        self._optional_observers: list[Callable[[Any], None]] = []
        self._interventions: list[Callable[[Any], Any]] = []

    @property
    def has_interventions(self) -> bool:
        return bool(self._interventions)

    @property
    def has_observers(self) -> bool:
        return bool(self._observers)

    @property
    def is_in_use(self) -> bool:
        return bool(self._interventions or self._observers or self._optional_observers)

    def observe(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        """Call `observer` with every value after all interventions. Returns a function that removes the observer."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    def observe_if_computed(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        """Call `observer` as in `observe`, but without forcing the model to compute this value."""
        self._optional_observers.append(observer)
        return lambda: self._optional_observers.remove(observer)

    def intervene(self, intervention: Callable[[Any], Any]) -> Callable[[], None]:
        """Replace every value with the result of `intervention`. Returns a function that removes the intervention."""
        self._interventions.append(intervention)
        return lambda: self._interventions.remove(intervention)

    def forward(self, value: Any) -> Any:  # noqa: ANN401 - an identity accepts any type
        for intervention in self._interventions:
            value = intervention(value)
        for observer in (*self._observers, *self._optional_observers):
            observer(value)
        return value
