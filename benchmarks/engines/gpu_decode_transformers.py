"""Run `GPT2LMHeadModel.generate` from Hugging Face with a static KV cache, compiled with CUDA graphs.

The weights are the same as in the other engines.
"""

from typing import Any

import torch

from benchmarks.engines.decode_workload import GenerateFunction
from benchmarks.engines.gpu_decode_workload import Workload, serve_gpu_decoding
from benchmarks.engines.protocol import MissingPeerError
from qkv.models import GPT
from qkv.weights import to_lossless_published_config, to_published_weights


def build(_work: Workload, model: GPT, _options: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    try:
        import transformers
    except ImportError:
        raise MissingPeerError("transformers is not installed (pip install transformers)") from None
    with torch.device("cuda"):
        peer = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**to_lossless_published_config(model.config))
        ).eval()
    missing, unexpected = peer.load_state_dict(to_published_weights(model), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"weights do not match the model: missing {missing}, unexpected {unexpected}")
    peer.tie_weights()

    def prepare(is_timed: bool) -> GenerateFunction:  # noqa: FBT001
        cache_options: dict[str, Any] = {}
        if is_timed:
            peer.to(torch.bfloat16)
            cache_options["cache_implementation"] = "static"

        def run(prompts: list[list[int]], n: int) -> list[list[int]]:
            inputs = torch.tensor(prompts, device="cuda")
            ids = peer.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **cache_options,
            )
            return ids[:, inputs.shape[1] :].tolist()

        return run

    return prepare, {"transformers": transformers.__version__}


if __name__ == "__main__":
    serve_gpu_decoding(build)
