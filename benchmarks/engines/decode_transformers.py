"""Run `GPT2LMHeadModel.generate` from Hugging Face with the same weights."""

from typing import Any

import torch

from benchmarks.engines.decode_workload import GenerateFunction, Workload, serve_decoding
from benchmarks.engines.protocol import MissingPeerError
from qkv.weights import to_lossless_published_config, to_published_weights


def build(workload: Workload, _: dict[str, Any]) -> tuple[GenerateFunction, dict[str, str]]:
    try:
        import transformers
    except ImportError:
        raise MissingPeerError("transformers is not installed (pip install transformers)") from None
    ours = workload.model()
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**to_lossless_published_config(ours.config))).eval()
    missing, unexpected = peer.load_state_dict(to_published_weights(ours), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"weights do not match the model: missing {missing}, unexpected {unexpected}")
    peer.tie_weights()

    @torch.inference_mode()
    def run(prompts: list[list[int]], n: int) -> list[list[int]]:
        inputs = torch.tensor(prompts)
        ids = peer.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return ids[:, inputs.shape[1] :].tolist()

    return run, {"transformers": transformers.__version__}


if __name__ == "__main__":
    serve_decoding(build)
