"""Run gpt-fast with the same weights, a static KV cache, and a decode step compiled with CUDA graphs.

Decoding is greedy because sampling would be slower. The rest of the loop follows generate.py of gpt-fast.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines import nanogpt
from benchmarks.engines.decode_workload import GenerateFunction
from benchmarks.engines.gpu_decode_workload import Workload, serve_gpu_decoding
from benchmarks.engines.protocol import MissingPeerError
from qkv.models import GPT
from qkv.nn import Block


def build(workload: Workload, model: GPT, options: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    clone = Path(options.get("peers") or "", "gpt-fast")
    if not (clone / "model.py").is_file():
        raise MissingPeerError("no clone of gpt-fast in the folder of peers (--peers FOLDER)")
    sys.path.insert(0, str(clone))
    from model import ModelArgs, Transformer  # type: ignore[import-not-found]

    arguments = ModelArgs(
        block_size=1024,
        vocab_size=workload.vocab_size,
        n_layer=workload.n_layers,
        n_head=workload.n_heads,
        dim=workload.d_model,
        intermediate_size=workload.d_ff,
        norm_eps=model.blocks[0].attention_norm.eps,
    )
    with torch.device("cuda"):
        peer = Transformer(arguments).eval()
    _load_weights(peer, model)

    def prepare(is_timed: bool) -> GenerateFunction:  # noqa: FBT001
        peer.to(torch.bfloat16 if is_timed else torch.float32)
        with torch.device("cuda"):
            peer.max_seq_length = peer.max_batch_size = -1
            peer.setup_caches(max_batch_size=workload.batch, max_seq_length=workload.n_prompt + workload.long)
        step = _greedy_step
        if is_timed:
            torch._inductor.config.coordinate_descent_tuning = True  # noqa: SLF001 - as in its generate.py
            step = torch.compile(_greedy_step, mode="reduce-overhead", fullgraph=True)
        return lambda prompts, n: _generate(peer, step, prompts, n)

    return prepare, {"gpt-fast": nanogpt.version(clone)}


def _greedy_step(peer: Any, ids: Tensor, position: Tensor) -> Tensor:  # noqa: ANN401
    return peer(ids, position)[:, -1].argmax(-1, keepdim=True)


def _generate(peer: Any, step: Any, prompts: list[list[int]], n: int) -> list[list[int]]:  # noqa: ANN401
    inputs = torch.tensor(prompts, device="cuda")
    next_ids = _greedy_step(peer, inputs, torch.arange(inputs.shape[1], device="cuda"))
    position = torch.tensor([inputs.shape[1]], device="cuda")
    new_ids = [next_ids]
    for _ in range(n - 1):
        # From generate.py of gpt-fast: "Actually better for Inductor to codegen attention here".
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            next_ids = step(peer, next_ids, position).clone()
        position += 1
        new_ids.append(next_ids)
    return torch.cat(new_ids, 1).tolist()


def _load_weights(peer: Any, model: GPT) -> None:  # noqa: ANN401
    """Copy the weights, and reorder the rows of the query and key projections.

    Reordering is necessary because gpt-fast rotates adjacent pairs, whereas qkv rotates halves.
    """
    d_head = model.blocks[0].attention.head_config.d_head
    order = torch.arange(d_head, device="cuda").view(2, -1).T.flatten()

    def reorder_rows(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (-1, d_head))[:, order].flatten(0, 1)

    peer.tok_embeddings.weight.copy_(model.embedding.token.weight)
    peer.output.weight.copy_(model.unembedding.weight)
    peer.norm.weight.copy_(model.final_norm.weight)
    for layer, block in zip(peer.layers, model.blocks, strict=True):
        assert isinstance(block, Block)
        attention, feed_forward = block.attention, block.feed_forward
        qkv_weights = (
            reorder_rows(attention.q_proj.weight),
            reorder_rows(attention.k_proj.weight),
            attention.v_proj.weight,
        )
        layer.attention.wqkv.weight.copy_(torch.cat(qkv_weights))
        layer.attention.wo.weight.copy_(attention.out_proj.weight)
        layer.feed_forward.w1.weight.copy_(feed_forward.gate_proj.weight)
        layer.feed_forward.w3.weight.copy_(feed_forward.up_proj.weight)
        layer.feed_forward.w2.weight.copy_(feed_forward.down_proj.weight)
        layer.attention_norm.weight.copy_(block.attention_norm.weight)
        layer.ffn_norm.weight.copy_(block.feed_forward_norm.weight)


if __name__ == "__main__":
    serve_gpu_decoding(build)
