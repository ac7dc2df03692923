"""Our encoder on a GPU: texts one after another in a row, without padding, by a compiled graph."""

from typing import Any

import torch
from torch import Tensor

import qkv
from benchmarks.engines.gpu_encode_work import Encoder, Work, serve_encoding
from qkv.models import BERT, build
from qkv.tasks.packed_encoder import PackedEncoder, pack_by_length
from qkv.weights import config_from_published, load_published_weights


def built(work: Work, options: dict[str, Any]) -> Encoder:
    theirs = work.published()
    tensors = theirs.state_dict()
    model = build(config_from_published(theirs.config.to_dict(), tensors)).eval()  # type: ignore[union-attr,operator]
    assert isinstance(model, BERT)
    load_published_weights(model, tensors)
    reader = PackedEncoder(model.to(work.device, work.dtype), compiled=options.get("compiled", False))
    texts = work.rows()

    def encode() -> list[Tensor]:
        return [reader.encode([texts[place] for place in places]) for places in pack_by_length([len(row) for row in texts])]

    def means() -> Tensor:
        found = torch.zeros(len(texts), work.d_model, device=work.device)
        for places, states in zip(pack_by_length([len(row) for row in texts]), encode(), strict=True):
            lengths = torch.tensor([len(texts[place]) for place in places], device=work.device)
            found[places] = states.float().sum(1) / lengths[:, None]
        return found

    return Encoder(encode, means, {"qkv": qkv.__version__})


if __name__ == "__main__":
    serve_encoding(built)
