"""Run the qkv encoder with the same batches as `qkv embed`."""

import torch
from torch import Tensor

import qkv
from benchmarks.engines.encode_workload import EncodeFunction, Workload, mean_pool, serve_encoding
from qkv.tasks.batch_encoder import BERTBatchEncoder


def build(workload: Workload) -> tuple[EncodeFunction, dict[str, str]]:
    reader = BERTBatchEncoder(workload.model())

    @torch.no_grad()
    def encode(texts: list[list[int]]) -> Tensor:
        vectors = torch.empty(len(texts), workload.d_model)
        for batch in reader.encode_batches(texts, None):
            vectors[batch.indices] = mean_pool(batch.states, batch.attention_mask)
        return vectors

    return encode, {"qkv": qkv.__version__}


if __name__ == "__main__":
    serve_encoding(build)
