"""Attention: every query gets a mix of the values, weighted by how well its key fits. eq. 1 of arXiv:1706.03762."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.choices import HeadLayout, Kernel
from qkv.errors import ConfigError, ShapeError
from qkv.nn.cache import LayerCache, SourceCache
from qkv.nn.mask import Mask
from qkv.nn.relation import Relation
from qkv.nn.tap import Tap
from qkv.tensors import HeadResults, Keys, Queries, QueryPositions, Residual, ScoreBias, Scores, Values, Weights


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """One attention, ready to be computed; `scores`, `weights` and `mix` are the plain road, step by step."""

    queries: Queries
    keys: Keys
    values: Values
    scale: float
    mask: Mask | None = None
    bias: ScoreBias | None = None
    query_positions: Int[Tensor, "#text position"] | None = None
    """Where the queries stand in their texts; None: 0, 1, 2 …"""
    n_shared: int = 1
    """How many texts share these keys; the queries are theirs, one text after another."""

    def __post_init__(self) -> None:
        if self.mask is not None:
            batch, n_heads, n_queries, _ = self.queries.shape
            n_keys = self.keys.shape[-2]
            self.mask.check_fits(batch=batch, n_heads=n_heads, n_queries=n_queries, n_keys=n_keys)

    def scores(self) -> Scores:
        """q·k·scale (+ bias), −∞ where the mask forbids a look."""
        scores = self.queries @ self._for_all_heads(self.keys).transpose(-2, -1) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        if self.mask is not None:
            visible = self.mask.visible(scores.shape[-2], scores.shape[-1], scores.device)
            scores = scores.masked_fill(~visible, float("-inf"))
        return scores

    def weights(self) -> Weights:
        return weights_of(self.scores())

    def mix(self, weights: Weights) -> HeadResults:
        return weights.to(self.values.dtype) @ self._for_all_heads(self.values)

    def rows(self, queries: Tensor) -> "Lookup":
        """The same look-up for some queries of each text alone."""
        n = self.queries.shape[-2] // self.n_shared
        starts = torch.arange(0, self.n_shared * n, n, device=queries.device)
        positions = queries[None] if self.query_positions is None else self.query_positions[:, queries]
        queries = (starts[:, None] + queries).flatten()
        mask = self.mask
        if mask is not None:
            visible = mask.visible(self.queries.shape[-2], self.keys.shape[-2], self.queries.device)
            mask = Mask(table=visible if visible.shape[2] == 1 else visible[:, :, queries])
        bias = self.bias if self.bias is None or self.bias.shape[2] == 1 else self.bias[:, :, queries]
        return replace(self, queries=self.queries[:, :, queries], mask=mask, bias=bias, query_positions=positions)

    def standing(self) -> QueryPositions:
        """At which position of its text each query stands."""
        n = self.queries.shape[-2] // self.n_shared
        positions = self.query_positions
        if positions is None:
            positions = torch.arange(n, device=self.queries.device)[None]
        n_texts = self.queries.shape[0] * self.n_shared
        return positions.expand(n_texts, n).reshape(self.queries.shape[0], -1)

    def of_each_text(
        self, results: Float[Tensor, "batch head query width"]
    ) -> Float[Tensor, "text head position width"]:
        """Results of queries of several texts that share keys, one text a row again."""
        if self.n_shared == 1:
            return results
        batch, n_heads, n_all, width = results.shape
        grouped = results.view(batch, n_heads, self.n_shared, n_all // self.n_shared, width).transpose(1, 2)
        return grouped.reshape(batch * self.n_shared, n_heads, n_all // self.n_shared, width)

    def _for_all_heads(self, kv: Tensor) -> Tensor:
        return kv.repeat_interleave(self.queries.shape[1] // kv.shape[1], dim=1)


def weights_of(scores: Scores) -> Weights:
    """Softmax over the keys; a row that may see nothing gets zeros, where softmax alone gives NaN."""
    sees_nothing = (scores == float("-inf")).all(-1, keepdim=True)
    safe = scores.masked_fill(sees_nothing, 0.0)
    return safe.softmax(-1).masked_fill(sees_nothing, 0.0)


def attend_fused(lookup: Lookup, *, dropout: float = 0.0) -> HeadResults:
    """The same as `lookup.mix(lookup.weights())` by torch's fused kernel, which never holds the weights."""
    sees_nothing = bias = None
    n_queries, n_keys = lookup.queries.shape[-2], lookup.keys.shape[-2]
    mask = lookup.mask
    is_causal = mask is not None and mask.table is None and mask.is_causal_alone and n_queries == n_keys
    if is_causal and lookup.bias is None:
        # is_causal of torch's kernel aligns top-left, which is right for a square alone.
        pass
    elif mask is not None:
        is_causal = False
        visible = mask.visible(n_queries, n_keys, lookup.queries.device)
        bias = visible
        if not mask.sees_itself:
            sees_nothing = ~visible.any(-1, keepdim=True)
            bias = visible | sees_nothing
        if lookup.bias is not None:
            bias = lookup.bias.masked_fill(~bias, float("-inf"))
        else:
            bias = bias.expand(-1, -1, n_queries, -1)
    else:
        bias = lookup.bias
    mixed = F.scaled_dot_product_attention(
        lookup.queries,
        lookup.keys,
        lookup.values,
        attn_mask=bias if bias is None or bias.dtype == torch.bool else bias.to(lookup.queries.dtype),
        is_causal=is_causal,
        dropout_p=dropout,
        scale=lookup.scale,
        enable_gqa=lookup.queries.shape[1] != lookup.keys.shape[1],
    )
    return mixed if sees_nothing is None else mixed.masked_fill(sees_nothing, 0.0)


