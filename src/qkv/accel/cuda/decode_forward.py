"""Run the forward pass of a decode step with Triton kernels, from ids and positions to logits.

The results match those of the reference implementation `GPT.forward` up to rounding. There are two implementations: one
for a single row and one for several rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from qkv.accel.support import known_norm
from qkv.choices import Activation
from qkv.models import GPT
from qkv.nn import Block
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.positions import RotaryEmbedding

ACTIVATION_CODES = {Activation.RELU: 1, Activation.GELU: 2, Activation.GELU_TANH: 3, Activation.SILU: 4}
TARGET_PROGRAMS = 256
"""Target number of programs per kernel, which is about two for each multiprocessor of a large GPU."""
READ_BYTES = 16384
"""Number of bytes of a weight matrix that a program loads at once for a single row.

Programs for large matrices load twice as many bytes, in several iterations.
"""
LARGE_MATRIX_BYTES = 2**23
"""Size in bytes from which a weight matrix counts as large."""
KEY_BLOCK_ELEMENTS = 8192
"""Number of key elements that a program loads at once."""
OUT_PROJ_PROGRAMS = 128
"""Approximate number of programs that compute attention and the output projection. Each loads the keys of a head."""


@dataclass(frozen=True)
class FusedLinear:
    """Linear layer with an optional preceding norm and an optional activation, gate, scale and residual addition."""

    weight: Tensor
    bias: Tensor | None
    norm: LayerNorm | RMSNorm | None = None
    activation: int = 0
    is_gated: bool = False
    adds_to_residual: bool = False
    scale: float = 1.0

    @property
    def n_out(self) -> int:
        return self.weight.shape[0] // (2 if self.is_gated else 1)

    @property
    def norm_arguments(self) -> tuple[Tensor | None, Tensor | None, float, dict[str, Any]]:
        """The norm's weight, bias and epsilon, and its compile-time kernel arguments."""
        if self.norm is None:
            return None, None, 0.0, {"NORM_KIND": 0, "HAS_NORM_BIAS": False}
        bias = self.norm.bias if isinstance(self.norm, LayerNorm) else None
        constants = {"NORM_KIND": 1 if isinstance(self.norm, LayerNorm) else 2, "HAS_NORM_BIAS": bias is not None}
        return self.norm.weight, bias, self.norm.eps, constants


class KernelWeights:
    """Model weights in the layout that the kernels read."""

    def __init__(self, model: GPT) -> None:
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        self.layers = [_fuse_layer(block) for block in blocks]
        final_norm = None if isinstance(model.final_norm, nn.Identity) else known_norm(model.final_norm)
        unembedding = model.unembedding
        self.unembedding = FusedLinear(unembedding.weight, unembedding.bias, norm=final_norm, scale=unembedding.scale)
        self.token_embedding, self.embedding_scale = model.embedding.token.weight, model.embedding.scale
        self.attention = blocks[0].attention


@dataclass(frozen=True)
class StepTensors:
    """Input and output tensors of a decode step, except for weights. A captured CUDA graph refers to these tensors."""

    ids: Tensor
    positions: Tensor
    """Position of the next token in each row, which equals the number of tokens before it."""
    keys: Tensor
    """Key cache, with shape (layer, row, kv_head, slot, d_head)."""
    values: Tensor
    """Value cache, with shape (layer, row, kv_head, slot, d_value)."""
    logits: Tensor
    position_embedding: Tensor | None
    """Position embedding for each position, or `None` if the model does not add any."""
    rotation: tuple[Tensor, Tensor] | None
    """Cosines and sines of the rotary angles for each position, or `None` for models without rotary embeddings."""
    launch_options: Mapping[str, bool]
    """Programmatic dependent launch options for all kernels."""

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]


