"""Decoding workload shared by all engines, with a random GPT-2, prompts and greedy decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engines.protocol import ElapsedTimer, EngineRequest, EngineResponse, serve
from qkv.choices import Activation
from qkv.config import GPTConfig
from qkv.models import GPT


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of the model and of the decoding task."""

    n_layers: int
    n_heads: int
    d_model: int
    vocab_size: int
    batch: int
    short: int
    long: int
    """Numbers of new tokens. The time per step is the difference between the two times divided by the difference in
    tokens.
    """
    threads: int
    n_prompt: int = 8
    seed: int = 0

    @property
    def n_weights(self) -> int:
        """The number of weights used in the matmuls of a decoding step."""
        return 12 * self.n_layers * self.d_model**2 + self.vocab_size * self.d_model

    def model(self) -> GPT:
        config = GPTConfig(
            vocab_size=self.vocab_size,
            context_length=256,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_layers=self.n_layers,
            activation=Activation.GELU_TANH,
            # With a small standard deviation, a random model with tied embeddings would repeat one token.
            init_std=0.15,
        )
        model = GPT(config, seed=self.seed).eval()
        with torch.no_grad():
            # Ids in the lower half get logits of 0, which are never the largest. They include end tokens and partial
            # characters in the tokenizers of some peers, which would not output these tokens or would delay them.
            model.embedding.token.weight[: self.vocab_size // 2] = 0.0
        return model

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(0, self.vocab_size, (self.batch, self.n_prompt), generator=generator).tolist()


GenerateFunction = Callable[[list[list[int]], int], list[list[int]]]
"""Function that maps prompts and a number of tokens to exactly this number of new ids for each prompt."""


def seconds_per_step(
    write: GenerateFunction, prompts: list[list[int]], *, lengths: tuple[int, int], times: int
) -> dict[str, float]:
    """Measure the time per decode step by generating two lengths so that the prefill time cancels out.

    The best time for each length counts.
    """
    short, long = lengths
    best: dict[int, dict[str, float]] = {}
    for _ in range(times):
        for n in lengths:
            timer = ElapsedTimer()
            write(prompts, n)
            elapsed = timer.elapsed()
            best[n] = {clock: min(seconds, best.get(n, elapsed)[clock]) for clock, seconds in elapsed.items()}
    return {clock: (best[long][clock] - best[short][clock]) / (long - short) for clock in best[long]}


@dataclass(kw_only=True)
class _State:
    workload: Workload | None = None
    write: GenerateFunction | None = None


def serve_decoding(build: Callable[[Workload, dict[str, Any]], tuple[GenerateFunction, dict[str, str]]]) -> None:
    """Serve an engine whose `build(workload, options)` returns a generation function and the library versions."""
    state = _State()

    def describe(request: EngineRequest) -> EngineResponse:
        state.workload = Workload(**request["workload"])
        torch.set_num_threads(state.workload.threads)
        state.write, versions = build(state.workload, request["options"])
        return {"versions": {"torch": torch.__version__, **versions}}

    def check(_: EngineRequest) -> EngineResponse:
        assert state.workload is not None
        assert state.write is not None
        texts = state.write(state.workload.prompts(), state.workload.long)
        return {"output": [float(number) for text in texts for number in text]}

    def measure(request: EngineRequest) -> dict[str, Any]:
        """Measure the time of a decode step.

        Each length runs twice, and the better time counts because a slow run with the short length would make the
        steps appear too fast.
        """
        workload, write = state.workload, state.write
        assert workload is not None
        assert write is not None
        return seconds_per_step(
            write, workload.prompts(), lengths=(workload.short, workload.long), times=2 * request["steps"]
        )

    serve({"describe": describe, "check": check, "time": measure})
