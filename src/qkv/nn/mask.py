"""Attention masks, represented as rules for causality, sliding windows, padding and packed documents."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import ConfigError, InputError, ShapeError
from qkv.tensors import DenseMask, KeyPositions, QueryPositions


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Rule that determines which keys each query may attend to.

    A query may attend to a key only if every part of the rule allows it. In mask tensors, True always means "may
    attend". If `None` is passed instead of a mask, every key is visible.

    The mask stays a rule until a kernel needs a dense tensor so that attention can choose the cheapest kernel.
    """

    causal: bool = False
    """Whether a query attends only to keys at or before its own position."""
    sliding_window: int | None = None
    """Size of the sliding window. A query attends only to keys that are fewer than this many positions away."""
    key_padding_mask: Bool[Tensor, "batch key"] | None = None
    """Mask that is `False` at padding keys, which are never attended to."""
    documents: Int[Tensor, "batch position"] | None = None
    """Document number of each position. A query attends only to keys of its own document (self-attention without
    a cache)."""
    query_positions: QueryPositions | None = None
    """Positions of the queries. `None` means 0, 1, 2, …"""
    key_positions: KeyPositions | None = None
    """Positions of the keys. `None` means 0, 1, 2, …"""
    no_empty_rows: bool = False
    """Whether the caller guarantees that every query may attend to at least one key."""
    dense: DenseMask | None = None
    """Rule as a boolean tensor, computed once for all layers by `materialize_if_kernel_needs_it`."""

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {self.sliding_window}")
        for name, tensor in (("key_padding_mask", self.key_padding_mask), ("dense", self.dense)):
            # scaled_dot_product_attention would add a mask of 0s and 1s to the scores instead of masking with it.
            if tensor is not None and tensor.dtype != torch.bool:
                raise InputError(f"mask {name} must have dtype torch.bool (True = may attend), got {tensor.dtype}")

    @property
    def is_causal_only(self) -> bool:
        """Whether causality is the only rule, in which case a kernel can apply it without a dense mask."""
        positions = (self.query_positions, self.key_positions)
        other_rules = (self.sliding_window, self.key_padding_mask, self.documents, *positions)
        return self.causal and all(rule is None for rule in other_rules)

    def materialize_if_kernel_needs_it(self, n_queries: int, n_keys: int, device: torch.device) -> Self:
        """Return the mask with `dense` computed, unless it is a square causal mask, which kernels apply directly."""
        if self.dense is not None or (self.is_causal_only and n_queries == n_keys):
            return self
        return replace(self, dense=self.to_dense(n_queries, n_keys, device))

    def to_dense(self, n_queries: int, n_keys: int, device: torch.device) -> DenseMask:
        """Return the mask as a boolean tensor of shape (batch or 1, 1, n_queries or 1, n_keys)."""
        if self.dense is not None:
            return self.dense
        self.check_shapes(n_queries, n_keys)
        visible = torch.ones(1, 1, 1, n_keys, dtype=torch.bool, device=device)
        if self.causal or self.sliding_window is not None:
            queries, keys = self.query_positions, self.key_positions
            queries = torch.arange(n_queries, device=device)[None] if queries is None else queries
            keys = torch.arange(n_keys, device=device)[None] if keys is None else keys
            distance = queries[:, None, :, None] - keys[:, None, None, :]
            if self.causal:
                visible = visible & (distance >= 0)
            if self.sliding_window is not None:
                visible = visible & (distance.abs() < self.sliding_window)
        if self.key_padding_mask is not None:
            visible = visible & self.key_padding_mask[:, None, None, :]
        if self.documents is not None:
            visible = visible & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        return visible

    def check_shapes(
        self, n_queries: int, n_keys: int, *, batch: int | None = None, n_heads: int | None = None
    ) -> None:
        """Raise `ShapeError` if the mask does not fit scores of this shape."""
        if self.dense is not None:
            expected = (batch, n_heads, n_queries, n_keys)
            # An axis of size 1 is broadcast, except that of the keys: the kernels need one entry per key.
            fits = all(size in (1, wanted) for size, wanted in zip(self.dense.shape, expected, strict=True))
            if not fits or self.dense.shape[3] != n_keys:
                raise ShapeError(f"dense mask has shape {tuple(self.dense.shape)}, but the scores have {expected}")
            return
        if self.causal and self.query_positions is None and n_queries != n_keys:
            raise ShapeError(f"a causal mask over {n_queries} queries and {n_keys} keys requires query_positions")
        for name, n in (
            ("key_padding_mask", n_keys),
            ("documents", n_queries),  # queries and keys are the same tokens
            ("documents", n_keys),
            ("query_positions", n_queries),
            ("key_positions", n_keys),
        ):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            fits_batch = batch is None or tensor.shape[0] in (1, batch)
            if tensor.shape[1] != n or not fits_batch:
                raise ShapeError(f"mask {name} has shape {tuple(tensor.shape)}, expected ({batch or 'batch'}, {n})")


CAUSAL = Mask(causal=True)
