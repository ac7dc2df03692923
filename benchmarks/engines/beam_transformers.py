"""Run `MarianMTModel.generate` from Hugging Face with the same weights."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.beam_workload import END, PAD, TranslateFunction, Workload, serve_translation
from benchmarks.engines.protocol import MissingPeerError
from qkv.weights import to_lossless_published_config, to_published_weights


def build(workload: Workload, _: dict[str, Any]) -> tuple[TranslateFunction, dict[str, str]]:
    try:
        import transformers
    except ImportError:
        raise MissingPeerError("transformers is not installed (pip install transformers)") from None
    ours = workload.model()
    settings = to_lossless_published_config(ours.config)
    special = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD, "forced_eos_token_id": None}
    peer = transformers.MarianMTModel(transformers.MarianConfig(**{**settings, **special})).eval()
    missing, unexpected = peer.load_state_dict(to_published_weights(ours), strict=False)
    wanted = [name for name in missing if "embed_positions" not in name and not name.endswith("embed_tokens.weight")]
    if unexpected or [name for name in wanted if name != "lm_head.weight"]:
        raise RuntimeError(f"weights do not match the model: missing {wanted}, unexpected {unexpected}")
    peer.tie_weights()

    @torch.inference_mode()
    def run(sources: Tensor, no_repeat: int | None) -> list[list[int]]:
        ids = peer.generate(
            sources,
            attention_mask=torch.ones_like(sources),
            num_beams=workload.n_beams,
            max_new_tokens=workload.length,
            do_sample=False,
            early_stopping=False,
            length_penalty=1.0,
            no_repeat_ngram_size=no_repeat or 0,
        )
        return ids[:, 1:].tolist()

    return run, {"transformers": transformers.__version__}


if __name__ == "__main__":
    serve_translation(build)
