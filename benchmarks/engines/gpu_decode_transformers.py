"""Hugging Face's GPT2LMHeadModel.generate with the same weights: static cache, compiled, CUDA graphs."""

from typing import Any

import torch

from benchmarks.engines.decode_work import Write
from benchmarks.engines.gpu_decode_work import Work, serve_gpu_decoding
from benchmarks.engines.speaking import MissingPeerError
from qkv.models import GPT
from qkv.weights import to_published_config, to_published_weights


def build(_work: Work, model: GPT, _options: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    try:
        import transformers
    except ImportError:
        raise MissingPeerError("transformers is not installed (pip install transformers)") from None
    with torch.device("cuda"):
        peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**to_published_config(model.config))).eval()
    missing, unexpected = peer.load_state_dict(to_published_weights(model), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"weights do not fit: {missing}, {unexpected}")
    peer.tie_weights()

    def prepare(is_timed: bool) -> Write:  # noqa: FBT001
        more: dict[str, Any] = {}
        if is_timed:
            peer.to(torch.bfloat16)
            more["cache_implementation"] = "static"

        def run(prompts: list[list[int]], n: int) -> list[list[int]]:
            given = torch.tensor(prompts, device="cuda")
            ids = peer.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=n, min_new_tokens=n, do_sample=False,
                eos_token_id=None, pad_token_id=0, **more,
            )  # fmt: skip
            return ids[:, given.shape[1] :].tolist()

        return run

    return prepare, {"transformers": transformers.__version__}


if __name__ == "__main__":
    serve_gpu_decoding(build)
