"""The same texts and weights for every encoder on a GPU, and how one is served."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines.speaking import Answer, MissingPeerError, Question, Stopwatch, serve


@dataclass(frozen=True, kw_only=True)
class Work:
    """A BERT of random weights, and texts of random ids."""

    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    vocab_size: int
    texts: int
    length: int
    """Of every text, or of the longest."""
    is_mixed: bool
    """Every length from 1 to that of the longest is equally likely: half of a padded batch is padding."""
    device: str
    seed: int = 0

    def rows(self) -> list[list[int]]:
        """Ids of each text."""
        generator = torch.Generator().manual_seed(self.seed)
        lengths = torch.full((self.texts,), self.length)
        if self.is_mixed:
            lengths = torch.randint(1, self.length + 1, (self.texts,), generator=generator)
            lengths[0] = self.length
        ids = torch.randint(self.vocab_size, (self.texts, self.length), generator=generator)
        return [row[:n].tolist() for row, n in zip(ids, lengths.tolist(), strict=True)]

    def published(self) -> nn.Module:
        """transformers' own BERT, whose weights all engines have; in bfloat16 on a GPU."""
        try:
            import transformers
        except ImportError:
            raise MissingPeerError("transformers is not installed (pip install transformers)") from None
        torch.manual_seed(self.seed)
        config = transformers.BertConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.d_model,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            intermediate_size=self.d_ff,
        )
        return transformers.BertModel(config, add_pooling_layer=False).eval()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


@dataclass(frozen=True)
class Encoder:
    encode: Callable[[], list[Tensor]]
    """All texts, as batches of the last states; what the engine needs of the ids is laid ready before."""
    means: Callable[[], Tensor]
    """The mean of each text's states, in the order of the texts."""
    versions: dict[str, str]


def serve_encoding(build: Callable[[Work, dict[str, Any]], Encoder]) -> None:
    state: dict[str, Any] = {}

    def describe(question: Question) -> Answer:
        work = Work(**question["work"])
        built = build(work, question["options"])
        state.update(work=work, built=built)
        return {"versions": {"torch": torch.__version__, **built.versions}}

    @torch.inference_mode()
    def check(_: Question) -> Answer:
        return {"output": nn.functional.normalize(state["built"].means().float(), dim=-1).flatten().tolist()}

    @torch.inference_mode()
    def time(question: Question) -> Answer:
        watch = Stopwatch()
        for _ in range(question["steps"]):
            state["built"].encode()
        if state["work"].device == "cuda":
            torch.cuda.synchronize()
        return watch.read()

    serve({"describe": describe, "check": check, "time": time})
