"""`qkv train recipes/shakespeare-char-cpu.toml` for a given number of CPU seconds, and its best checkpoint."""

import sys
from pathlib import Path
from typing import Any

import torch

import qkv
from benchmarks.engines.child import run_to_end
from benchmarks.engines.heldout import heldout_loss, split_text
from benchmarks.engines.speaking import Answer, Question, scratch_folder, serve
from qkv.config import load_recipe
from qkv.models import GPT
from qkv.tasks import load_pretrained

RECIPE = Path(__file__).parents[2] / "recipes" / "shakespeare-char-cpu.toml"
SHORT, LONGER = 10, 60
"""Steps of two trial runs: the difference is what steps take, the rest is start-up, evaluation and saving."""
SHARE = 0.97
"""Of the seconds given, so that a step dearer than in the trials does not overrun them."""


class OurRecipe:
    """Every run in a folder that goes away with the process."""

    def __init__(self) -> None:
        self.place = scratch_folder()
        self.question: dict[str, Any] = {}
        self.run = Path()

    def describe(self, question: Question) -> Answer:
        self.question = question
        return {"versions": {"torch": torch.__version__, "qkv": qkv.__version__}}

    def time(self, question: Question) -> Answer:
        short, longer = (self._train(steps, seed=0)["cpu"] for steps in (SHORT, LONGER))
        a_step = (longer - short) / (LONGER - SHORT)
        fixed = short - SHORT * a_step
        steps = int((SHARE * question["cpu_seconds"] - fixed) / a_step)
        if steps <= LONGER:
            raise RuntimeError(f"{question['cpu_seconds']} CPU seconds are enough for {steps} steps only")
        return {**self._train(steps, seed=question["seed"]), "steps": steps}

    def check(self, question: Question) -> Answer:  # noqa: ARG002
        loaded = load_pretrained(self.run)
        model, tokenizer = loaded.model, loaded.tokenizer
        assert isinstance(model, GPT)
        assert tokenizer is not None
        _, heldout = split_text(Path(self.question["work"]["text"]))
        ids = torch.tensor(tokenizer.encode(heldout))
        if len(ids) != len(heldout):
            raise RuntimeError(f"{len(heldout)} characters became {len(ids)} ids")
        loss = heldout_loss(model, ids, window=model.config.context_length)
        return {"output": [loss], "parameters": sum(parameter.numel() for parameter in model.parameters())}

    def _train(self, steps: int, *, seed: int) -> dict[str, float]:
        """Evaluated and saved once, at the end: the learning rate has come down to 0 there, and no state is better."""
        self.run = self.place / f"{steps}-{seed}"
        warmup = min(load_recipe(RECIPE).training.warmup_steps, steps)
        command = [sys.executable, "-m", "qkv.cli", "train", str(RECIPE), f"training.steps={steps}"]
        command += [f"training.warmup_steps={warmup}", f"training.eval_every={steps}"]
        command += ["--seed", str(seed), "--out", str(self.run), "--device", "cpu"]
        command += ["--data", str(Path(self.question["work"]["text"]).parents[1])]
        return run_to_end(command, cwd=self.place)


if __name__ == "__main__":
    recipe = OurRecipe()
    serve({"describe": recipe.describe, "time": recipe.time, "check": recipe.check})
