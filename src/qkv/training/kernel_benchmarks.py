"""Benchmark the individual kernels of a step for the calibration."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import Activation, AttentionKernel, NormKind
from qkv.cost.prediction import CALIBRATED_WEIGHT_BYTES
from qkv.cost.workload import Precision
from qkv.nn import CAUSAL, scaled_dot_product_attention
from qkv.nn.block import activate
from qkv.nn.norm import make_norm as build_norm
from qkv.nn.positions import RotaryEmbedding
from qkv.nn.recurrent import run_recurrence_in_weight_dtype
from qkv.training.benchmark_steps import parameter_dtype
from qkv.training.timer import MAX_REPEATS, WorkFunction

ROW_WIDTH = 512
"""Number of elements per row in normalized or activated tensors, which is a typical model width."""
VOCAB_SIZE = 8192
MAX_COPIES = {"cpu": 64, "cuda": MAX_REPEATS}
"""Maximum number of copies of a weight. The number of copies is also limited by `CALIBRATED_WEIGHT_BYTES`."""


@dataclass(frozen=True, kw_only=True)
class KernelBenchmarkSettings:
    """The settings of a kernel benchmark: device, precision, and whether to run the backward pass."""

    device: torch.device
    dtype: Precision
    is_training: bool

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the residual stream and the weights."""
        return parameter_dtype(self.dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the matmul inputs, which is bfloat16 in mixed precision."""
        return torch.bfloat16 if self.dtype is Precision.MIXED else self.weight_dtype

    def random_tensor(self, *shape: int, in_compute_dtype: bool = False) -> Tensor:
        tensor = torch.randn(shape, device=self.device, dtype=torch.float32).to(
            self.compute_dtype if in_compute_dtype else self.weight_dtype
        )
        return tensor.requires_grad_(self.is_training)

    def random_ids(self, n: int, vocab_size: int) -> Tensor:
        return torch.randint(vocab_size, (1, n), device=self.device)

    def build_pass(self, forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> WorkFunction:
        """Return a function that runs the forward pass and, in training, the backward pass to all inputs."""
        if not self.is_training:
            return _inference_pass(forward)
        with self._autocast():
            gradient = torch.ones_like(forward())

        def forward_and_backward() -> object:
            with self._autocast():
                result = forward()
            return torch.autograd.grad(result, inputs, gradient)

        return forward_and_backward

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype is not Precision.MIXED:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _inference_pass(forward: Callable[[], Tensor]) -> WorkFunction:
    def run() -> object:
        with torch.inference_mode():
            return forward()

    return run


def build_uncached_matmul(benchmark: KernelBenchmarkSettings, rows: int, inner: int, columns: int) -> WorkFunction:
    """Build a function that runs a matmul with a different weight in each call so that no weight stays cached.

    The layers of a model also use different weights. In mixed precision, the function also casts the weight to 16 bits.
    The cast of `x` is measured by `build_cast`.
    """
    x, first = benchmark.random_tensor(rows, inner, in_compute_dtype=True), benchmark.random_tensor(columns, inner)
    n_copies = max(
        1,
        min(
            MAX_COPIES[benchmark.device.type],
            CALIBRATED_WEIGHT_BYTES[benchmark.device.type] // (first.numel() * first.element_size()),
        ),
    )
    weights = [first, *(benchmark.random_tensor(columns, inner) for _ in range(n_copies - 1))]
    if not benchmark.is_training:
        next_weight = cycle(weights)
        return _inference_pass(lambda: F.linear(x, next(next_weight)))
    next_weight = cycle(
        [benchmark.build_pass(lambda weight=weight: F.linear(x, weight), [x, weight]) for weight in weights]
    )
    return lambda: next(next_weight)()  # noqa: PLW0108 - each call takes the next function


def build_non_matmul(benchmark: KernelBenchmarkSettings, kind: str, n: int) -> WorkFunction:
    """Build a function that runs an activation, a norm, or another operation that is not a matmul.

    `kind` is the name of an activation or a norm, or one of the names below.
    """
    width = min(n, ROW_WIDTH)
    shape = (1, n // width, width)
    match kind:
        case "add" | "gate":
            x, y = (
                benchmark.random_tensor(*shape, in_compute_dtype=kind == "gate"),
                benchmark.random_tensor(*shape, in_compute_dtype=True),
            )
            return benchmark.build_pass(lambda: x + y if kind == "add" else x * y, [x, y])
        case _ if kind in list(NormKind):
            x, norm = (
                benchmark.random_tensor(*shape),
                build_norm(NormKind(kind), width).to(benchmark.device, benchmark.weight_dtype),
            )
            return benchmark.build_pass(lambda: norm(x), [x, *norm.parameters()])
        case "lookup":
            weight, ids = benchmark.random_tensor(1024, width), benchmark.random_ids(n // width, 1024)
            return benchmark.build_pass(lambda: F.embedding(ids, weight), [weight])
        case "softmax":
            x = benchmark.random_tensor(*shape)
            return benchmark.build_pass(lambda: x.softmax(-1), [x])
        case "rotary":
            return _build_rotary(benchmark, n)
        case _:
            x, activation = benchmark.random_tensor(*shape, in_compute_dtype=True), Activation(kind)
            return benchmark.build_pass(lambda: activate(x, activation), [x])


def _build_rotary(benchmark: KernelBenchmarkSettings, n: int) -> WorkFunction:
    positions = max(1, n // ROW_WIDTH)
    x = benchmark.random_tensor(1, 8, positions, ROW_WIDTH // 8, in_compute_dtype=True)
    position_ids = torch.arange(positions, device=benchmark.device)[None]
    rotary = RotaryEmbedding(ROW_WIDTH // 8)(position_ids, position_ids, benchmark.compute_dtype)
    return benchmark.build_pass(lambda: rotary.rotate(x), [x])


def build_cross_entropy(benchmark: KernelBenchmarkSettings, n: int) -> WorkFunction:
    """Build a function that computes the cross-entropy of n logits in float32."""
    rows = max(1, n // VOCAB_SIZE)
    x, targets = (
        benchmark.random_tensor(rows, n // rows, in_compute_dtype=True),
        torch.zeros(rows, dtype=torch.long, device=benchmark.device),
    )
    return benchmark.build_pass(lambda: F.cross_entropy(x.float(), targets, reduction="sum"), [x])


def build_cast(benchmark: KernelBenchmarkSettings, n: int) -> WorkFunction:
    """Build a function that casts n elements of the residual stream to the matmul dtype.

    In training, their gradient is cast back.
    """
    x = benchmark.random_tensor(n)
    return benchmark.build_pass(lambda: x.to(benchmark.compute_dtype), [x])


def build_bias_gradient(benchmark: KernelBenchmarkSettings, n: int) -> WorkFunction:
    """Build a function that computes the bias gradient of a linear layer by summing n elements over the rows."""
    gradient = benchmark.random_tensor(n // min(n, ROW_WIDTH), min(n, ROW_WIDTH), in_compute_dtype=True).detach()
    return lambda: gradient.sum(0)


def build_zero_fill(benchmark: KernelBenchmarkSettings, n: int) -> WorkFunction:
    return lambda: torch.zeros(n, device=benchmark.device)


def build_clip_and_adamw_step(benchmark: KernelBenchmarkSettings, n: int) -> WorkFunction:
    """Build a function that runs gradient clipping and an AdamW step for n parameters in tensors of a typical size."""
    size = min(n, 2**20)
    parameters = [nn.Parameter(torch.randn(size, device=benchmark.device)) for _ in range(n // size)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adamw = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def run() -> None:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
        adamw.step()

    return run


def build_attention(
    benchmark: KernelBenchmarkSettings,
    batch_times_heads: int,
    n: int,
    d_head: int,
    *,
    kernel: AttentionKernel,
    causal: bool,
) -> WorkFunction:
    """Build a function that computes the concatenated head outputs from projected queries, keys and values."""
    heads = min(8, batch_times_heads)
    projections = [
        benchmark.random_tensor(batch_times_heads // heads, n, heads, d_head, in_compute_dtype=True) for _ in range(3)
    ]
    mask = CAUSAL if causal else None

    def forward() -> Tensor:
        queries, keys, values = (tensor.transpose(1, 2) for tensor in projections)
        return scaled_dot_product_attention(queries, keys, values, mask=mask, kernel=kernel).transpose(1, 2).flatten(2)

    return benchmark.build_pass(forward, projections)


def build_decode_attention(
    benchmark: KernelBenchmarkSettings, batch_times_heads: int, n_keys: int, d_head: int, *, kernel: AttentionKernel
) -> WorkFunction:
    """Build a function that runs attention over a KV cache with one query per row."""
    heads = min(8, batch_times_heads)
    query = benchmark.random_tensor(batch_times_heads // heads, heads, 1, d_head, in_compute_dtype=True)
    keys, values = (
        benchmark.random_tensor(batch_times_heads // heads, heads, n_keys, d_head, in_compute_dtype=True)
        for _ in range(2)
    )
    return benchmark.build_pass(
        lambda: scaled_dot_product_attention(query, keys, values, kernel=kernel).transpose(1, 2).flatten(2), [query]
    )


def build_recurrence(
    benchmark: KernelBenchmarkSettings,
    steps: int,
    batch: int,
    d_state: int,
    *,
    bidirectional: bool,
    cell: type[nn.GRU] | type[nn.LSTM] = nn.GRU,
) -> WorkFunction:
    """Build a function that runs a recurrent layer with the same options as in the models.

    Recurrent layers are unidirectional in decoders and bidirectional in encoders.
    """
    d_in = 2 * d_state if bidirectional else d_state
    layer = cell(d_in, d_state, batch_first=True, bidirectional=bidirectional).to(
        benchmark.device, benchmark.weight_dtype
    )
    x = benchmark.random_tensor(batch, steps, d_in)
    return benchmark.build_pass(lambda: run_recurrence_in_weight_dtype(layer, x)[0], [x, *layer.parameters()])


def build_weight_stream(benchmark: KernelBenchmarkSettings, n_bytes: int, side: int) -> tuple[WorkFunction, int]:
    """Return a function that reads about `n_bytes` of weights with single-row matmuls, and the exact byte count."""
    size = torch.empty(0, dtype=benchmark.weight_dtype).element_size()
    side = min(side, int((n_bytes / size) ** 0.5))
    weights = [benchmark.random_tensor(side, side) for _ in range(max(1, n_bytes // (side * side * size)))]
    x = benchmark.random_tensor(1, side)

    def read_weights() -> object:
        with torch.inference_mode():
            return [F.linear(x, weight) for weight in weights]

    return read_weights, len(weights) * side * side * size
