"""The kernels of a step, each by itself and of any size: what the calibration times."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import Activation, Kernel, NormKind
from qkv.cost.prediction import NEAR
from qkv.cost.workload import Precision
from qkv.nn import CAUSAL, Rotary, activate, attend
from qkv.nn import norm as build_norm
from qkv.nn.recurrent import run as run_recurrence
from qkv.training.measuring import torch_dtype
from qkv.training.stopwatch import REPEATS, Work

ROW = 512
"""Numbers in a row of what is normed or activated: a usual width."""
N_WORDS = 8192
MOST_COPIES = {"cpu": 64, "cuda": REPEATS}
"""Of a weight, as far as `NEAR` bytes do not end them."""


@dataclass(frozen=True, kw_only=True)
class Road:
    """`infer`: forward alone, at `dtype`. `train`: forward and backward, as a training step at that precision does."""

    device: torch.device
    dtype: Precision
    is_training: bool

    @property
    def wide(self) -> torch.dtype:
        """Of the residual stream, and of weights."""
        return torch_dtype(self.dtype)

    @property
    def narrow(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype is Precision.MIXED else self.wide

    def numbers(self, *shape: int, narrow: bool = False) -> Tensor:
        drawn = torch.randn(shape, device=self.device, dtype=torch.float32).to(self.narrow if narrow else self.wide)
        return drawn.requires_grad_(self.is_training)

    def ids(self, n: int, n_words: int) -> Tensor:
        return torch.randint(n_words, (1, n), device=self.device)

    def run(self, forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Work:
        """Forward; in training also backward, to all inputs."""
        if not self.is_training:
            return _without_gradients(forward)
        with self._autocast():
            gradient = torch.ones_like(forward())

        def both() -> object:
            with self._autocast():
                result = forward()
            return torch.autograd.grad(result, inputs, gradient)

        return both

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype is not Precision.MIXED:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _without_gradients(forward: Callable[[], Tensor]) -> Work:
    def run() -> object:
        with torch.inference_mode():
            return forward()

    return run


def product(road: Road, rows: int, inner: int, columns: int) -> Work:
    """Each call takes another weight, as a model does, so that none of them waits in a near cache.

    Mixed precision brings the weight to 16 bits here; what it brings of `x` is the kind `cast`, where x is wide.
    """
    x, first = road.numbers(rows, inner, narrow=True), road.numbers(columns, inner)
    n_copies = max(
        1, min(MOST_COPIES[road.device.type], NEAR[road.device.type] // (first.numel() * first.element_size()))
    )
    weights = [first, *(road.numbers(columns, inner) for _ in range(n_copies - 1))]
    if not road.is_training:
        turn = cycle(weights)
        return _without_gradients(lambda: F.linear(x, next(turn)))
    turn = cycle([road.run(lambda weight=weight: F.linear(x, weight), [x, weight]) for weight in weights])
    return lambda: next(turn)()  # noqa: PLW0108 - each call takes the next one


def elementwise(road: Road, kind: str, n: int) -> Work:
    """`kind`: an activation, a norm, or one of the names below."""
    width = min(n, ROW)
    shape = (1, n // width, width)
    match kind:
        case "add" | "gate":
            x, y = road.numbers(*shape, narrow=kind == "gate"), road.numbers(*shape, narrow=True)
            return road.run(lambda: x + y if kind == "add" else x * y, [x, y])
        case "layer" | "rms":
            x, norm = road.numbers(*shape), build_norm(NormKind(kind), width).to(road.device, road.wide)
            return road.run(lambda: norm(x), [x, *norm.parameters()])
        case "look-up":
            weight, ids = road.numbers(1024, width), road.ids(n // width, 1024)
            return road.run(lambda: F.embedding(ids, weight), [weight])
        case "softmax":
            x = road.numbers(*shape)
            return road.run(lambda: x.softmax(-1), [x])
        case "rotation":
            return _rotation(road, n)
        case _:
            x, activation = road.numbers(*shape, narrow=True), Activation(kind)
            return road.run(lambda: activate(x, activation), [x])


def _rotation(road: Road, n: int) -> Work:
    positions = max(1, n // ROW)
    x = road.numbers(1, 8, positions, ROW // 8, narrow=True)
    stand = torch.arange(positions, device=road.device)[None]
    relation = Rotary(ROW // 8)(stand, stand, road.narrow)
    return road.run(lambda: relation.rotate(x), [x])


def loss(road: Road, n: int) -> Work:
    """Cross-entropy of n logits, at 32 bits."""
    rows = max(1, n // N_WORDS)
    x, targets = road.numbers(rows, n // rows, narrow=True), torch.zeros(rows, dtype=torch.long, device=road.device)
    return road.run(lambda: F.cross_entropy(x.float(), targets, reduction="sum"), [x])


def cast(road: Road, n: int) -> Work:
    """n numbers of the residual stream brought to a product's precision, and their gradient back."""
    x = road.numbers(n)
    return road.run(lambda: x.to(road.narrow), [x])


