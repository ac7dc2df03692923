"""Compute sentence embeddings in qkv with the library's own batching and with two alternatives."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import qkv
from benchmarks.engines.embed_workload import Embedder, model_folder, serve_embedding
from benchmarks.engines.protocol import EngineRequest
from qkv.tasks import TextEncoder, TokenizedInput, load_as

ROW = 256
"""Number of tokens per packed row, which is the length of the longest sentence that the model supports."""
ROWS_AT_ONCE = 4


def build(options: EngineRequest) -> Embedder:
    task = load_as(TextEncoder, model_folder())
    match options.get("batching"):
        case "padded":
            # Batches contain 32 texts in the given order, and each batch is padded to its longest text.
            def embed(texts: list[str]) -> Tensor:
                parts = [task.tokenize(texts[start : start + 32]) for start in range(0, len(texts), 32)]
                return torch.cat([_embed_padded(task, part) for part in parts])

        case "packed":

            def embed(texts: list[str]) -> Tensor:
                return _embed_packed(task, task.tokenize(texts))

        case _:
            embed = task.embed
    return Embedder(embed=embed, versions={"qkv": qkv.__version__})


@torch.no_grad()
def _embed_padded(task: TextEncoder, texts: list[TokenizedInput]) -> Tensor:
    longest = max(len(text.ids) for text in texts)
    ids = torch.tensor([text.ids + [0] * (longest - len(text.ids)) for text in texts])
    attention_mask = torch.tensor([[position < len(text.ids) for position in range(longest)] for text in texts])
    states = task.model(ids, attention_mask=attention_mask)
    return F.normalize((states * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True), dim=-1)


@torch.no_grad()
def _embed_packed(task: TextEncoder, texts: list[TokenizedInput]) -> Tensor:
    sums = torch.zeros(len(texts), task.model.config.d_model)
    rows = list(_packed_rows(texts))
    for start in range(0, len(rows), ROWS_AT_ONCE):
        chunk = rows[start : start + ROWS_AT_ONCE]
        ids = torch.zeros(len(chunk), ROW, dtype=torch.long)
        documents = torch.full((len(chunk), ROW), -1)
        for number, row in enumerate(chunk):
            tokens = torch.tensor([i for index in row for i in texts[index].ids])
            ids[number, : len(tokens)] = tokens
            documents[number, : len(tokens)] = torch.tensor([index for index in row for _ in texts[index].ids])
        states, attention_mask = task.model(ids, documents=documents), documents >= 0
        sums.index_add_(0, documents[attention_mask], states[attention_mask])
    return F.normalize(sums, dim=-1)  # the normalized sum equals the normalized mean


def _packed_rows(texts: list[TokenizedInput]) -> Iterator[list[int]]:
    """Pack sentences into rows and yield the indices of the sentences in each row.

    Sentences are packed longest first, each into the first row with enough space.
    """
    rows: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(texts)), key=lambda index: -len(texts[index].ids)):
        n = len(texts[index].ids)
        for number, (used, row) in enumerate(rows):
            if used + n <= ROW:
                row.append(index)
                rows[number] = used + n, row
                break
        else:
            rows.append((n, [index]))
    yield from (row for _, row in rows)


if __name__ == "__main__":
    serve_embedding(build)
