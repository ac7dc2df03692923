"""Run `qkv train recipes/shakespeare-char-cpu.toml` for a given number of CPU seconds and load its best checkpoint."""

import sys
from pathlib import Path
from typing import Any

import torch

import qkv
from benchmarks.engines.held_out_loss import held_out_loss, split_to_context_length
from benchmarks.engines.protocol import EngineRequest, EngineResponse, serve, temporary_folder
from benchmarks.engines.subprocess_timer import run_and_time
from qkv.config import load_recipe
from qkv.models import GPT
from qkv.tasks import load_pretrained

RECIPE = Path(__file__).parents[2] / "recipes" / "shakespeare-char-cpu.toml"
SHORT, LONGER = 10, 60
"""Numbers of steps of two trial runs. The difference between the runs gives the time per step, and the rest of the time
is spent on start-up, evaluation and saving.
"""
TIME_FRACTION = 0.97
"""Fraction of the time budget that is planned, which leaves a margin for steps that are slower than in the trials."""


class OurRecipe:
    """A training recipe that runs qkv in temporary folders."""

    def __init__(self) -> None:
        self.folder = temporary_folder()
        self.request: dict[str, Any] = {}
        self.run = Path()

    def describe(self, request: EngineRequest) -> EngineResponse:
        self.request = request
        return {"versions": {"torch": torch.__version__, "qkv": qkv.__version__}}

    def time(self, request: EngineRequest) -> EngineResponse:
        short, longer = (self._train(steps, seed=0)["cpu"] for steps in (SHORT, LONGER))
        seconds_per_step = (longer - short) / (LONGER - SHORT)
        fixed = short - SHORT * seconds_per_step
        steps = int((TIME_FRACTION * request["cpu_seconds"] - fixed) / seconds_per_step)
        if steps <= LONGER:
            raise RuntimeError(f"{request['cpu_seconds']} CPU seconds allow {steps} steps, expected more than {LONGER}")
        return {**self._train(steps, seed=request["seed"]), "steps": steps}

    def check(self, request: EngineRequest) -> EngineResponse:  # noqa: ARG002
        loaded = load_pretrained(self.run)
        model, tokenizer = loaded.model, loaded.tokenizer
        assert isinstance(model, GPT)
        assert tokenizer is not None
        _, held_out = split_to_context_length(Path(self.request["workload"]["text"]))
        ids = torch.tensor(tokenizer.encode(held_out))
        if len(ids) != len(held_out):
            raise RuntimeError(f"expected one id per character, got {len(ids)} ids for {len(held_out)} characters")
        loss = held_out_loss(model, ids, window=model.config.context_length)
        return {"output": [loss], "parameters": sum(parameter.numel() for parameter in model.parameters())}

    def _train(self, steps: int, *, seed: int) -> dict[str, float]:
        """Train with a single evaluation and a single checkpoint at the end of the run.

        At the end, the learning rate has decayed to 0 and the model is best.
        """
        self.run = self.folder / f"{steps}-{seed}"
        warmup = min(load_recipe(RECIPE).training.warmup_steps, steps)
        command = [sys.executable, "-m", "qkv.cli", "train", str(RECIPE), f"training.steps={steps}"]
        command += [f"training.warmup_steps={warmup}", f"training.eval_every={steps}"]
        command += ["--seed", str(seed), "--out", str(self.run), "--device", "cpu"]
        command += ["--data", str(Path(self.request["workload"]["text"]).parents[1])]
        return run_and_time(command, cwd=self.folder)


if __name__ == "__main__":
    recipe = OurRecipe()
    serve({"describe": recipe.describe, "time": recipe.time, "check": recipe.check})
