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
        self.observers: list[Callable[[Any], None]] = []
        self.optional_observers: list[Callable[[Any], None]] = []
        self.interventions: list[Callable[[Any], Any]] = []

    def observe(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        """Call `observer` with every value after all interventions. Returns a function that removes the observer."""
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    def observe_if_computed(self, observer: Callable[[Any], None]) -> Callable[[], None]:
        """Call `observer` as in `observe`, but without forcing the model to compute this value."""
        self.optional_observers.append(observer)
        return lambda: self.optional_observers.remove(observer)

    def intervene(self, intervention: Callable[[Any], Any]) -> Callable[[], None]:
        """Replace every value with the result of `intervention`. Returns a function that removes the intervention."""
        self.interventions.append(intervention)
        return lambda: self.interventions.remove(intervention)

    def forward(self, value: Any) -> Any:  # noqa: ANN401 - an identity accepts any type
        for intervention in self.interventions:
            value = intervention(value)
        for observer in (*self.observers, *self.optional_observers):
            observer(value)
        return value
