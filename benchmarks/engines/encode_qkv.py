"""Our encoder, in the batches that `qkv embed` takes."""

import torch
from torch import Tensor

import qkv
from benchmarks.engines.encode_work import Encode, Work, mean, serve_encoding
from qkv.tasks.batch_encoder import BatchEncoder


def build(work: Work) -> tuple[Encode, dict[str, str]]:
    reader = BatchEncoder(work.model())

    @torch.no_grad()
    def encode(texts: list[list[int]]) -> Tensor:
        vectors = torch.empty(len(texts), work.d_model)
        for batch in reader.encode_batches(texts, None):
            vectors[batch.indices] = mean(batch.states, batch.attention_mask)
        return vectors

    return encode, {"qkv": qkv.__version__}


if __name__ == "__main__":
    serve_encoding(build)
