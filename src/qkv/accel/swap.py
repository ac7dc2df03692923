"""Temporarily replace modules of a model with other versions of the same modules."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from torch import Tensor, nn

from qkv.generation.decode_engine import DecodeEngine, RowIds, SequenceIndices, TokenLists
from qkv.generation.sampling import NextLogits

ModuleT = TypeVar("ModuleT", bound=nn.Module)
SublayerFunction = Callable[[Tensor], Tensor]
FindReplacement = Callable[[nn.Module], nn.Module | None]
"""Function that returns the replacement of a module, or `None` to keep the module."""


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
                    replacements[module] = find_replacement(module)
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


class EngineWithModules:
    """Decode engine that runs another engine with replaced modules or another context.

    `decode_context` may differ from `prefill_context` because replacing many modules takes as long as a short step.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        prefill_context: AbstractContextManager[object],
        decode_context: AbstractContextManager[object] | None = None,
    ) -> None:
        self._engine = engine
        self._prefill_context = prefill_context
        self._decode_context = nullcontext() if decode_context is None else decode_context

    def prefill(self, prompts: TokenLists, *, sources: TokenLists | None = None) -> NextLogits:
        with self._prefill_context:
            return self._engine.prefill(prompts, sources=sources)

    def decode(self, ids: RowIds) -> NextLogits:
        with self._decode_context:
            return self._engine.decode(ids)

    def reorder(self, rows: RowIds, *, sequences: SequenceIndices | None = None, common_prefix: int = 0) -> None:
        self._engine.reorder(rows, sequences=sequences, common_prefix=common_prefix)

    def close(self) -> None:
        self._engine.close()
