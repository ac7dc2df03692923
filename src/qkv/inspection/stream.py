"""The residual stream: how long each token's vector is after every layer, and what each part wrote into it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.choices import Stack
from qkv.inspection.brief import Brief
from qkv.inspection.lens import depth_names, stream_names
from qkv.inspection.maps import through_output
from qkv.inspection.seeing import Seen, attention_of, blocks_of


@dataclass(frozen=True, kw_only=True, repr=False)
class StreamView(Brief):
    """View E: token columns, layer rows; all numbers are Euclidean norms."""

    stack: Stack
    positions: list[str]
    depths: list[str]
    residual: Float[Tensor, "depth position"]
    parts: list[str]
    """`attention`, in a decoder `cross`, `feedforward`."""
    writes: Float[Tensor, "part layer position"]
    head_writes: Float[Tensor, "layer head position"]
    """What each head of the layer's self-attention wrote, without the projection's bias."""


def stream(seen: Seen, stack: Stack | None = None) -> StreamView:
    """`stack`: `encoder` or `decoder` of an encoder–decoder."""
    stack = stack or seen.stacks[0]
    stack = Stack.DECODER if stack is Stack.CROSS else stack
    names = stream_names(seen.model, stack)
    before = names[0].removesuffix("blocks.0.residual_pre")
    parts = ["attention", "cross", "feedforward"] if stack is Stack.DECODER else ["attention", "feedforward"]
    layers = range(len(blocks_of(seen.model, stack)))
    writes = [[seen.stream(f"{before}blocks.{layer}.{part}_write").norm(dim=-1) for layer in layers] for part in parts]
    return StreamView(
        stack=stack, positions=seen.queries(stack), depths=depth_names(len(names)),
        residual=torch.stack([seen.stream(name).norm(dim=-1) for name in names]), parts=parts,
        writes=torch.stack([torch.stack(rows) for rows in writes]),
        head_writes=torch.stack([head_writes(seen, stack, layer).norm(dim=-1) for layer in layers]),
    )  # fmt: skip


@torch.no_grad()
def head_writes(seen: Seen, stack: Stack, layer: int) -> Float[Tensor, "head position d_model"]:
    """What each head adds to the stream, as a vector; with the projection's bias they sum to the write."""
    results = torch.cat([one.heads[0] for one in seen.looks(stack, layer)], dim=1)
    return through_output(attention_of(seen.model, stack, layer), results)
