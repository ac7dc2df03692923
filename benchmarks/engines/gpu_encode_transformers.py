"""Run a compiled Hugging Face BERT on a GPU with padded batches.

The option `batch` is the number of texts per batch, and `graphs` enables the torch.compile mode with CUDA graphs.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.gpu_encode_workload import Encoder, Workload, serve_encoding


def build_encoder(workload: Workload, options: dict[str, Any]) -> Encoder:
    import transformers

    model = workload.published().to(workload.device, workload.dtype)
    mode = "reduce-overhead" if options.get("graphs") else None
    run = torch.compile(model, dynamic=False, mode=mode) if options.get("compiled") else model
    batches = _pad_batches(workload, options["batch"])

    def encode() -> list[Tensor]:
        # The next replay of a CUDA graph reuses the output buffer, so users must copy the output, as is done here.
        return [run(ids, attention_mask=attention_mask).last_hidden_state.clone() for ids, attention_mask in batches]

    def means() -> Tensor:
        states = zip(encode(), batches, strict=True)
        sums = [
            (of.float() * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
            for of, (_, attention_mask) in states
        ]
        return torch.cat(sums)

    return Encoder(encode, means, {"transformers": transformers.__version__})


def _pad_batches(workload: Workload, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Pad all texts to the length of the longest text so that one graph can process all batches.

    Return ids and masks on the device, in the order of the texts.
    """
    rows = workload.rows()
    ids = torch.zeros(len(rows), workload.length, dtype=torch.long)
    attention_mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        attention_mask[number, : len(row)] = 1
    pairs = zip(ids.to(workload.device).split(batch), attention_mask.to(workload.device).split(batch), strict=True)
    return list(pairs)


if __name__ == "__main__":
    serve_encoding(build_encoder)
