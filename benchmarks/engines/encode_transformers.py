"""Hugging Face's BertModel with the same weights, texts padded as they come."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.encode_work import Encode, Work, mean, padded, serve_encoding
from benchmarks.engines.speaking import MissingPeerError
from qkv.weights import to_published_config, to_published_weights


def build(work: Work) -> tuple[Encode, dict[str, str]]:
    peer, versions = model(work)

    @torch.inference_mode()
    def encode(texts: list[list[int]]) -> Tensor:
        found = []
        for start in range(0, len(texts), work.batch):
            ids, attention_mask = padded(texts[start : start + work.batch])
            mask = None if bool(attention_mask.all()) else attention_mask
            found.append(mean(peer(ids, attention_mask=mask).last_hidden_state, attention_mask))
        return torch.cat(found)

    return encode, versions


def model(work: Work) -> tuple[Any, dict[str, str]]:
    try:
        import transformers
    except ImportError:
        raise MissingPeerError("transformers is not installed (pip install transformers)") from None
    ours = work.model()
    peer = transformers.BertModel(
        transformers.BertConfig(**to_published_config(ours.config)), add_pooling_layer=False
    ).eval()
    given = {name.removeprefix("bert."): tensor for name, tensor in to_published_weights(ours).items()}
    missing, unexpected = peer.load_state_dict(given, strict=False)
    if missing or unexpected:
        raise RuntimeError(f"weights do not fit: {missing}, {unexpected}")
    return peer, {"transformers": transformers.__version__}


if __name__ == "__main__":
    serve_encoding(build)