def attend(
    queries: Queries, keys: Keys, values: Values, *, mask: Mask | None = None, kernel: Kernel = Kernel.FUSED
) -> HeadResults:
    """softmax(QKᵀ/√d)V without any weights of its own; keys and values may be one and the same."""
    if queries.shape[-1] != keys.shape[-1] or keys.shape[-2] != values.shape[-2]:
        raise ShapeError(
            f"queries have width {queries.shape[-1]} and keys {keys.shape[-1]}; "
            f"there are {keys.shape[-2]} keys and {values.shape[-2]} values"
        )
    if queries.shape[0] != keys.shape[0] or queries.shape[1] % keys.shape[1]:
        raise ShapeError(
            f"queries have {queries.shape[0]} rows of {queries.shape[1]} heads, keys {keys.shape[0]} of {keys.shape[1]}"
        )
    lookup = Lookup(queries=queries, keys=keys, values=values, scale=queries.shape[-1] ** -0.5, mask=mask)
    return attend_fused(lookup) if kernel is Kernel.FUSED else lookup.mix(lookup.weights())


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How many heads, how wide, and how their results become one vector."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    layout: HeadLayout = HeadLayout.SPLIT

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "d_head", "d_value"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")

    @classmethod
    def split(cls, d_model: int, n_heads: int) -> "Heads":
        """The usual ones: n_heads pieces of d_model / n_heads."""
        if n_heads < 1 or d_model % n_heads:
            raise ConfigError(f"d_model={d_model} must be a multiple of n_heads={n_heads}")
        width = d_model // n_heads
        return cls(n_heads=n_heads, n_kv_heads=n_heads, d_head=width, d_value=width)

    @property
    def d_result(self) -> int:
        """Width of the heads' results together, before the output projection."""
        return self.n_heads * self.d_value if self.layout is HeadLayout.SPLIT else self.d_value


