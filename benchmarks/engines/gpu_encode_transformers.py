"""transformers' BERT on a GPU: padded batches, compiled.

Options: `batch` texts at once; `graphs`: torch.compile's mode with CUDA graphs.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.gpu_encode_work import Encoder, Work, serve_encoding


def built(work: Work, options: dict[str, Any]) -> Encoder:
    import transformers

    model = work.published().to(work.device, work.dtype)
    mode = "reduce-overhead" if options.get("graphs") else None
    run = torch.compile(model, dynamic=False, mode=mode) if options.get("compiled") else model
    batches = _padded(work, options["batch"])

    def encode() -> list[Tensor]:
        # A graph's result lies where the next one's will, so it is taken away as any user must.
        return [run(ids, attention_mask=attention_mask).last_hidden_state.clone() for ids, attention_mask in batches]

    def means() -> Tensor:
        states = zip(encode(), batches, strict=True)
        sums = [
            (of.float() * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True) for of, (_, attention_mask) in states
        ]
        return torch.cat(sums)

    return Encoder(encode, means, {"transformers": transformers.__version__})


def _padded(work: Work, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Ids and masks, on the device; in the order given, all as long as the longest, so that one graph serves all."""
    rows = work.rows()
    ids = torch.zeros(len(rows), work.length, dtype=torch.long)
    attention_mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        attention_mask[number, : len(row)] = 1
    pairs = zip(ids.to(work.device).split(batch), attention_mask.to(work.device).split(batch), strict=True)
    return list(pairs)


if __name__ == "__main__":
    serve_encoding(built)
