"""A named place in a model that can be watched or changed from outside."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Tap(nn.Module):
    """An identity. Its name in the model (`blocks.3.attention.weights`) is how `inspection` finds it.

    What passes is a tensor, except at `attention.lookup`, where it is the whole `Lookup`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watchers: list[Callable[[Any], None]] = []
        self._guests: list[Callable[[Any], None]] = []
        self._changers: list[Callable[[Any], Any]] = []

    @property
    def is_changed(self) -> bool:
        return bool(self._changers)

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    @property
    def is_in_use(self) -> bool:
        return bool(self._changers or self._watchers or self._guests)

    def watch(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Call `watcher` with what passes, after any change; returns the function that ends it."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def watch_if_computed(self, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """As `watch`, but the model need not compute it for this watcher's sake."""
        self._guests.append(watcher)
        return lambda: self._guests.remove(watcher)

    def change(self, changer: Callable[[Any], Any]) -> Callable[[], None]:
        """Put `changer`'s answer in the place of what passes; returns the function that ends it."""
        self._changers.append(changer)
        return lambda: self._changers.remove(changer)

    def forward(self, passing: Any) -> Any:  # noqa: ANN401 - an identity takes anything
        for changer in self._changers:
            passing = changer(passing)
        for watcher in (*self._watchers, *self._guests):
            watcher(passing)
        return passing


def is_looked_at(part: nn.Module) -> bool:
    """Whether someone watches or changes what passes here: a tap in use, a hook."""
    if isinstance(part, Tap):
        return part.is_in_use
    return bool(part._forward_hooks or part._forward_pre_hooks)  # noqa: SLF001 - torch has no other way to ask
