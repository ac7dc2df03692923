"""Run the qkv encoder on a GPU. Texts are packed without padding and encoded by a compiled graph."""

from typing import Any

import torch
from torch import Tensor

import qkv
from benchmarks.engines.gpu_encode_workload import Encoder, Workload, serve_encoding
from qkv.engines import encode_engine
from qkv.models import BERT, build
from qkv.weights import config_from_published, load_published_weights


def build_encoder(workload: Workload, options: dict[str, Any]) -> Encoder:
    published = workload.published()
    tensors = published.state_dict()
    model = build(config_from_published(published.config.to_dict(), tensors)).eval()  # type: ignore[union-attr,operator]
    assert isinstance(model, BERT)
    load_published_weights(model, tensors)
    encoder = encode_engine(model.to(workload.device, workload.dtype), compile=options.get("compiled", False))
    texts = workload.rows()

    def encode() -> list[Tensor]:
        return [
            encoder.encode([texts[index] for index in indices])
            for indices in encoder.group([len(row) for row in texts])
        ]

    def means() -> Tensor:
        result = torch.zeros(len(texts), workload.d_model, device=workload.device)
        for indices, states in zip(encoder.group([len(row) for row in texts]), encode(), strict=True):
            lengths = torch.tensor([len(texts[index]) for index in indices], device=workload.device)
            is_token = torch.arange(states.shape[1], device=workload.device) < lengths[:, None]
            result[indices] = (states.float() * is_token[..., None]).sum(1) / lengths[:, None]
        return result

    return Encoder(encode, means, {"qkv": qkv.__version__})


if __name__ == "__main__":
    serve_encoding(build_encoder)
