"""Run a Hugging Face BertModel with the same weights. Texts are batched in the given order and padded."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.encode_workload import EncodeFunction, Workload, mean_pool, pad_batch, serve_encoding
from benchmarks.engines.protocol import MissingPeerError
from qkv.weights import to_lossless_published_config, to_published_weights


def build(workload: Workload) -> tuple[EncodeFunction, dict[str, str]]:
    peer, versions = model(workload)

    @torch.inference_mode()
    def encode(texts: list[list[int]]) -> Tensor:
        result = []
        for start in range(0, len(texts), workload.batch):
            ids, attention_mask = pad_batch(texts[start : start + workload.batch])
            mask = None if bool(attention_mask.all()) else attention_mask
            result.append(mean_pool(peer(ids, attention_mask=mask).last_hidden_state, attention_mask))
        return torch.cat(result)

    return encode, versions


def model(workload: Workload) -> tuple[Any, dict[str, str]]:
    try:
        import transformers
    except ImportError:
        raise MissingPeerError("transformers is not installed (pip install transformers)") from None
    ours = workload.model()
    peer = transformers.BertModel(
        transformers.BertConfig(**to_lossless_published_config(ours.config)), add_pooling_layer=False
    ).eval()
    inputs = {name.removeprefix("bert."): tensor for name, tensor in to_published_weights(ours).items()}
    missing, unexpected = peer.load_state_dict(inputs, strict=False)
    if missing or unexpected:
        raise RuntimeError(f"weights do not match the model: missing {missing}, unexpected {unexpected}")
    return peer, {"transformers": transformers.__version__}


if __name__ == "__main__":
    serve_encoding(build)
