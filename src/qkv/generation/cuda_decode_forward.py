"""All kernels of one decoding step in order, from ids and positions to logits: of one row, and of several.

`GPT.forward` says what is computed, and these agree with it to rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from qkv.choices import Activation
from qkv.models import GPT
from qkv.nn import Block, LayerNorm, RMSNorm, Rotary

ACTIVATIONS = {Activation.RELU: 1, Activation.GELU: 2, Activation.GELU_TANH: 3, Activation.SILU: 4}
PROGRAMS = 256
"""About two for each of a large GPU's processors."""
READ = 16384
"""Bytes of a matrix that a program reads at once, for one row; of a large one twice as many, several times over."""
LARGE = 2**23
"""Bytes of a matrix that is large."""
KEYS = 8192
"""Numbers of keys that are read at once."""
HEADS_PROGRAMS = 128
"""About so many look back and multiply on what they found: each reads a head's keys."""


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

    @property
    def before(self) -> tuple[Tensor | None, Tensor | None, float, dict[str, Any]]:
        """The norm's weight, bias and epsilon, and what the kernels call it."""
        if self.norm is None:
            return None, None, 0.0, {"NORM": 0, "NORM_BIAS": False}
        bias = self.norm.bias if isinstance(self.norm, LayerNorm) else None
        kind = {"NORM": 1 if isinstance(self.norm, LayerNorm) else 2, "NORM_BIAS": bias is not None}
        return self.norm.weight, bias, self.norm.epsilon, kind


class KernelWeights:
    """A model's weights as the kernels read them."""

    def __init__(self, model: GPT) -> None:
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        self.layers = [_layer(block) for block in blocks]
        final = model.final_norm if isinstance(model.final_norm, LayerNorm | RMSNorm) else None
        unembedding = model.unembedding
        self.head = Matrix(unembedding.weight, unembedding.bias, norm=final, scale=unembedding.scale)
        self.tokens, self.scale = model.embedding.token.weight, model.embedding.scale
        self.attention = blocks[0].attention


@dataclass(frozen=True)
class StepTensors:
    """What a step reads and writes besides weights: a recording holds these very tensors."""

    ids: Tensor
    positions: Tensor
    """Where each row's next token stands: how many stand before it."""
    keys: Tensor
    """(layer, row, kv_head, slot, width)"""
    values: Tensor
    logits: Tensor
    places: Tensor | None
    """What is added at each position."""
    rotation: tuple[Tensor, Tensor] | None
    """The angles there."""
    overlap: Mapping[str, bool]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]


