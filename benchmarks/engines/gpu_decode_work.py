"""The same random models, prompts and greedy decoding for every engine that writes text on a GPU.

Outputs are compared in float32, where all ids must be equal, and timed in bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engines.decode_work import Write, seconds_a_step
from benchmarks.engines.speaking import Answer, MissingPeerError, Question, serve
from qkv.choices import Activation, NormKind, PositionKind
from qkv.config import GPTConfig
from qkv.models import GPT

CHECKED = 16
"""Tokens that must be equal."""


@dataclass(frozen=True, kw_only=True)
class Work:
    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    vocab_size: int
    is_llama: bool
    """Rotary positions, RMSNorm, a gate, no biases; else GPT-2's."""
    batch: int
    short: int = 8
    long: int = 136
    """Tokens out: the time of a step is that of the long text less that of the short one, over the difference."""
    n_prompt: int = 8
    seed: int = 0

    @property
    def n_weights(self) -> int:
        """Those that a step multiplies by."""
        a_layer = 4 * self.d_model**2 + (3 if self.is_llama else 2) * self.d_model * self.d_ff
        return self.n_layers * a_layer + self.vocab_size * self.d_model

    def model(self) -> GPT:
        common: dict[str, Any] = {
            "vocab_size": self.vocab_size, "context_length": 1024, "d_model": self.d_model,
            "n_heads": self.n_heads, "n_layers": self.n_layers, "d_ff": self.d_ff, "init_std": 0.15,
        }  # fmt: skip
        if self.is_llama:
            config = GPTConfig(
                **common, positions=PositionKind.ROTARY, norm=NormKind.RMS, gated=True, activation=Activation.SILU,
                attention_bias=False, feed_forward_bias=False,
            )  # fmt: skip
        else:
            config = GPTConfig(**common, activation=Activation.GELU_TANH)
        model = GPT(config, seed=self.seed).eval().cuda()
        with torch.no_grad():
            model.embedding.token.weight[: self.vocab_size // 2] = 0.0
        return model.requires_grad_(requires_grad=False)

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(0, self.vocab_size, (self.batch, self.n_prompt), generator=generator).tolist()


Build = Callable[[Work, GPT, dict[str, Any]], tuple[Callable[[bool], Write], dict[str, str]]]
"""What an engine makes of the model: with True the road that is timed (in bfloat16), with False any that is right."""


def serve_gpu_decoding(build: Build) -> None:
    state: dict[str, Any] = {}

    def describe(question: Question) -> Answer:
        if not torch.cuda.is_available():
            raise MissingPeerError("there is no GPU")
        work = Work(**question["work"])
        torch.set_grad_enabled(False)
        prepare, versions = build(work, work.model(), question["options"])
        state.update(work=work, prepare=prepare)
        return {"versions": {"torch": torch.__version__, **versions}}

    def check(_: Question) -> Answer:
        work = state["work"]
        torch.backends.cuda.matmul.allow_tf32 = False
        texts = state["prepare"](False)(work.prompts(), CHECKED)
        write = state["prepare"](True)
        state["write"] = write
        write(work.prompts(), work.long)  # compiles
        return {"output": [float(number) for text in texts for number in text]}

    def measure(question: Question) -> dict[str, Any]:
        work, write = state["work"], state["write"]
        torch.cuda.synchronize()
        # What is written comes back to the CPU, so a text's time ends when the GPU's work does.
        return seconds_a_step(write, work.prompts(), lengths=(work.short, work.long), times=2 * question["steps"])

    serve({"describe": describe, "check": check, "time": measure})
