"""The same random GPT-2, prompts and greedy decoding for every engine that writes text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engines.speaking import Answer, Question, Stopwatch, serve
from qkv.choices import Activation
from qkv.config import GPTConfig
from qkv.models import GPT


@dataclass(frozen=True, kw_only=True)
class Work:
    n_layers: int
    n_heads: int
    d_model: int
    vocab_size: int
    batch: int
    short: int
    long: int
    """Tokens out: the time of a step is that of the long text less that of the short one, over the difference."""
    threads: int
    n_prompt: int = 8
    seed: int = 0

    @property
    def n_weights(self) -> int:
        """Those that a step multiplies by."""
        return 12 * self.n_layers * self.d_model**2 + self.vocab_size * self.d_model

    def model(self) -> GPT:
        config = GPTConfig(
            vocab_size=self.vocab_size,
            context_length=256,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_layers=self.n_layers,
            activation=Activation.GELU_TANH,
            # Far from even, or a random model with tied tables says one token for ever.
            init_std=0.15,
        )
        model = GPT(config, seed=self.seed).eval()
        with torch.no_grad():
            # Logits of 0 are never the greatest. Among the low ids are ends and parts of characters in a peer's
            # tokenizer, which it would not say, or say late.
            model.embedding.token.weight[: self.vocab_size // 2] = 0.0
        return model

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(0, self.vocab_size, (self.batch, self.n_prompt), generator=generator).tolist()


Write = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts and a number of tokens to the new ids of each; always so many."""


def seconds_a_step(write: Write, prompts: list[list[int]], *, lengths: tuple[int, int], times: int) -> dict[str, float]:
    """By two lengths, so that reading the prompts cancels out; the best of each counts."""
    short, long = lengths
    best: dict[int, dict[str, float]] = {}
    for _ in range(times):
        for n in lengths:
            watch = Stopwatch()
            write(prompts, n)
            took = watch.read()
            best[n] = {what: min(seconds, best.get(n, took)[what]) for what, seconds in took.items()}
    return {what: (best[long][what] - best[short][what]) / (long - short) for what in best[long]}


@dataclass(kw_only=True)
class _State:
    work: Work | None = None
    write: Write | None = None


def serve_decoding(build: Callable[[Work, dict[str, Any]], tuple[Write, dict[str, str]]]) -> None:
    """`build(work, options)`: the engine's own part."""
    state = _State()

    def describe(question: Question) -> Answer:
        state.work = Work(**question["work"])
        torch.set_num_threads(state.work.threads)
        state.write, versions = build(state.work, question["options"])
        return {"versions": {"torch": torch.__version__, **versions}}

    def check(_: Question) -> Answer:
        assert state.work is not None
        assert state.write is not None
        texts = state.write(state.work.prompts(), state.work.long)
        return {"output": [float(number) for text in texts for number in text]}

    def measure(question: Question) -> dict[str, Any]:
        """A step. Each length twice, the better counts: one slow short text would make the steps look fast."""
        work, write = state.work, state.write
        assert work is not None
        assert write is not None
        return seconds_a_step(write, work.prompts(), lengths=(work.short, work.long), times=2 * question["steps"])

    serve({"describe": describe, "check": check, "time": measure})
