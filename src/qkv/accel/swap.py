"""Temporarily replace modules of a model with accelerated versions of the same modules."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Literal, TypeVar

from torch import nn

Mode = Literal["train", "inference"]
ModuleT = TypeVar("ModuleT", bound=nn.Module)
FindReplacement = Callable[[nn.Module, nn.Module], nn.Module | None]
"""Function of a model and one of its modules that returns the module's replacement, or `None` to keep the module."""


def share_attributes(module: nn.Module, replacement_class: type[ModuleT]) -> ModuleT:
    """Return an instance of a subclass of the module's class that uses the attribute dictionary of `module` itself.

    Parameters, submodules, hooks and the training flag are therefore the same objects in both modules, and names in the
    state dict do not change. A replacement class keeps additional state in `__slots__`.
    """
    replacement = replacement_class.__new__(replacement_class)
    object.__setattr__(replacement, "__dict__", module.__dict__)
    return replacement


@dataclass(frozen=True, eq=False)
class _Site:
    """A submodule that is replaced: attribute `name` of `parent`."""

    parent: nn.Module
    name: str
    original: nn.Module
    replacement: nn.Module


class ModuleSwap:
    """Context manager that replaces modules of a model in place.

    It can be entered repeatedly, also inside itself and by several threads at once: the first entry installs the
    replacements, and the last exit restores the original modules. The replacements are created once, together with the
    context manager, because torch.compile recompiles a model whose modules are different objects than before.

    Modules that the model gets later are not replaced. The model itself is never replaced, only its submodules.
    """

    def __init__(self, model: nn.Module, find_replacement: FindReplacement) -> None:
        replacements: dict[nn.Module, nn.Module | None] = {}
        self._sites: list[_Site] = []
        for parent in list(model.modules()):
            for name, module in parent.named_children():
                # A module may be shared, such as an embedding that encoder and decoder use.
                if module not in replacements:
                    replacements[module] = find_replacement(model, module)
                replacement = replacements[module]
                if replacement is not None:
                    self._sites.append(_Site(parent, name, module, replacement))
        self._lock = Lock()
        self._n_entered = 0

    @property
    def replacements(self) -> list[nn.Module]:
        """The replacements, without repetition, in module order."""
        return list(dict.fromkeys(site.replacement for site in self._sites))

    def __enter__(self) -> None:
        with self._lock:
            if self._n_entered == 0:
                for site in self._sites:
                    # A module that was replaced by someone else in the meantime, for example by a LoRA layer, remains.
                    if getattr(site.parent, site.name) is site.original:
                        setattr(site.parent, site.name, site.replacement)
            self._n_entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_entered -= 1
            if self._n_entered == 0:
                for site in self._sites:
                    if getattr(site.parent, site.name) is site.replacement:
                        setattr(site.parent, site.name, site.original)


def accelerated(model: nn.Module, mode: Mode) -> ModuleSwap:
    """Return a context manager that replaces modules of the model with accelerated versions for its current device.

    Only modules whose class is exactly the class of the reference implementation are replaced. Results differ from
    those of the reference only by rounding. Keep the returned object if the model is compiled or entered repeatedly.
    """
    providers = _providers(mode, next(model.parameters()).device.type)

    def find_replacement(model: nn.Module, module: nn.Module) -> nn.Module | None:
        found = (provider(model, module) for provider in providers)
        return next((replacement for replacement in found if replacement is not None), None)

    return ModuleSwap(model, find_replacement)


def _providers(mode: Mode, device_type: str) -> list[FindReplacement]:
    """Return the functions that find replacements. They are imported here because each needs a different backend."""
    match mode, device_type:
        case "train", "cuda":
            from qkv.accel.cuda.fused_modules import find_training_replacement

            return [find_training_replacement]
        case "inference", "cuda":
            from qkv.accel.cuda.fused_modules import find_inference_replacement

            return [find_inference_replacement]
        case _:
            return []
