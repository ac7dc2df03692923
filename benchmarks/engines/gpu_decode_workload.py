"""GPU decoding workload shared by all engines, with random models, prompts and greedy decoding.

Outputs are compared in float32, where all ids must be equal. Decoding is timed in bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engines.decode_workload import GenerateFunction, seconds_per_step
from benchmarks.engines.protocol import EngineRequest, EngineResponse, MissingPeerError, serve
from qkv.choices import Activation, NormKind, PositionKind
from qkv.config import GPTConfig
from qkv.models import GPT

N_CHECKED_TOKENS = 16
"""Number of generated tokens that must be equal."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of the model and of the decoding task."""

    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    vocab_size: int
    is_llama: bool
    """Whether the model has rotary positions, RMSNorm, a gated feed-forward and no biases. Otherwise, it is a GPT-2."""
    batch: int
    short: int = 8
    long: int = 136
    """Numbers of new tokens. The time per step is the difference between the two times divided by the difference in
    tokens.
    """
    n_prompt: int = 8
    seed: int = 0

    @property
    def n_weights(self) -> int:
        """The number of weights used in the matmuls of a decoding step."""
        weights_per_layer = 4 * self.d_model**2 + (3 if self.is_llama else 2) * self.d_model * self.d_ff
        return self.n_layers * weights_per_layer + self.vocab_size * self.d_model

    def model(self) -> GPT:
        common: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "context_length": 1024,
            "d_model": self.d_model,
            "n_heads": self.n_heads,
            "n_layers": self.n_layers,
            "d_ff": self.d_ff,
            "init_std": 0.15,
        }
        if self.is_llama:
            config = GPTConfig(
                **common,
                positions=PositionKind.ROTARY,
                norm=NormKind.RMS,
                gated=True,
                activation=Activation.SILU,
                attention_bias=False,
                feed_forward_bias=False,
            )
        else:
            config = GPTConfig(**common, activation=Activation.GELU_TANH)
        model = GPT(config, seed=self.seed).eval().cuda()
        with torch.no_grad():
            model.embedding.token.weight[: self.vocab_size // 2] = 0.0
        return model.requires_grad_(requires_grad=False)

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(0, self.vocab_size, (self.batch, self.n_prompt), generator=generator).tolist()


BuildFunction = Callable[[Workload, GPT, dict[str, Any]], tuple[Callable[[bool], GenerateFunction], dict[str, str]]]
"""Function that builds a function that prepares generation. If the argument of the built function is True, generation
runs in bfloat16 for the timing. If it is False, generation runs in float32 for the check.
"""


def serve_gpu_decoding(build: BuildFunction) -> None:
    """Serve an engine whose `build` is a `BuildFunction`."""
    state: dict[str, Any] = {}

    def describe(request: EngineRequest) -> EngineResponse:
        if not torch.cuda.is_available():
            raise MissingPeerError("no GPU is available")
        workload = Workload(**request["workload"])
        torch.set_grad_enabled(False)
        prepare, versions = build(workload, workload.model(), request["options"])
        state.update(workload=workload, prepare=prepare)
        return {"versions": {"torch": torch.__version__, **versions}}

    def check(_: EngineRequest) -> EngineResponse:
        workload = state["workload"]
        torch.backends.cuda.matmul.allow_tf32 = False
        texts = state["prepare"](False)(workload.prompts(), N_CHECKED_TOKENS)
        write = state["prepare"](True)
        state["write"] = write
        write(workload.prompts(), workload.long)  # triggers compilation
        return {"output": [float(number) for text in texts for number in text]}

    def measure(request: EngineRequest) -> dict[str, Any]:
        workload, write = state["workload"], state["write"]
        torch.cuda.synchronize()
        # The ids are copied to the CPU, so the timing includes all GPU work.
        return seconds_per_step(
            write, workload.prompts(), lengths=(workload.short, workload.long), times=2 * request["steps"]
        )

    serve({"describe": describe, "check": check, "time": measure})
