"""Translation workload shared by all engines, with a random Marian model, source texts and beam search settings."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.protocol import ElapsedTimer, EngineRequest, EngineResponse, serve
from qkv.choices import Activation, PositionKind, SinusoidStyle
from qkv.config import Seq2SeqConfig
from qkv.models import Seq2Seq

PAD, END = 0, 2
SUPPRESSED_LOGIT = -1e4
"""Bias of the end token, which suppresses this token so that every translation has the full length."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of the model and of the translation task."""

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
            # Without a random bias, a random model with tied embeddings repeats one token.
            model.unembedding.bias.copy_(torch.randn(self.vocab_size, generator=self._generator()))
            model.unembedding.bias[[PAD, END]] = SUPPRESSED_LOGIT
        return model

    def sources(self) -> Tensor:
        return torch.randint(END + 1, self.vocab_size, (self.batch, self.source_length), generator=self._generator())

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1)


TranslateFunction = Callable[[Tensor, int | None], list[list[int]]]
"""Function that maps source ids and the size of n-grams that must not be repeated (None for no limit) to the ids of the
best translations."""


@dataclass(kw_only=True)
class _State:
    workload: Workload | None = None
    translate: TranslateFunction | None = None
    sources: Tensor = field(default_factory=lambda: torch.empty(0))


def serve_translation(build: Callable[[Workload, dict[str, Any]], tuple[TranslateFunction, dict[str, str]]]) -> None:
    """Serve an engine whose `build(workload, options)` returns a translation function and the library versions."""
    state = _State()

    def describe(request: EngineRequest) -> EngineResponse:
        workload = Workload(**request["workload"])
        torch.set_num_threads(workload.threads)
        state.translate, versions = build(workload, request["options"])
        state.sources = workload.sources()
        return {"versions": {"torch": torch.__version__, **versions}}

    def check(request: EngineRequest) -> EngineResponse:
        """Translate in the same way as for the timing and, if 2 steps are requested, also without repeated bigrams.

        A random model repeats itself, which could hide differences between engines.
        """
        assert state.translate is not None
        texts = [text for n in (None, 2)[: request["steps"]] for text in state.translate(state.sources, n)]
        return {"output": [float(number) for text in texts for number in text]}

    def measure(request: EngineRequest) -> dict[str, Any]:
        assert state.translate is not None
        timer = ElapsedTimer()
        for _ in range(request["steps"]):
            state.translate(state.sources, None)
        return timer.elapsed()

    serve({"describe": describe, "check": check, "time": measure})