def bias(road: Road, n: int) -> Work:
    """The gradient towards a product's bias: n numbers, added up over the rows."""
    gradient = road.numbers(n // min(n, ROW), min(n, ROW), narrow=True).detach()
    return lambda: gradient.sum(0)


def fill(road: Road, n: int) -> Work:
    return lambda: torch.zeros(n, device=road.device)


def update(road: Road, n: int) -> Work:
    """Gradient norm, clipping and AdamW of n parameters, in tensors as large as a model's."""
    size = min(n, 2**20)
    own = [nn.Parameter(torch.randn(size, device=road.device)) for _ in range(n // size)]
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    adamw = torch.optim.AdamW(own, lr=1e-3, fused=True)

    def run() -> None:
        norm = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None], foreach=True)
        nn.utils.clip_grads_with_norm_(own, 1.0, norm, foreach=True)
        adamw.step()

    return run


def attention(road: Road, groups: int, n: int, d_head: int, *, kernel: Kernel, causal: bool) -> Work:
    """From projected queries, keys and values to the heads' results side by side."""
    heads = min(8, groups)
    made = [road.numbers(groups // heads, n, heads, d_head, narrow=True) for _ in range(3)]
    mask = CAUSAL if causal else None

    def forward() -> Tensor:
        queries, keys, values = (one.transpose(1, 2) for one in made)
        return attend(queries, keys, values, mask=mask, kernel=kernel).transpose(1, 2).flatten(2)

    return road.run(forward, made)


def attention_step(road: Road, groups: int, n_keys: int, d_head: int, *, kernel: Kernel) -> Work:
    """One query a row, over a cache."""
    heads = min(8, groups)
    query = road.numbers(groups // heads, heads, 1, d_head, narrow=True)
    keys, values = (road.numbers(groups // heads, heads, n_keys, d_head, narrow=True) for _ in range(2))
    return road.run(lambda: attend(query, keys, values, kernel=kernel).transpose(1, 2).flatten(2), [query])


def recurrence(
    road: Road, steps: int, batch: int, d_state: int, *, two_way: bool, cell: type[nn.GRU] | type[nn.LSTM] = nn.GRU
) -> Work:
    """A layer as the models have them: a decoder's in one direction, an encoder's in both, half as wide each."""
    d_in = 2 * d_state if two_way else d_state
    layer = cell(d_in, d_state, batch_first=True, bidirectional=two_way).to(road.device, road.wide)
    x = road.numbers(batch, steps, d_in)
    return road.run(lambda: run_recurrence(layer, x)[0], [x, *layer.parameters()])


def stream(road: Road, n_bytes: int, side: int) -> tuple[Work, int]:
    """Weights of that many bytes, each read once by a product with one row; how many bytes it really is."""
    size = torch.empty(0, dtype=road.wide).element_size()
    side = min(side, int((n_bytes / size) ** 0.5))
    weights = [road.numbers(side, side) for _ in range(max(1, n_bytes // (side * side * size)))]
    x = road.numbers(1, side)

    def read() -> object:
        with torch.inference_mode():
            return [F.linear(x, weight) for weight in weights]

    return read, len(weights) * side * side * size