class Attention(nn.Module):
    """Multi-head attention: over its own input (self), or over a source (cross).

    Taps: `queries`, `keys` and `values` as they meet (after rotary positions), `lookup` (all of these with the
    mask), `scores`, `weights`, and `heads`, each head's result before the output projection. Watching any of
    them leaves the fused kernel on, save `scores` and `weights`, which only the plain road has; at these two and
    at `lookup`, rows that share a source are one row.
    """

    def __init__(
        self, d_model: int, heads: Heads, *, bias: bool = True, output_projection: bool = True,
        scale_scores: bool = True, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        if not output_projection and heads.d_result != d_model:
            raise ConfigError(f"without output_projection the heads' width {heads.d_result} must be d_model={d_model}")
        self.d_model = d_model
        self.shape = heads
        self.scale = heads.d_head**-0.5 if scale_scores else 1.0
        self.dropout = dropout
        self.kernel = Kernel.FUSED
        self.query = nn.Linear(d_model, heads.n_heads * heads.d_head, bias=bias)
        self.key = nn.Linear(d_model, heads.n_kv_heads * heads.d_head, bias=bias)
        self.value = nn.Linear(d_model, heads.n_kv_heads * heads.d_value, bias=bias)
        self.output = nn.Linear(heads.d_result, d_model, bias=bias) if output_projection else nn.Identity()
        self.queries, self.keys, self.values = Tap(), Tap(), Tap()
        self.lookup, self.scores, self.weights, self.heads = Tap(), Tap(), Tap(), Tap()

    def forward(
        self,
        x: Residual,
        *,
        source: Float[Tensor, "source_batch key d_model"] | None = None,
        mask: Mask | None = None,
        relation: Relation | None = None,
        cache: LayerCache | SourceCache | None = None,
    ) -> Residual:
        """`source`: what to look at, where it is not x itself. A source batch may serve several rows of x each."""
        self._check(x, source)
        queries = self._heads_of(self.query(x), self.shape.n_heads)
        if relation is not None:
            queries = relation.rotate(queries)
        keys, values = self._keys_and_values(x, source, relation, cache)
        n_shared = queries.shape[0] // keys.shape[0]
        lookup = Lookup(
            queries=_fold(self.queries(queries), n_shared),
            keys=self.keys(keys),
            values=self.values(values),
            scale=self.scale,
            mask=mask,
            bias=None if relation is None else relation.bias,
            query_positions=None if cache is None else cache.query_positions,
            n_shared=n_shared,
        )
        heads = self.heads(lookup.of_each_text(self._mix(self.lookup(lookup))))
        return self.output(self._join(heads))

    def _keys_and_values(
        self,
        x: Tensor,
        source: Tensor | None,
        relation: Relation | None,
        cache: LayerCache | SourceCache | None,
    ) -> tuple[Tensor, Tensor]:
        looked_at = x if source is None else source

        def project() -> tuple[Tensor, Tensor]:
            keys = self._heads_of(self.key(looked_at), self.shape.n_kv_heads)
            values = self._heads_of(self.value(looked_at), self.shape.n_kv_heads)
            return (keys if relation is None else relation.rotate(keys)), values

        match cache:
            case None:
                return project()
            case SourceCache():
                return cache.fetch(project)
            case LayerCache():
                return cache.append(*project())

    def _mix(self, lookup: Lookup) -> HeadResults:
        wants_weights = any(tap.is_changed or tap.is_watched for tap in (self.scores, self.weights))
        dropout = self.dropout if self.training else 0.0
        if self.kernel is Kernel.FUSED and not wants_weights:
            return attend_fused(lookup, dropout=dropout)
        weights = self.weights(weights_of(self.scores(lookup.scores())))
        return lookup.mix(F.dropout(weights, dropout))

    def _heads_of(self, projected: Tensor, n_heads: int) -> Tensor:
        batch, n, _ = projected.shape
        return projected.view(batch, n, n_heads, -1).transpose(1, 2)

    def _join(self, heads: HeadResults) -> Tensor:
        match self.shape.layout:
            case HeadLayout.SPLIT:
                return heads.transpose(1, 2).flatten(2)
            case HeadLayout.POOLED:
                return heads.sum(1)
            case HeadLayout.POOLED_MEAN:
                return heads.mean(1)

    def _check(self, x: Tensor, source: Tensor | None) -> None:
        for name, given in (("x", x), ("source", source)):
            if given is None:
                continue
            if given.shape[-1] != self.d_model:
                raise ShapeError(f"attention of d_model={self.d_model} was given {name} of width {given.shape[-1]}")
            if given.shape[1] == 0:
                raise ShapeError(f"attention was given {name} of 0 positions; there must be at least 1")
        if source is not None and x.shape[0] % source.shape[0]:
            raise ShapeError(f"{x.shape[0]} rows of x cannot share {source.shape[0]} sources evenly")


def _fold(queries: Tensor, n_shared: int) -> Tensor:
    """Rows that share a source become further queries of that source: nothing of the source is copied."""
    if n_shared == 1:
        return queries
    rows, n_heads, n, width = queries.shape
    grouped = queries.view(rows // n_shared, n_shared, n_heads, n, width).transpose(1, 2)
    return grouped.reshape(rows // n_shared, n_heads, n_shared * n, width)


@contextmanager
def using(model: nn.Module, kernel: Kernel) -> Iterator[None]:
    """Every attention of the model takes that road inside the `with`."""
    before = [(part, part.kernel) for part in model.modules() if isinstance(part, Attention)]
    for part, _ in before:
        part.kernel = kernel
    try:
        yield
    finally:
        for part, old in before:
            part.kernel = old