class _Forward:
    """What steps of one and of several rows have in common: looking back."""

    def __init__(self, laid: KernelWeights, given: StepTensors) -> None:
        self.laid, self.given = laid, given
        shape, rows = laid.attention.head_config, len(given.ids)
        self.shape, self.d_model = shape, laid.tokens.shape[1]
        new = laid.tokens.new_empty
        self.projected = new(rows, (shape.n_heads + shape.n_kv_heads) * shape.d_head + shape.n_kv_heads * shape.d_value)
        self.n_keys = max(KEYS // power_of_two(shape.d_head), 1)
        self.n_splits = _splits(given.capacity // self.n_keys, rows * shape.n_heads)
        n_parts = rows * shape.n_heads * self.n_splits * (power_of_two(shape.d_value) + 2)
        self.parts = new(n_parts, dtype=torch.float32)
        cos, sin = (None, None) if given.rotation is None else given.rotation
        self.position_tables = given.positions, cos, sin
        self.looking: dict[str, Any] = {
            "HEADS": shape.n_heads, "KV_HEADS": shape.n_kv_heads, "D": shape.d_head, "D_VALUE": shape.d_value,
            "BLOCK_D": power_of_two(shape.d_head), "BLOCK_VALUE": power_of_two(shape.d_value),
            "BLOCK_KEYS": self.n_keys, "ROTARY": cos is not None, "SPLITS": self.n_splits, **given.overlap,
        }  # fmt: skip

    def look_back(self, layer: int, heads: Tensor | None) -> None:
        """Into `heads`, or into `parts` where several programs share a head."""
        _kernels().look_back[(len(self.projected), self.shape.n_heads, self.n_splits)](
            self.projected, self.given.keys[layer], self.given.values[layer], *self.position_tables, heads, self.parts,
            self.given.capacity, self.laid.attention.scale, **self.looking,
        )  # fmt: skip


class OneRow(_Forward):
    """A step of one row is all waiting: four kernels a layer (five, where several programs share a head), each of which
    begins by reading weights.
    """

    def __init__(self, laid: KernelWeights, given: StepTensors) -> None:
        super().__init__(laid, given)
        self._stream = torch.zeros(self.d_model, dtype=torch.long, device=laid.tokens.device)
        self._spoiled = self._stream.new_zeros(1)
        self._hidden = laid.tokens.new_empty(laid.layers[0][2].n_out)

    def __call__(self) -> None:
        laid, given = self.laid, self.given
        _row_kernels().embed_row[(1,)](
            given.ids, given.positions, laid.tokens, given.places, self._stream, self._spoiled, self.d_model,
            laid.scale, HAS_PLACES=given.places is not None, BLOCK=power_of_two(self.d_model), **given.overlap,
        )  # fmt: skip
        for number, (own, output, expand, contract) in enumerate(laid.layers):
            self._multiply(own, self._stream, self.projected)
            if self.n_splits > 1:
                self.look_back(number, None)
            self._give_heads(number, output)
            self._multiply(expand, self._stream, self._hidden)
            self._multiply(contract, self._hidden, self._stream)
        self._multiply(laid.head, self._stream, given.logits)

    def _multiply(self, matrix: Matrix, x: Tensor, y: Tensor) -> None:
        norm_weight, norm_bias, epsilon, kind = matrix.before
        weight, n_in, n_out = matrix.weight, matrix.weight.shape[1], matrix.n_out
        row_bytes = power_of_two(n_in) * weight.element_size() * (2 if matrix.is_gated else 1)
        is_large = weight.nbytes >= LARGE
        read = 2 * READ if is_large else READ
        block_out = min(max(read // row_bytes, 1), power_of_two(n_out // PROGRAMS))
        n_blocks = -(-n_out // block_out)
        turns = -(-n_blocks // PROGRAMS) if is_large else 1
        _row_kernels().one_row[(-(-n_blocks // turns),)](
            x, self._spoiled, weight, matrix.bias, norm_weight, norm_bias, y, n_in, n_out, epsilon, matrix.scale,
            HAS_BIAS=matrix.bias is not None, ACTIVATION=matrix.activation, GATED=matrix.is_gated, ADD=matrix.adds,
            BLOCK_OUT=block_out, BLOCK_IN=power_of_two(n_in), TURNS=turns, **kind, **self.given.overlap,
        )  # fmt: skip

    def _give_heads(self, layer: int, output: Matrix) -> None:
        block_out = max(power_of_two(output.n_out * self.shape.n_heads // HEADS_PROGRAMS + 1) // 2, 1)
        n_bytes = block_out * self.shape.d_value * output.weight.element_size()
        _row_kernels().give_heads[(self.shape.n_heads, -(-output.n_out // block_out))](
            self.projected, self.given.keys[layer], self.given.values[layer], *self.position_tables, self.parts, output.weight,
            output.bias, self._stream, self._spoiled, self.given.capacity, self.laid.attention.scale, output.n_out,
            HAS_BIAS=output.bias is not None, BLOCK_OUT=block_out, num_warps=8 if n_bytes > 2 * READ else 4,
            **self.looking,
        )  # fmt: skip


class ManyRows(_Forward):
    """A step of several rows, five to eight kernels a layer."""

    def __init__(self, laid: KernelWeights, given: StepTensors) -> None:
        super().__init__(laid, given)
        rows, new = len(given.ids), laid.tokens.new_empty
        self._stream = new(rows, self.d_model, dtype=torch.float32)
        self._normed = new(rows, self.d_model)
        self._heads = new(rows, self.shape.n_heads * self.shape.d_value)
        self._hidden = new(rows, laid.layers[0][2].n_out)

    def __call__(self) -> None:
        laid, given = self.laid, self.given
        _kernels().embed[(len(given.ids),)](
            given.ids, given.positions, laid.tokens, given.places, self._stream, self.d_model, laid.scale,
            HAS_PLACES=given.places is not None, BLOCK=power_of_two(self.d_model), **given.overlap,
        )  # fmt: skip
        for number, (own, output, expand, contract) in enumerate(laid.layers):
            self._multiply(own, self._stream, self.projected)
            self._look(number)
            self._multiply(output, self._heads, self._stream)
            self._multiply(expand, self._stream, self._hidden)
            self._multiply(contract, self._hidden, self._stream)
        self._multiply(laid.head, self._stream, given.logits)

    def _look(self, layer: int) -> None:
        self.look_back(layer, self._heads)
        if self.n_splits > 1:
            _kernels().merge[(len(self._heads) * self.shape.n_heads,)](
                self.parts, self._heads, D_VALUE=self.shape.d_value, BLOCK_VALUE=power_of_two(self.shape.d_value),
                SPLITS=self.n_splits, **self.given.overlap,
            )  # fmt: skip

    def _multiply(self, matrix: Matrix, x: Tensor, y: Tensor) -> None:
        rows, n_in, n_out = len(x), matrix.weight.shape[1], matrix.n_out
        if matrix.norm is not None:
            norm_weight, norm_bias, epsilon, kind = matrix.before
            _kernels().norm_rows[(rows,)](
                x, norm_weight, norm_bias, self._normed, n_in, epsilon, BLOCK=power_of_two(n_in), **kind,
                **self.given.overlap,
            )  # fmt: skip
            x = self._normed
        block_rows = min(max(power_of_two(rows), 16), 64)
        block_out = 16 if n_out < 64 * PROGRAMS else 64
        _kernels().many_rows[(-(-n_out // block_out), -(-rows // block_rows))](
            x, matrix.weight, matrix.bias, y, rows, n_in, n_out, matrix.scale, HAS_BIAS=matrix.bias is not None,
            ACTIVATION=matrix.activation, GATED=matrix.is_gated, ADD=matrix.adds, BLOCK_ROWS=block_rows,
            BLOCK_OUT=block_out, BLOCK_IN=128, num_stages=4, **self.given.overlap,
        )  # fmt: skip


def _layer(block: Block) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Queries, keys and values; the output; the feed-forward's two (a gate stands before what it gates)."""
    attention, feed_forward = block.attention, block.feed_forward
    assert isinstance(attention.out_proj, nn.Linear)
    own = _side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
    gate = feed_forward.gate_proj
    wide = _side_by_side(feed_forward.up_proj) if gate is None else _side_by_side(gate, feed_forward.up_proj)
    return (
        Matrix(*own, norm=block.attention_norm),
        Matrix(attention.out_proj.weight, attention.out_proj.bias, adds=True),
        Matrix(
            *wide,
            norm=block.feed_forward_norm,
            activation=ACTIVATIONS[feed_forward.activation],
            is_gated=gate is not None,
        ),
        Matrix(feed_forward.down_proj.weight, feed_forward.down_proj.bias, adds=True),
    )


def _side_by_side(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]  # pyright: ignore[reportUnnecessaryComparison]
    return torch.cat(weights), torch.cat(biases) if biases else None


def position_tables(model: GPT, capacity: int) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
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


def _splits(n_blocks: int, n_heads: int) -> int:
    """Programs a head: more where the context is long and the heads are too few for the GPU."""
    return max(1, min(power_of_two(n_blocks) // 4, power_of_two(PROGRAMS // n_heads + 1), 64))


def _kernels() -> Any:  # noqa: ANN401 - what Triton makes of a function has no type
    """Imported here, for Triton comes with torch for GPUs alone."""
    return import_module("qkv.generation.triton_batch_kernels")


def _row_kernels() -> Any:  # noqa: ANN401 - as above
    return import_module("qkv.generation.triton_row_kernels")


def power_of_two(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(n - 1, 0).bit_length()
