"""Replace functions of `qkv` at run time."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PACKAGES = ("qkv", "tests")
"""Test modules are searched too, because they import functions of qkv by name."""

_replaced: list[tuple[Any, str, Any]] = []


def replace_everywhere(original: Any, wrong: Any) -> None:
    """Replace a function, method or property in every loaded module and class that refers to it.

    Modules that are imported later get the replacement from the module that defines the function.
    """
    references = list(_references(original))
    if not references:
        raise LookupError(f"no module or class of {' or '.join(PACKAGES)} refers to {original!r}")
    for owner, name, value in references:
        _replaced.append((owner, name, value))
        setattr(owner, name, type(value)(wrong) if isinstance(value, (classmethod, staticmethod)) else wrong)


@contextmanager
def restoring() -> Iterator[None]:
    """Undo all replacements made inside the `with` block."""
    n_before = len(_replaced)
    try:
        yield
    finally:
        while len(_replaced) > n_before:
            owner, name, value = _replaced.pop()
            setattr(owner, name, value)


def _references(original: Any) -> Iterator[tuple[Any, str, Any]]:
    function: Callable[..., Any] = getattr(original, "__func__", original)
    for owner in _modules_and_classes():
        for name, value in list(vars(owner).items()):
            if value is original or getattr(value, "__func__", None) is function:
                yield owner, name, value


def _modules_and_classes() -> Iterator[Any]:
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in PACKAGES and not name.startswith(__package__)
    ]
    yield from modules
    # A class is listed under each module that imports it, but must be searched only once.
    classes = {
        id(value): value for module in modules for value in list(vars(module).values()) if isinstance(value, type)
    }
    yield from (owner for owner in classes.values() if owner.__module__.partition(".")[0] in PACKAGES)
