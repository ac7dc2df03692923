"""GPU encoding workload shared by all engines, with a random BERT and random texts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines.protocol import ElapsedTimer, EngineRequest, EngineResponse, MissingPeerError, serve


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A BERT with random weights and texts with random ids."""

    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    vocab_size: int
    texts: int
    length: int
    """Length of every text or, if the lengths differ, of the longest text."""
    is_mixed: bool
    """Whether lengths are uniformly distributed between 1 and `length`. If so, half of a padded batch is padding."""
    device: str
    seed: int = 0

    def rows(self) -> list[list[int]]:
        """Return the token ids of each text."""
        generator = torch.Generator().manual_seed(self.seed)
        lengths = torch.full((self.texts,), self.length)
        if self.is_mixed:
            lengths = torch.randint(1, self.length + 1, (self.texts,), generator=generator)
            lengths[0] = self.length
        ids = torch.randint(self.vocab_size, (self.texts, self.length), generator=generator)
        return [row[:n].tolist() for row, n in zip(ids, lengths.tolist(), strict=True)]

    def published(self) -> nn.Module:
        """Build the Hugging Face BERT whose weights all engines use. On a GPU, the weights are in bfloat16."""
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
    """The functions of an engine and the versions of its libraries."""

    encode: Callable[[], list[Tensor]]
    """Encodes all texts and returns batches of the last hidden states. Ids are prepared in advance."""
    means: Callable[[], Tensor]
    """Returns the mean hidden state of each text, in the order of the texts."""
    versions: dict[str, str]


def serve_encoding(build: Callable[[Workload, dict[str, Any]], Encoder]) -> None:
    """Serve an engine whose `build(workload, options)` returns an `Encoder`."""
    state: dict[str, Any] = {}

    def describe(request: EngineRequest) -> EngineResponse:
        workload = Workload(**request["workload"])
        built = build(workload, request["options"])
        state.update(workload=workload, built=built)
        return {"versions": {"torch": torch.__version__, **built.versions}}

    @torch.inference_mode()
    def check(_: EngineRequest) -> EngineResponse:
        return {"output": nn.functional.normalize(state["built"].means().float(), dim=-1).flatten().tolist()}

    @torch.inference_mode()
    def time(request: EngineRequest) -> EngineResponse:
        timer = ElapsedTimer()
        for _ in range(request["steps"]):
            state["built"].encode()
        if state["workload"].device == "cuda":
            torch.cuda.synchronize()
        return timer.elapsed()

    serve({"describe": describe, "check": check, "time": time})
