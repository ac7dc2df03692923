"""One more token a row of a GPT on a GPU: few kernels, recorded once as a CUDA graph and replayed.

`GPT.forward` says what is computed, and this agrees with it to rounding. A small model's step on a GPU is all launches:
its own road makes hundreds of them. `gpu.has_kernels` is the rule for who goes this way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from qkv.choices import Activation
from qkv.config import SamplingConfig
from qkv.generation.sampling import choose, log_probabilities
from qkv.models import GPT
from qkv.nn import Block, LayerNorm, RMSNorm, Rotary

ACTIVATIONS = {Activation.RELU: 1, Activation.GELU: 2, Activation.GELU_TANH: 3, Activation.SILU: 4}
AT_ONCE = 32
"""Tokens a row that are written before the first of them is read: what comes after an end is thrown away."""
PROGRAMS = 256
"""About two for each of a large GPU's processors; four, where a matrix is large."""
READ = 8192
"""Numbers of a matrix that a program reads at once, for one row; twice as many of a large one."""
LARGE = 2**22
"""Numbers of a matrix that is large."""
KEYS = 128
VOCABULARY_BLOCK = 4096


@dataclass(frozen=True)
class Matrix:
    """A product with what stands before and after it."""

    weight: Tensor
    bias: Tensor | None
    norm: LayerNorm | RMSNorm | None = None
    activation: int = 0
    is_gated: bool = False
    adds: bool = False
    scale: float = 1.0

    @property
    def n_out(self) -> int:
        return self.weight.shape[0] // (2 if self.is_gated else 1)


class Laid:
    """A model's weights as the kernels read them."""

    def __init__(self, model: GPT) -> None:
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        self.layers = [_layer(block) for block in blocks]
        final = model.final_norm if isinstance(model.final_norm, LayerNorm | RMSNorm) else None
        unembedding = model.unembedding
        self.head = Matrix(unembedding.weight, unembedding.bias, norm=final, scale=unembedding.scale)
        self.tokens, self.scale = model.embedding.token.weight, model.embedding.scale
        self.attention = blocks[0].attention


