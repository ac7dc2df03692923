"""One look-up, plain and fused: every query gets a mix of the values, by how well its key fits.

eq. 1 of arXiv:1706.03762. The plain road is the specification, the fused one must agree with it.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import Kernel
from qkv.errors import ShapeError
from qkv.nn.compiled import reads_compiled
from qkv.nn.mask import Mask
from qkv.tensors import HeadResults, Keys, Queries, QueryPositions, ScoreBias, Scores, Values, Weights

SHORT = 128
"""Tokens of the longest text that our own kernel takes: more keys are more than one block."""


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
    if dropout == 0.0 and _is_packed_for_gpu(lookup):
        return _attend_packed(lookup)
    sees_nothing = bias = None
    n_queries, n_keys = lookup.queries.shape[-2], lookup.keys.shape[-2]
    mask = lookup.mask
    is_causal = False
    # Asked in an `if`: where torch.compile leaves lengths open, == alone gives a symbol, which the kernel refuses.
    if mask is not None and mask.table is None and mask.is_causal_alone and n_queries == n_keys:
        is_causal = True
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


def _is_packed_for_gpu(lookup: Lookup) -> bool:
    """What torch's kernel for texts of unequal lengths takes: 16-bit numbers, on a GPU, equal widths, no bias."""
    mask, queries = lookup.mask, lookup.queries
    if mask is None or not queries.is_cuda or queries.dtype not in (torch.bfloat16, torch.float16):
        return False
    is_usual = lookup.scale == queries.shape[-1] ** -0.5 and lookup.bias is None
    return is_usual and mask.table is None and mask.is_packed_alone and queries.shape == lookup.values.shape


def _attend_packed(lookup: Lookup) -> HeadResults:
    assert lookup.mask is not None
    packed = lookup.mask.packed
    assert packed is not None
    queries, keys, values = (part[0].transpose(0, 1) for part in (lookup.queries, lookup.keys, lookup.values))
    if packed.longest <= SHORT and queries.shape[-1] in (16, 32, 64, 128) and reads_compiled(queries):
        # Not at the top, neither of them: a CPU needs none, and has no Triton.
        from qkv.nn.short_texts import attend_short

        return attend_short(queries, keys, values, packed.starts, packed.longest).transpose(0, 1)[None]
    from torch.nn.attention.varlen import varlen_attn

    mixed = varlen_attn(queries, keys, values, packed.starts, packed.starts, packed.longest, packed.longest)
    assert isinstance(mixed, Tensor)
    return mixed.transpose(0, 1)[None]


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
