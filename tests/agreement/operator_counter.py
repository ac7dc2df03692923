"""Count the operators that torch dispatches."""

from typing import Self

from torch.utils._python_dispatch import TorchDispatchMode

FUSED = "_scaled_dot_product_flash_attention_for_cpu"
SOFTMAX = "softmax"


class Operators(TorchDispatchMode):
    """Counts operators below autograd, where torch has already chosen the attention kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    @property
    def n_fused(self) -> int:
        return sum(name.startswith(FUSED) for name in self.names)

    @property
    def n_softmax(self) -> int:
        return sum(SOFTMAX in name for name in self.names)