class _KernelForward:
    """Base class with the attention computation for the single-row and multi-row implementations."""

    def __init__(self, weights: KernelWeights, tensors: StepTensors) -> None:
        self.weights, self.tensors = weights, tensors
        heads, rows = weights.attention.head_config, len(tensors.ids)
        self.heads, self.d_model = heads, weights.token_embedding.shape[1]
        new_empty = weights.token_embedding.new_empty
        self.qkv = new_empty(rows, (heads.n_heads + heads.n_kv_heads) * heads.d_head + heads.n_kv_heads * heads.d_value)
        self.block_keys = max(KEY_BLOCK_ELEMENTS // power_of_two(heads.d_head), 1)
        self.n_splits = _choose_n_splits(tensors.capacity // self.block_keys, rows * heads.n_heads)
        # For each split, this buffer stores the weighted values, the maximum score and the sum of exponentials.
        n_split_elements = rows * heads.n_heads * self.n_splits * (power_of_two(heads.d_value) + 2)
        self.splits = new_empty(n_split_elements, dtype=torch.float32)
        cos, sin = (None, None) if tensors.rotation is None else tensors.rotation
        self.position_arguments = tensors.positions, cos, sin
        self.attention_constants: dict[str, Any] = {
            "N_HEADS": heads.n_heads,
            "N_KV_HEADS": heads.n_kv_heads,
            "D_HEAD": heads.d_head,
            "D_VALUE": heads.d_value,
            "BLOCK_D": power_of_two(heads.d_head),
            "BLOCK_VALUE": power_of_two(heads.d_value),
            "BLOCK_KEYS": self.block_keys,
            "IS_ROTARY": cos is not None,
            "N_SPLITS": self.n_splits,
            **tensors.launch_options,
        }

    def decode_attention(self, layer: int, unsplit_output: Tensor | None) -> None:
        """Compute attention and write it to `unsplit_output`, or to `splits` if several programs share a head."""
        _batch_kernels().decode_attention_kernel[(len(self.qkv), self.heads.n_heads, self.n_splits)](
            self.qkv,
            self.tensors.keys[layer],
            self.tensors.values[layer],
            *self.position_arguments,
            unsplit_output,
            self.splits,
            self.tensors.capacity,
            self.weights.attention.scale,
            **self.attention_constants,
        )


class SingleRowForward(_KernelForward):
    """Forward pass for a single row, which is bound by latency.

    The pass launches four kernels per layer, or five if several programs share a head. Each kernel loads weights first.
    """

    def __init__(self, weights: KernelWeights, tensors: StepTensors) -> None:
        super().__init__(weights, tensors)
        # The residual stream is stored in fixed point. See triton_row_kernels.
        self._residual = torch.zeros(self.d_model, dtype=torch.long, device=weights.token_embedding.device)
        self._overflow = self._residual.new_zeros(1)
        self._hidden = weights.token_embedding.new_empty(weights.layers[0][2].n_out)

    def __call__(self) -> None:
        weights, tensors = self.weights, self.tensors
        _row_kernels().embed_row_kernel[(1,)](
            tensors.ids,
            tensors.positions,
            weights.token_embedding,
            tensors.position_embedding,
            self._residual,
            self._overflow,
            self.d_model,
            weights.embedding_scale,
            HAS_POSITION_EMBEDDING=tensors.position_embedding is not None,
            BLOCK=power_of_two(self.d_model),
            **tensors.launch_options,
        )
        for layer, (qkv_proj, out_proj, up_proj, down_proj) in enumerate(weights.layers):
            self._run_fused_linear(qkv_proj, self._residual, self.qkv)
            if self.n_splits > 1:
                self.decode_attention(layer, None)
            self._attention_out_proj(layer, out_proj)
            self._run_fused_linear(up_proj, self._residual, self._hidden)
            self._run_fused_linear(down_proj, self._hidden, self._residual)
        self._run_fused_linear(weights.unembedding, self._residual, tensors.logits)

    def _run_fused_linear(self, linear: FusedLinear, x: Tensor, y: Tensor) -> None:
        norm_weight, norm_bias, eps, norm_constants = linear.norm_arguments
        weight, n_in, n_out = linear.weight, linear.weight.shape[1], linear.n_out
        row_bytes = power_of_two(n_in) * weight.element_size() * (2 if linear.is_gated else 1)
        is_large = weight.nbytes >= LARGE_MATRIX_BYTES
        read_bytes = 2 * READ_BYTES if is_large else READ_BYTES
        block_out = min(max(read_bytes // row_bytes, 1), power_of_two(n_out // TARGET_PROGRAMS))
        n_blocks = -(-n_out // block_out)
        n_iterations = -(-n_blocks // TARGET_PROGRAMS) if is_large else 1
        _row_kernels().linear_row_kernel[(-(-n_blocks // n_iterations),)](
            x,
            self._overflow,
            weight,
            linear.bias,
            norm_weight,
            norm_bias,
            y,
            n_in,
            n_out,
            eps,
            linear.scale,
            HAS_BIAS=linear.bias is not None,
            ACTIVATION=linear.activation,
            IS_GATED=linear.is_gated,
            ADD_TO_OUTPUT=linear.adds_to_residual,
            BLOCK_OUT=block_out,
            BLOCK_IN=power_of_two(n_in),
            N_ITERATIONS=n_iterations,
            **norm_constants,
            **self.tensors.launch_options,
        )

    def _attention_out_proj(self, layer: int, out_proj: FusedLinear) -> None:
        block_out = max(power_of_two(out_proj.n_out * self.heads.n_heads // OUT_PROJ_PROGRAMS + 1) // 2, 1)
        n_bytes = block_out * self.heads.d_value * out_proj.weight.element_size()
        _row_kernels().attention_out_proj_kernel[(self.heads.n_heads, -(-out_proj.n_out // block_out))](
            self.qkv,
            self.tensors.keys[layer],
            self.tensors.values[layer],
            *self.position_arguments,
            self.splits,
            out_proj.weight,
            out_proj.bias,
            self._residual,
            self._overflow,
            self.tensors.capacity,
            self.weights.attention.scale,
            out_proj.n_out,
            HAS_BIAS=out_proj.bias is not None,
            BLOCK_OUT=block_out,
            num_warps=8 if n_bytes > 2 * READ_BYTES else 4,
            **self.attention_constants,
        )


class BatchForward(_KernelForward):
    """Forward pass for several rows, with five to eight kernels per layer."""

    def __init__(self, weights: KernelWeights, tensors: StepTensors) -> None:
        super().__init__(weights, tensors)
        rows, new_empty = len(tensors.ids), weights.token_embedding.new_empty
        self._residual = new_empty(rows, self.d_model, dtype=torch.float32)
        self._normed = new_empty(rows, self.d_model)
        self._head_outputs = new_empty(rows, self.heads.n_heads * self.heads.d_value)
        self._hidden = new_empty(rows, weights.layers[0][2].n_out)

    def __call__(self) -> None:
        weights, tensors = self.weights, self.tensors
        _batch_kernels().embed_kernel[(len(tensors.ids),)](
            tensors.ids,
            tensors.positions,
            weights.token_embedding,
            tensors.position_embedding,
            self._residual,
            self.d_model,
            weights.embedding_scale,
            HAS_POSITION_EMBEDDING=tensors.position_embedding is not None,
            BLOCK=power_of_two(self.d_model),
            **tensors.launch_options,
        )
        for layer, (qkv_proj, out_proj, up_proj, down_proj) in enumerate(weights.layers):
            self._run_fused_linear(qkv_proj, self._residual, self.qkv)
            self._attend(layer)
            self._run_fused_linear(out_proj, self._head_outputs, self._residual)
            self._run_fused_linear(up_proj, self._residual, self._hidden)
            self._run_fused_linear(down_proj, self._hidden, self._residual)
        self._run_fused_linear(weights.unembedding, self._residual, tensors.logits)

    def _attend(self, layer: int) -> None:
        self.decode_attention(layer, self._head_outputs)
        if self.n_splits > 1:
            _batch_kernels().merge_attention_splits_kernel[(len(self._head_outputs) * self.heads.n_heads,)](
                self.splits,
                self._head_outputs,
                D_VALUE=self.heads.d_value,
                BLOCK_VALUE=power_of_two(self.heads.d_value),
                N_SPLITS=self.n_splits,
                **self.tensors.launch_options,
            )

    def _run_fused_linear(self, linear: FusedLinear, x: Tensor, y: Tensor) -> None:
        rows, n_in, n_out = len(x), linear.weight.shape[1], linear.n_out
        if linear.norm is not None:
            norm_weight, norm_bias, eps, norm_constants = linear.norm_arguments
            _batch_kernels().norm_kernel[(rows,)](
                x,
                norm_weight,
                norm_bias,
                self._normed,
                n_in,
                eps,
                BLOCK=power_of_two(n_in),
                **norm_constants,
                **self.tensors.launch_options,
            )
            x = self._normed
        block_rows = min(max(power_of_two(rows), 16), 64)
        block_out = 16 if n_out < 64 * TARGET_PROGRAMS else 64
        _batch_kernels().linear_kernel[(-(-n_out // block_out), -(-rows // block_rows))](
            x,
            linear.weight,
            linear.bias,
            y,
            rows,
            n_in,
            n_out,
            linear.scale,
            HAS_BIAS=linear.bias is not None,
            ACTIVATION=linear.activation,
            IS_GATED=linear.is_gated,
            ADD_TO_OUTPUT=linear.adds_to_residual,
            BLOCK_ROWS=block_rows,
            BLOCK_OUT=block_out,
            BLOCK_IN=128,
            num_stages=4,
            **self.tensors.launch_options,
        )


def _fuse_layer(block: Block) -> tuple[FusedLinear, FusedLinear, FusedLinear, FusedLinear]:
    """Return the query/key/value projection, the output projection, and the up and down projections of a block.

    If there is a gate projection, it precedes the up projection in the same matrix.
    """
    attention, feed_forward = block.attention, block.feed_forward
    assert isinstance(attention.out_proj, nn.Linear)
    qkv_proj = _concatenate_linears(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_proj, up_proj = feed_forward.gate_proj, feed_forward.up_proj
    up = _concatenate_linears(up_proj) if gate_proj is None else _concatenate_linears(gate_proj, up_proj)
    return (
        FusedLinear(*qkv_proj, norm=known_norm(block.attention_norm)),
        FusedLinear(attention.out_proj.weight, attention.out_proj.bias, adds_to_residual=True),
        FusedLinear(
            *up,
            norm=known_norm(block.feed_forward_norm),
            activation=ACTIVATION_CODES[feed_forward.activation],
            is_gated=gate_proj is not None,
        ),
        FusedLinear(feed_forward.down_proj.weight, feed_forward.down_proj.bias, adds_to_residual=True),
    )


def _concatenate_linears(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights and biases of linear layers along the output dimension."""
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]  # pyright: ignore[reportUnnecessaryComparison]
    return torch.cat(weights), torch.cat(biases) if biases else None


def position_tables(model: GPT, capacity: int) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """Return the position embeddings and the rotary cosines and sines of all positions, or `None` if unused."""
    token_embedding = model.embedding.token.weight
    positions = torch.arange(capacity, device=token_embedding.device)[None]
    position_embedding = rotation = None
    if model.embedding.position is not None:
        zeros = token_embedding.new_zeros(1, capacity, token_embedding.shape[1])
        position_embedding = model.embedding.position(zeros, positions)[0].contiguous()
    if isinstance(model.relative_positions, RotaryEmbedding):
        angles = model.relative_positions(positions, positions).rotation
        assert angles is not None
        rotation = angles[0][0, 0].contiguous(), angles[1][0, 0].contiguous()
    return position_embedding, rotation


def _choose_n_splits(n_blocks: int, n_heads: int) -> int:
    """Choose the number of programs per head. Long contexts with few heads are split to occupy the GPU."""
    return max(1, min(power_of_two(n_blocks) // 4, power_of_two(TARGET_PROGRAMS // n_heads + 1), 64))


def _batch_kernels() -> Any:  # noqa: ANN401 - Triton's kernels have no static type
    """Import the kernels on first use because only torch builds for GPUs include Triton."""
    return import_module("qkv.accel.cuda.triton_batch_kernels")


def _row_kernels() -> Any:  # noqa: ANN401 - see above
    return import_module("qkv.accel.cuda.triton_row_kernels")


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
