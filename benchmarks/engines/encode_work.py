"""The same random encoder of MiniLM's shape and the same texts for every engine that reads whole texts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.speaking import Answer, Question, Stopwatch, serve
from qkv.config import BERTConfig
from qkv.models import BERT


@dataclass(frozen=True, kw_only=True)
class Work:
    n_texts: int
    shortest: int
    longest: int
    """Tokens of a text: any number between, equally likely."""
    batch: int
    """Texts at once, for engines that pad."""
    n_calls: int
    """All texts so many times in one timing."""
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
        chance = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(self.shortest, self.longest + 1, (self.n_texts,), generator=chance).tolist()
        return [torch.randint(5, self.vocab_size, (n,), generator=chance).tolist() for n in lengths]

    @property
    def fill(self) -> float:
        """Tokens of all that a padding engine computes."""
        lengths = [len(text) for text in self.texts()]
        parts = [lengths[start : start + self.batch] for start in range(0, len(lengths), self.batch)]
        return sum(lengths) / sum(max(part) * len(part) for part in parts)


Encode = Callable[[list[list[int]]], Tensor]
"""Ids of texts to the mean of each text's states."""


def padded(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(ids, 1 where a token stands)."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    return ids, torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])


def mean(states: Tensor, attention_mask: Tensor) -> Tensor:
    return (states * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


def serve_encoding(build: Callable[[Work], tuple[Encode, dict[str, str]]]) -> None:
    """`build(work)`: the engine's own part; it gets all texts at once where `batch` is not for it."""
    state: dict[str, Any] = {}

    def describe(question: Question) -> Answer:
        work = Work(**question["work"])
        torch.set_num_threads(work.threads)
        encode, versions = build(work)
        state.update(encode=encode, texts=work.texts(), n_calls=work.n_calls)
        return {"versions": {"torch": torch.__version__, **versions}}

    def check(_: Question) -> Answer:
        return {"output": state["encode"](state["texts"]).flatten().tolist()}

    def measure(_: Question) -> Answer:
        watch = Stopwatch()
        for _call in range(state["n_calls"]):
            state["encode"](state["texts"])
        return watch.read()

    serve({"describe": describe, "check": check, "time": measure})
