"""The tensors that every step of decoding writes anew: made once for a number of rows, with all views of them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv.nn import Heads, LayerNorm, RMSNorm

Rotation = tuple[Tensor, Tensor]
"""cos of all angles of the new tokens, sin of one half of them."""


class DecodeBuffers:
    """Where a step's residual stream, queries, keys and values stand."""

    def __init__(self, like: Tensor, shape: Heads, *, rows: int, epsilon: float | None, is_rotary: bool) -> None:
        """`like`: the token table; `epsilon`: of every RMSNorm, None where there is none."""
        d_model = like.shape[1]
        # One more column turns the length of a row into its root mean square with epsilon (see BufferedNorm).
        n_more = 0 if epsilon is None else 1
        self.wide = like.new_full((rows, d_model + n_more), (d_model * (epsilon or 0)) ** 0.5)
        self.stream = self.wide[:, :d_model]
        self.length, self.normed = like.new_empty(rows, 1), like.new_empty(rows, d_model)
        n_turned = shape.n_heads + shape.n_kv_heads
        self.projected = like.new_empty(rows, n_turned * shape.d_head + shape.n_kv_heads * shape.d_value)
        turned, values = self.projected.split([n_turned * shape.d_head, shape.n_kv_heads * shape.d_value], dim=-1)
        self._before = turned.view(rows, n_turned, shape.d_head)
        self._after = torch.empty_like(self._before, memory_format=torch.contiguous_format) if is_rotary else None
        standing = self._before if self._after is None else self._after
        # The heads that share keys are further queries of these: nothing of the cache is repeated.
        self.queries = standing[:, : shape.n_heads].view(rows, shape.n_kv_heads, -1, shape.d_head)
        one, n_shared = rows * shape.n_kv_heads, shape.n_heads // shape.n_kv_heads
        self.found = like.new_empty(one, n_shared, shape.d_value)
        self.heads = self.found.view(rows, -1)
        self._asked = self.queries[0] if rows == 1 else like.new_empty(one, n_shared, shape.d_head)
        self.keys = standing[:, shape.n_heads :]
        self.values = values.view(rows, shape.n_kv_heads, shape.d_value)
        if self._after is not None:
            self._halves = [(a, b) for a, b in zip(self._after.chunk(2, -1), self._before.chunk(2, -1), strict=True)]

    @property
    def rows(self) -> int:
        return self.wide.shape[0]

    def asked(self) -> Tensor:
        """The queries, rows and heads of keys in one: (batch · kv_head, heads that share keys, d_head)."""
        if self.rows > 1:
            self._asked.view_as(self.queries).copy_(self.queries)
        return self._asked

    def turn(self, rotation: Rotation) -> None:
        """Queries and keys by their angles, as `Relation.rotate` does."""
        cos, sin = rotation
        (after_first, first), (after_second, second) = self._halves
        torch.mul(self._before, cos, out=self._after)
        after_first.addcmul_(second, sin, value=-1)
        after_second.addcmul_(first, sin)


class BufferedNorm:
    """A norm in as few calls as it takes: torch's own RMSNorm makes eight of them on a CPU."""

    def __init__(self, norm: LayerNorm | RMSNorm) -> None:
        self._weight, self._shape = norm.weight.detach(), tuple(norm.weight.shape)
        self._epsilon = norm.epsilon
        self._is_rms = isinstance(norm, RMSNorm)
        self._bias = norm.bias.detach() if isinstance(norm, LayerNorm) and norm.bias is not None else None
        self._scale_to_unit = self._weight * self._weight.shape[0] ** 0.5

    def __call__(self, x: Tensor, room: DecodeBuffers) -> Tensor:
        """What it gives for the room's own stream is good until the next call."""
        if not self._is_rms:
            return torch.layer_norm(x, self._shape, self._weight, self._bias, self._epsilon)
        if x is not room.stream:
            return F.rms_norm(x, self._shape, self._weight, self._epsilon)
        torch.linalg.vector_norm(room.wide, 2, -1, True, out=room.length)
        return torch.div(x, room.length, out=room.normed).mul_(self._scale_to_unit)
