"""The same random Marian model, sources and search for every engine that translates."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.speaking import Answer, Question, Stopwatch, serve
from qkv.choices import Activation, PositionKind, SinusoidStyle
from qkv.config import Seq2SeqConfig
from qkv.models import Seq2Seq

PAD, END = 0, 2
NEVER = -1e4
"""Added to the end token's logit, so that every text has the full length."""


@dataclass(frozen=True, kw_only=True)
class Work:
    n_encoder_layers: int
    n_decoder_layers: int
    n_heads: int
    d_model: int
    vocab_size: int
    batch: int
    source_length: int
    length: int
    n_beams: int
    threads: int
    seed: int = 0

    def model(self) -> Seq2Seq:
        config = Seq2SeqConfig(
            vocab_size=self.vocab_size,
            context_length=256,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_encoder_layers=self.n_encoder_layers,
            n_decoder_layers=self.n_decoder_layers,
            activation=Activation.RELU,
            positions=PositionKind.SINUSOIDAL,
            sinusoid=SinusoidStyle.HALVES,
            unembedding_bias=True,
            tie_embeddings=True,
            init_std=0.07,
        )
        model = Seq2Seq(config, seed=self.seed).eval()
        assert model.unembedding.bias is not None
        with torch.no_grad():
            # Uneven, or a random model with tied tables says one token for ever.
            model.unembedding.bias.copy_(torch.randn(self.vocab_size, generator=self._chance()))
            model.unembedding.bias[[PAD, END]] = NEVER
        return model

    def sources(self) -> Tensor:
        return torch.randint(END + 1, self.vocab_size, (self.batch, self.source_length), generator=self._chance())

    def _chance(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1)


Translate = Callable[[Tensor, int | None], list[list[int]]]
"""Sources and an n that no n-gram may repeat at (None: any may) to the ids of each best text."""


@dataclass(kw_only=True)
class _State:
    work: Work | None = None
    translate: Translate | None = None
    sources: Tensor = field(default_factory=lambda: torch.empty(0))


def serve_translation(build: Callable[[Work, dict[str, Any]], tuple[Translate, dict[str, str]]]) -> None:
    """`build(work, options)`: the engine's own part."""
    state = _State()

    def describe(question: Question) -> Answer:
        work = Work(**question["work"])
        torch.set_num_threads(work.threads)
        state.translate, versions = build(work, question["options"])
        state.sources = work.sources()
        return {"versions": {"torch": torch.__version__, **versions}}

    def check(question: Question) -> Answer:
        """As it is timed; with 2 steps also without repeated bigrams: a random model's repeating itself hides much."""
        assert state.translate is not None
        texts = [text for n in (None, 2)[: question["steps"]] for text in state.translate(state.sources, n)]
        return {"output": [float(number) for text in texts for number in text]}

    def measure(question: Question) -> dict[str, Any]:
        assert state.translate is not None
        watch = Stopwatch()
        for _ in range(question["steps"]):
            state.translate(state.sources, None)
        return watch.read()

    serve({"describe": describe, "check": check, "time": measure})
