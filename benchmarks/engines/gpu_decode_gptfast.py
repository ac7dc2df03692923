"""gpt-fast's model with the same weights: static cache, its decoding step compiled with CUDA graphs.

Greedy in place of its sampling, which would cost it more; the rest of the loop is as its generate.py has it.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines import nanogpt
from benchmarks.engines.decode_work import Write
from benchmarks.engines.gpu_decode_work import Work, serve_gpu_decoding
from benchmarks.engines.speaking import MissingPeerError
from qkv.models import GPT
from qkv.nn import Block


def build(work: Work, model: GPT, options: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    clone = Path(options.get("peers") or "", "gpt-fast")
    if not (clone / "model.py").is_file():
        raise MissingPeerError("no clone of gpt-fast (--peers FOLDER names the folder that holds it)")
    sys.path.insert(0, str(clone))
    from model import ModelArgs, Transformer  # type: ignore[import-not-found]

    arguments = ModelArgs(
        block_size=1024, vocab_size=work.vocab_size, n_layer=work.n_layers, n_head=work.n_heads,
        dim=work.d_model, intermediate_size=work.d_ff, norm_eps=model.blocks[0].attention_norm.eps,
    )  # fmt: skip
    with torch.device("cuda"):
        peer = Transformer(arguments).eval()
    _fill(peer, model)

    def prepare(is_timed: bool) -> Write:  # noqa: FBT001
        peer.to(torch.bfloat16 if is_timed else torch.float32)
        with torch.device("cuda"):
            peer.max_seq_length = peer.max_batch_size = -1
            peer.setup_caches(max_batch_size=work.batch, max_seq_length=work.n_prompt + work.long)
        step = _likeliest
        if is_timed:
            torch._inductor.config.coordinate_descent_tuning = True  # noqa: SLF001 - as its generate.py does
            step = torch.compile(_likeliest, mode="reduce-overhead", fullgraph=True)
        return lambda prompts, n: _write(peer, step, prompts, n)

    return prepare, {"gpt-fast": nanogpt.version(clone)}


def _likeliest(peer: Any, ids: Tensor, at: Tensor) -> Tensor:  # noqa: ANN401
    return peer(ids, at)[:, -1].argmax(-1, keepdim=True)


def _write(peer: Any, step: Any, prompts: list[list[int]], n: int) -> list[list[int]]:  # noqa: ANN401
    given = torch.tensor(prompts, device="cuda")
    now = _likeliest(peer, given, torch.arange(given.shape[1], device="cuda"))
    at = torch.tensor([given.shape[1]], device="cuda")
    new = [now]
    for _ in range(n - 1):
        # "Actually better for Inductor to codegen attention here", says its generate.py.
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            now = step(peer, now, at).clone()
        at += 1
        new.append(now)
    return torch.cat(new, 1).tolist()


def _fill(peer: Any, model: GPT) -> None:  # noqa: ANN401
    """Its rotary positions turn neighbours where ours turn halves: rows of queries and keys are put in its order."""
    d_head = model.blocks[0].attention.head_config.d_head
    order = torch.arange(d_head, device="cuda").view(2, -1).T.flatten()

    def turned(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (-1, d_head))[:, order].flatten(0, 1)

    peer.tok_embeddings.weight.copy_(model.embedding.token.weight)
    peer.output.weight.copy_(model.unembedding.weight)
    peer.norm.weight.copy_(model.final_norm.weight)
    for layer, block in zip(peer.layers, model.blocks, strict=True):
        assert isinstance(block, Block)
        attention, feed_forward = block.attention, block.feed_forward
        own = (turned(attention.q_proj.weight), turned(attention.k_proj.weight), attention.v_proj.weight)
        layer.attention.wqkv.weight.copy_(torch.cat(own))
        layer.attention.wo.weight.copy_(attention.out_proj.weight)
        layer.feed_forward.w1.weight.copy_(feed_forward.gate_proj.weight)
        layer.feed_forward.w3.weight.copy_(feed_forward.up_proj.weight)
        layer.feed_forward.w2.weight.copy_(feed_forward.down_proj.weight)
        layer.attention_norm.weight.copy_(block.attention_norm.weight)
        layer.ffn_norm.weight.copy_(block.feed_forward_norm.weight)


if __name__ == "__main__":
    serve_gpu_decoding(build)
