"""Our sentence vectors: as the library makes them, and two ways it does not take."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import qkv
from benchmarks.engines.embed_work import Embedder, model_folder, serve_embedding
from benchmarks.engines.speaking import Question
from qkv.tasks import EncodedText, TextEncoder, load_as

ROW = 256
"""Tokens of a packed row: the longest sentence that the model takes."""
ROWS_AT_ONCE = 4


def build(options: Question) -> Embedder:
    task = load_as(TextEncoder, model_folder())
    match options.get("way"):
        case "padded":
            # In the order given, 32 at a time, each batch as long as its longest.
            def embed(texts: list[str]) -> Tensor:
                parts = [task.encode(texts[start : start + 32]) for start in range(0, len(texts), 32)]
                return torch.cat([_padded(task, part) for part in parts])

        case "packed":

            def embed(texts: list[str]) -> Tensor:
                return _packed(task, task.encode(texts))

        case _:
            embed = task.embed
    return Embedder(embed=embed, versions={"qkv": qkv.__version__})


@torch.no_grad()
def _padded(task: TextEncoder, read: list[EncodedText]) -> Tensor:
    longest = max(len(one.ids) for one in read)
    ids = torch.tensor([one.ids + [0] * (longest - len(one.ids)) for one in read])
    attention_mask = torch.tensor([[place < len(one.ids) for place in range(longest)] for one in read])
    states = task.model(ids, attention_mask=attention_mask)
    return F.normalize((states * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True), dim=-1)


@torch.no_grad()
def _packed(task: TextEncoder, read: list[EncodedText]) -> Tensor:
    sums = torch.zeros(len(read), task.model.config.d_model)
    rows = list(_rows(read))
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        ids = torch.zeros(len(some), ROW, dtype=torch.long)
        documents = torch.full((len(some), ROW), -1)
        for number, row in enumerate(some):
            own = torch.tensor([i for place in row for i in read[place].ids])
            ids[number, : len(own)] = own
            documents[number, : len(own)] = torch.tensor([place for place in row for _ in read[place].ids])
        states, attention_mask = task.model(ids, documents=documents), documents >= 0
        sums.index_add_(0, documents[attention_mask], states[attention_mask])
    return F.normalize(sums, dim=-1)  # the mean is the sum, but for its length


def _rows(read: list[EncodedText]) -> Iterator[list[int]]:
    """Places packed into rows, the longest first, each into the first row that has room."""
    rows: list[tuple[int, list[int]]] = []
    for place in sorted(range(len(read)), key=lambda place: -len(read[place].ids)):
        n = len(read[place].ids)
        for number, (used, row) in enumerate(rows):
            if used + n <= ROW:
                row.append(place)
                rows[number] = used + n, row
                break
        else:
            rows.append((n, [place]))
    yield from (row for _, row in rows)


if __name__ == "__main__":
    serve_embedding(build)
