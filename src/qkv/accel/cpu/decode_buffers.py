"""Preallocated tensors for the CPU decode engine, which are overwritten in every decode step."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.accel.support import known_norm
from qkv.nn import HeadConfig
from qkv.nn.norm import LayerNorm, RMSNorm

RotaryAngles = tuple[Tensor, Tensor]
"""Cosines of all rotary angles for the new tokens, and sines of the first half of the angles."""


class DecodeBuffers:
    """Buffers for the residual stream, queries, keys and values of a decode step, with all views that it needs."""

    def __init__(
        self,
        token_embedding: Tensor,
        head_config: HeadConfig,
        *,
        rows: int,
        rms_norm_eps: float | None,
        is_rotary: bool,
    ) -> None:
        """Allocate the buffers. `token_embedding` determines their dtype and width.

        `rms_norm_eps` is `None` if the model has no RMSNorm.
        """
        new_empty, d_model = token_embedding.new_empty, token_embedding.shape[1]
        n_heads, n_kv_heads = head_config.n_heads, head_config.n_kv_heads
        d_head, d_value = head_config.d_head, head_config.d_value
        # An additional column with the constant √(d_model · eps) makes the vector norm of a row equal to
        # √(Σ x² + d_model · eps), as RMSNorm requires. See BufferedNorm.
        n_extra = 0 if rms_norm_eps is None else 1
        self.extended_residual = token_embedding.new_full(
            (rows, d_model + n_extra), (d_model * (rms_norm_eps or 0)) ** 0.5
        )
        self.residual = self.extended_residual[:, :d_model]
        self.vector_norm, self.normed = new_empty(rows, 1), new_empty(rows, d_model)
        n_rotated = n_heads + n_kv_heads  # queries and keys
        self.projected = new_empty(rows, n_rotated * d_head + n_kv_heads * d_value)
        queries_and_keys, values = self.projected.split([n_rotated * d_head, n_kv_heads * d_value], dim=-1)
        self._unrotated = queries_and_keys.view(rows, n_rotated, d_head)
        self._rotated = torch.empty_like(self._unrotated, memory_format=torch.contiguous_format) if is_rotary else None
        final = self._unrotated if self._rotated is None else self._rotated
        # Heads that share keys (GQA) are additional queries of one kv_head, so the cache does not have to be repeated.
        self.queries = final[:, :n_heads].view(rows, n_kv_heads, -1, d_head)
        n_groups, group_size = rows * n_kv_heads, n_heads // n_kv_heads
        self.grouped_heads = new_empty(n_groups, group_size, d_value)
        self.heads = self.grouped_heads.view(rows, -1)
        self._grouped_queries = self.queries[0] if rows == 1 else new_empty(n_groups, group_size, d_head)
        self.keys = final[:, n_heads:]
        self.values = values.view(rows, n_kv_heads, d_value)
        if self._rotated is not None:
            self._halves = list(zip(self._rotated.chunk(2, -1), self._unrotated.chunk(2, -1), strict=True))

    @property
    def rows(self) -> int:
        return self.extended_residual.shape[0]

    def grouped_queries(self) -> Tensor:
        """Return the queries with shape (batch · kv_head, heads per kv_head, d_head), contiguous for `bmm`."""
        if self.rows > 1:
            self._grouped_queries.view_as(self.queries).copy_(self.queries)
        return self._grouped_queries

    def apply_rotary(self, angles: RotaryAngles) -> None:
        """Rotate queries and keys in the same way as `PositionInfo.rotate`."""
        cos, sin = angles
        (rotated_first, first), (rotated_second, second) = self._halves
        torch.mul(self._unrotated, cos, out=self._rotated)
        rotated_first.addcmul_(second, sin, value=-1)
        rotated_second.addcmul_(first, sin)


class BufferedNorm:
    """LayerNorm or RMSNorm that uses few torch calls. On a CPU, torch's RMSNorm consists of eight calls."""

    def __init__(self, module: nn.Module) -> None:
        norm = known_norm(module)
        self._weight, self._shape = norm.weight.detach(), tuple(norm.weight.shape)
        self._eps = norm.eps
        self._is_rms = isinstance(norm, RMSNorm)
        self._bias = norm.bias.detach() if isinstance(norm, LayerNorm) and norm.bias is not None else None
        # RMSNorm divides by the root of the mean, whereas vector_norm computes the root of the sum.
        self._scaled_weight = self._weight * self._weight.shape[0] ** 0.5

    def __call__(self, x: Tensor, buffers: DecodeBuffers) -> Tensor:
        """Normalize `x`. If `x` is `buffers.residual`, the result is valid only until the next call."""
        if not self._is_rms:
            return torch.layer_norm(x, self._shape, self._weight, self._bias, self._eps)
        if x is not buffers.residual:
            return F.rms_norm(x, self._shape, self._weight, self._eps)
        torch.linalg.vector_norm(buffers.extended_residual, 2, -1, True, out=buffers.vector_norm)
        return torch.div(x, buffers.vector_norm, out=buffers.normed).mul_(self._scaled_weight)
