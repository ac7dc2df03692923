"""Encoding workload shared by all engines, with a random encoder of MiniLM's shape and random texts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.protocol import ElapsedTimer, EngineRequest, EngineResponse, serve
from qkv.config import BERTConfig
from qkv.models import BERT


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of the encoder and the lengths of the texts."""

    n_texts: int
    shortest: int
    longest: int
    """Maximum number of tokens per text. The lengths are uniformly distributed between `shortest` and `longest`."""
    batch: int
    """Number of texts per batch for engines that pad texts."""
    n_calls: int
    """Number of times that one timing encodes all texts."""
    threads: int
    n_layers: int = 6
    n_heads: int = 12
    d_model: int = 384
    vocab_size: int = 30522
    seed: int = 0

    def model(self) -> BERT:
        config = BERTConfig(
            vocab_size=self.vocab_size,
            context_length=512,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_layers=self.n_layers,
            pooler=False,
        )
        return BERT(config, seed=self.seed).eval()

    def texts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(self.shortest, self.longest + 1, (self.n_texts,), generator=generator).tolist()
        return [torch.randint(5, self.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    @property
    def fill(self) -> float:
        """The fraction of positions in padded batches that contain tokens."""
        lengths = [len(text) for text in self.texts()]
        parts = [lengths[start : start + self.batch] for start in range(0, len(lengths), self.batch)]
        return sum(lengths) / sum(max(part) * len(part) for part in parts)


EncodeFunction = Callable[[list[list[int]]], Tensor]
"""Function that maps the ids of all texts to the mean hidden state of each text."""


def pad_batch(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Pad texts to the same length, and return the ids and the attention mask."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    return ids, torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])


def mean_pool(states: Tensor, attention_mask: Tensor) -> Tensor:
    """Average the hidden states over the tokens of each text."""
    return (states * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


def serve_encoding(build: Callable[[Workload], tuple[EncodeFunction, dict[str, str]]]) -> None:
    """Serve an engine whose `build(workload)` returns an encoding function and the library versions.

    The encoding function receives all texts at once and divides them into batches.
    """
    state: dict[str, Any] = {}

    def describe(request: EngineRequest) -> EngineResponse:
        workload = Workload(**request["workload"])
        torch.set_num_threads(workload.threads)
        encode, versions = build(workload)
        state.update(encode=encode, texts=workload.texts(), n_calls=workload.n_calls)
        return {"versions": {"torch": torch.__version__, **versions}}

    def check(_: EngineRequest) -> EngineResponse:
        return {"output": state["encode"](state["texts"]).flatten().tolist()}

    def measure(_: EngineRequest) -> EngineResponse:
        timer = ElapsedTimer()
        for _call in range(state["n_calls"]):
            state["encode"](state["texts"])
        return timer.elapsed()

    serve({"describe": describe, "check": check, "time": measure})