class GPUStep:
    """The tensors of a step for so many rows, its cache among them, and what was recorded of it."""

    def __init__(self, model: GPT, laid: Laid, *, batch: int, capacity: int) -> None:
        self.cache = model.new_cache(batch=batch, capacity=capacity)
        # What was recorded holds these very tensors, whatever becomes of the cache.
        self._keys, self._values, self._capacity = self.cache.keys, self.cache.values, capacity
        self.is_taken = False
        """By one who is writing with it."""
        self._layers, self._head, self._tokens, self._embedding_scale = laid.layers, laid.head, laid.tokens, laid.scale
        self._shape, self._scale = laid.attention.shape, laid.attention.scale
        self._places, self._rotation = _tables(model, capacity)
        rows, shape = batch, self._shape
        new = self._tokens.new_empty
        self.ids = torch.zeros(rows, dtype=torch.long, device=self._tokens.device)
        self.positions = torch.zeros_like(self.ids)
        """Where each row's next token stands: how many stand before it."""
        self._steps = torch.zeros_like(self.ids)
        self._stream = new(rows, self._tokens.shape[1], dtype=torch.float32)
        self._normed = new(rows, self._tokens.shape[1])
        self._projected = new(
            rows, (shape.n_heads + shape.n_kv_heads) * shape.d_head + shape.n_kv_heads * shape.d_value
        )
        self._heads = new(rows, shape.n_heads * shape.d_value)
        self._hidden = new(rows, self._layers[0][2].n_out)
        self.logits = new(rows, self._tokens.shape[0], dtype=torch.float32)
        n_blocks = -(-self.logits.shape[1] // VOCABULARY_BLOCK)
        self._tops = self.logits.new_empty(rows, n_blocks)
        self._weights, self._at = torch.empty_like(self._tops), self._tops.to(torch.int32)
        self._n_splits = _splits(capacity, rows * shape.n_heads)
        self._parts = self.logits.new_empty(rows * shape.n_heads * self._n_splits * (_power(shape.d_value) + 2))
        self.told_ids = torch.zeros(AT_ONCE, rows, dtype=torch.long, device=self._tokens.device)
        self.told_log_p = self.logits.new_zeros(AT_ONCE, rows)
        self.chances = self.told_log_p.double()
        """For each step and row: where in the distribution its token is drawn."""
        # From Hopper on a kernel may begin while the one before it ends.
        can_overlap = self._tokens.is_cuda and torch.cuda.get_device_capability(self._tokens.device)[0] >= 9
        self._overlap: dict[str, bool] = {"OVERLAP": True, "launch_pdl": True} if can_overlap else {"OVERLAP": False}
        self._graphs: dict[SamplingConfig | None, torch.cuda.CUDAGraph] = {}

    def logits_after(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The logits of the token after these; good until the next call."""
        self.begin(ids, positions)
        self._replay(None, self.forward)
        return self.logits

    def begin(self, ids: Tensor, positions: Tensor) -> None:
        """Each row's token that is to be read next, and where it stands."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)

    def write(self, n: int, sampling: SamplingConfig) -> tuple[list[list[int]], list[list[float]]]:
        """n more tokens a row, with their log-probabilities; nothing waits for the GPU before the last of them."""
        assert n <= AT_ONCE
        self._steps.zero_()
        # What is recorded reads its chances, not the seed they were drawn with: one recording does for every seed.
        key = sampling.replace(seed=0)
        for _ in range(n):
            self._replay(key, lambda: self._forward_and_choose(sampling))
        told = torch.cat((self.told_ids[:n].double(), self.told_log_p[:n].double())).tolist()
        return [[int(number) for number in row] for row in told[:n]], told[n:]

    def _replay(self, key: SamplingConfig | None, work: Callable[[], None]) -> None:
        if not self._tokens.is_cuda:  # Triton's interpreter, for tests
            work()
            return
        if key not in self._graphs:
            self._graphs[key] = self._recorded(work)
        self._graphs[key].replay()

    def _recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        kept = [tensor.clone() for tensor in (self.ids, self.positions, self._steps)]
        # The first run compiles the kernels; what it changes is put back.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, before in zip((self.ids, self.positions, self._steps), kept, strict=True):
            tensor.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def forward(self) -> None:
        """All kernels of a step, from `ids` and `positions` to `logits`."""
        rows, d_model = self._stream.shape
        _kernels().embed[(rows,)](
            self.ids, self.positions, self._tokens, self._places, self._stream, d_model, self._embedding_scale,
            HAS_PLACES=self._places is not None, BLOCK=_power(d_model), **self._overlap,
        )  # fmt: skip
        for number, (own, output, expand, contract) in enumerate(self._layers):
            self._multiply(own, self._stream, self._projected)
            self._look_back(number)
            self._multiply(output, self._heads, self._stream)
            self._multiply(expand, self._stream, self._hidden)
            self._multiply(contract, self._hidden, self._stream)
        self._multiply(self._head, self._stream, self.logits)

    def _forward_and_choose(self, sampling: SamplingConfig) -> None:
        self.forward()
        (rows, n), n_blocks = self.logits.shape, self._tops.shape[1]
        last = self._capacity - 1
        if sampling.temperature == 0:
            _kernels().best_of_blocks[(rows, n_blocks)](
                self.logits, self._tops, self._at, self._weights, n, BLOCK=VOCABULARY_BLOCK, **self._overlap
            )
            _kernels().take_best[(rows,)](
                self._tops, self._at, self._weights, self.ids, self.positions, self._steps, self.told_ids,
                self.told_log_p, n, n_blocks, last, BLOCK=_power(n_blocks), **self._overlap,
            )  # fmt: skip
            return
        step = self._steps[:1]
        chosen = choose(self.logits, sampling, said=None, chance=self.chances.index_select(0, step)[0])
        self.told_ids.index_copy_(0, step, chosen[None])
        self.told_log_p.index_copy_(0, step, log_probabilities(self.logits, chosen)[None])
        self.ids.copy_(chosen)
        self.positions.add_(1).clamp_(max=last)
        self._steps.add_(1)

    def _multiply(self, matrix: Matrix, x: Tensor, y: Tensor) -> None:
        rows, n_in, n_out = len(x), matrix.weight.shape[1], matrix.n_out
        norm, epsilon = matrix.norm, 0.0 if matrix.norm is None else matrix.norm.epsilon
        kind = 0 if norm is None else 1 if isinstance(norm, LayerNorm) else 2
        norm_weight = None if norm is None else norm.weight
        norm_bias = norm.bias if isinstance(norm, LayerNorm) else None
        rest = {
            "HAS_BIAS": matrix.bias is not None, "ACTIVATION": matrix.activation, "GATED": matrix.is_gated,
            "ADD": matrix.adds, **self._overlap,
        }  # fmt: skip
        if rows == 1:
            block_in = _power(n_in)
            more = 2 if matrix.weight.numel() >= LARGE else 1
            read = more * READ // (2 if matrix.is_gated else 1)
            block_out = min(max(read // block_in, 1), max(_power(n_out // (more * PROGRAMS)), 1))
            _kernels().one_row[(-(-n_out // block_out),)](
                x, matrix.weight, matrix.bias, norm_weight, norm_bias, y, n_in, n_out, epsilon, matrix.scale,
                NORM=kind, NORM_BIAS=norm_bias is not None, BLOCK_OUT=block_out, BLOCK_IN=block_in, **rest,
            )  # fmt: skip
            return
        if norm is not None:
            _kernels().norm_rows[(rows,)](
                x, norm_weight, norm_bias, self._normed, n_in, epsilon, NORM=kind, NORM_BIAS=norm_bias is not None,
                BLOCK=_power(n_in), **self._overlap,
            )  # fmt: skip
            x = self._normed
        block_rows = min(max(_power(rows), 16), 64)
        block_out = 16 if n_out < 64 * PROGRAMS else 64
        _kernels().many_rows[(-(-n_out // block_out), -(-rows // block_rows))](
            x, matrix.weight, matrix.bias, y, rows, n_in, n_out, matrix.scale, BLOCK_ROWS=block_rows,
            BLOCK_OUT=block_out, BLOCK_IN=128, num_stages=4, **rest,
        )  # fmt: skip

    def _look_back(self, layer: int) -> None:
        shape, rows = self._shape, len(self.ids)
        cos, sin = (None, None) if self._rotation is None else self._rotation
        _kernels().look_back[(rows, shape.n_heads, self._n_splits)](
            self._projected, self._keys[layer], self._values[layer], self.positions, cos, sin,
            self._heads, self._parts, self._capacity, self._scale, HEADS=shape.n_heads,
            KV_HEADS=shape.n_kv_heads, D=shape.d_head, D_VALUE=shape.d_value, ROTARY=cos is not None,
            BLOCK_D=_power(shape.d_head), BLOCK_VALUE=_power(shape.d_value), BLOCK_KEYS=KEYS,
            SPLITS=self._n_splits, **self._overlap,
        )  # fmt: skip
        if self._n_splits > 1:
            _kernels().merge[(rows * shape.n_heads,)](
                self._parts, self._heads, D_VALUE=shape.d_value, BLOCK_VALUE=_power(shape.d_value),
                SPLITS=self._n_splits, **self._overlap,
            )  # fmt: skip


def _layer(block: Block) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Queries, keys and values; the output; the feed-forward's two (a gate stands before what it gates)."""
    attention, feedforward = block.attention, block.feedforward
    assert isinstance(attention.output, nn.Linear)
    own = _side_by_side(attention.query, attention.key, attention.value)
    gate = feedforward.gate
    wide = _side_by_side(feedforward.expand) if gate is None else _side_by_side(gate, feedforward.expand)
    return (
        Matrix(*own, norm=block.attention_norm),
        Matrix(attention.output.weight, attention.output.bias, adds=True),
        Matrix(
            *wide,
            norm=block.feedforward_norm,
            activation=ACTIVATIONS[feedforward.activation],
            is_gated=gate is not None,
        ),
        Matrix(feedforward.contract.weight, feedforward.contract.bias, adds=True),
    )


def _side_by_side(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]  # pyright: ignore[reportUnnecessaryComparison]
    return torch.cat(weights), torch.cat(biases) if biases else None


def _tables(model: GPT, capacity: int) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """What is added at each position, and the angles there."""
    tokens = model.embedding.token.weight
    positions = torch.arange(capacity, device=tokens.device)[None]
    places = rotation = None
    if model.embedding.position is not None:
        places = model.embedding.position(tokens.new_zeros(1, capacity, tokens.shape[1]), positions)[0].contiguous()
    if isinstance(model.relation, Rotary):
        angles = model.relation(positions, positions).rotation
        assert angles is not None
        rotation = angles[0][0, 0].contiguous(), angles[1][0, 0].contiguous()
    return places, rotation


def _splits(capacity: int, n_heads: int) -> int:
    """Programs a head: more where the context is long and the heads are too few for the GPU."""
    return max(1, min(_power(capacity) // (4 * KEYS), _power(PROGRAMS // n_heads + 1), 64))


def _kernels() -> Any:  # noqa: ANN401 - what Triton makes of a function has no type
    """Imported here, for Triton comes with torch for GPUs alone."""
    return import_module("qkv.generation.gpu_kernels")


def _power(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(n - 1, 0).bit_length()
