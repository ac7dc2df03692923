"""Which positions may look at which."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import ConfigError, InputError, ShapeError
from qkv.nn.packed import Packed
from qkv.tensors import KeyPositions, Positions, QueryPositions, Visible


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A rule, kept as a rule so that attention can choose the cheapest kernel. `None` in its place: all is visible.

    All parts of the rule must allow a look. True means *may look*, everywhere.
    """

    causal: bool = False
    """A query sees keys at its own position and before."""
    window: int | None = None
    """A query sees keys less than this many positions away."""
    key_padding_mask: Bool[Tensor, "batch key"] | None = None
    """Nobody sees a key where this is False: padding."""
    documents: Int[Tensor, "batch position"] | None = None
    """Packed texts: a query sees keys of the same number alone (self-attention without a cache)."""
    packed: Packed | None = None
    """The same for a single row, told by where each text begins: a GPU needs no table for it."""
    query_positions: QueryPositions | None = None
    """Where the queries stand; None: 0, 1, 2 …"""
    key_positions: KeyPositions | None = None
    sees_itself: bool = False
    """Said by one who knows: every query may see the key at its own position, so none sees nothing."""
    table: Visible | None = None
    """The rule written out, once for all layers; see `written_out`."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1")
        for name, given in (("key_padding_mask", self.key_padding_mask), ("table", self.table)):
            # 0 and 1 as numbers would be added to the scores.
            if given is not None and given.dtype != torch.bool:
                raise InputError(f"the mask's {name} is {given.dtype}, it must be torch.bool: True = may look")

    @property
    def is_causal_alone(self) -> bool:
        """Nothing but the lower triangle, so a kernel may draw it without a table."""
        return (
            self.causal
            and self.window is None
            and self.key_padding_mask is None
            and self.documents is None
            and self.packed is None
            and self.query_positions is None
            and self.key_positions is None
        )

    @property
    def is_packed_alone(self) -> bool:
        """Nothing but texts one after another, in each of which all see all."""
        others = (self.window, self.key_padding_mask, self.documents, self.query_positions, self.key_positions)
        return self.packed is not None and not self.causal and all(other is None for other in others)

    def written_out(self, n_queries: int, n_keys: int, device: torch.device) -> Self:
        """The same rule with its table computed; a pure causal square and a GPU's packed row are left to the kernel."""
        if self.table is not None or (self.is_causal_alone and n_queries == n_keys):
            return self
        if self.is_packed_alone and device.type == "cuda":
            return self
        return replace(self, table=self.visible(n_queries, n_keys, device))

    def visible(self, n_queries: int, n_keys: int, device: torch.device) -> Visible:
        """The table of who sees whom, (batch or 1, 1, queries or 1, keys)."""
        if self.table is not None:
            return self.table
        self._check(n_queries, n_keys)
        seen = torch.ones(1, 1, 1, n_keys, dtype=torch.bool, device=device)
        if self.causal or self.window is not None:
            distance = (
                self._stand(self.query_positions, n_queries, device)[:, None, :, None]
                - (self._stand(self.key_positions, n_keys, device)[:, None, None, :])
            )
            if self.causal:
                seen = seen & (distance >= 0)
            if self.window is not None:
                seen = seen & (distance.abs() < self.window)
        if self.key_padding_mask is not None:
            seen = seen & self.key_padding_mask[:, None, None, :]
        if self.packed is not None:
            numbers = self.packed.numbers(n_keys)
            seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
        if self.documents is not None:
            seen = seen & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        return seen

    def check_fits(self, *, batch: int, n_heads: int, n_queries: int, n_keys: int) -> None:
        """Refuse scores of another shape than the rule is for."""
        if self.table is not None:
            needed = (batch, n_heads, n_queries, n_keys)
            is_fitting = all(has in (1, needs) for has, needs in zip(self.table.shape, needed, strict=True))
            if not is_fitting or self.table.shape[3] != n_keys:
                raise ShapeError(f"the mask's table is {tuple(self.table.shape)}, the scores are {needed}")
            return
        self._check(n_queries, n_keys)
        for name in ("key_padding_mask", "documents", "query_positions", "key_positions"):
            rows = getattr(self, name)
            if rows is not None and rows.shape[0] not in (1, batch):
                raise ShapeError(f"the mask's {name} has {rows.shape[0]} rows, the scores have {batch}")

    @staticmethod
    def _stand(positions: Positions | None, n: int, device: torch.device) -> Positions:
        return torch.arange(n, device=device)[None] if positions is None else positions

    def _check(self, n_queries: int, n_keys: int) -> None:
        if self.key_padding_mask is not None and self.key_padding_mask.shape[1] != n_keys:
            raise ShapeError(f"the mask's key_padding_mask covers {self.key_padding_mask.shape[1]} keys, there are {n_keys}")
        if self.documents is not None and not self.documents.shape[1] == n_queries == n_keys:
            raise ShapeError(
                f"the mask's documents cover {self.documents.shape[1]} positions, "
                f"there are {n_queries} queries and {n_keys} keys"
            )
        if self.causal and self.query_positions is None and n_queries != n_keys:
            raise ShapeError(f"a causal mask over {n_queries} queries and {n_keys} keys needs query_positions")
        for name, given, n in (
            ("query_positions", self.query_positions, n_queries),
            ("key_positions", self.key_positions, n_keys),
        ):
            if given is not None and given.shape[1] != n:
                raise ShapeError(f"the mask's {name} cover {given.shape[1]} positions, there are {n}")


CAUSAL = Mask(causal=True)
