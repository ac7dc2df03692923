"""Run nanoGPT's train.py with the CPU settings from its README, and compute the held-out loss of the checkpoint."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines import nanogpt
from benchmarks.engines.held_out_loss import held_out_loss, split_to_context_length
from benchmarks.engines.protocol import EngineRequest, EngineResponse, serve, temporary_folder
from benchmarks.engines.subprocess_timer import run_and_time

WINDOW = 64
STEPS = 2000
README_LINE = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 "
    f"--n_head=4 --n_embd=128 --max_iters={STEPS} --lr_decay_iters={STEPS} --dropout=0.0"
)


class NanoGPTRecipe:
    """A training recipe that runs nanoGPT in a temporary folder. The nanoGPT clone is only read."""

    def __init__(self) -> None:
        self.folder = temporary_folder()
        self.request: dict[str, Any] = {}

    def describe(self, request: EngineRequest) -> EngineResponse:
        self.request = request
        folder = nanogpt.find(request["options"]["peers"])
        return {"versions": {"torch": torch.__version__, "nanoGPT": nanogpt.version(folder)}}

    def time(self, request: EngineRequest) -> EngineResponse:  # noqa: ARG002 - the settings determine the number of steps
        folder = nanogpt.find(self.request["options"]["peers"])
        for name in ("configurator.py", "config"):
            (self.folder / name).symlink_to((folder / name).resolve())
        self._write_data()
        command = [sys.executable, "-W", "ignore", str((folder / "train.py").resolve())]
        command += ["config/train_shakespeare_char.py", "--out_dir=out", *README_LINE.split()]
        return {**run_and_time(command, cwd=self.folder), "steps": STEPS}

    def check(self, request: EngineRequest) -> EngineResponse:  # noqa: ARG002
        module = nanogpt.load(nanogpt.find(self.request["options"]["peers"]))
        saved = torch.load(self.folder / "out" / "ckpt.pt", weights_only=True)
        model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
        model.load_state_dict(saved["model"])
        _, held_out, ids_of = self._texts()
        ids = torch.tensor([ids_of[character] for character in held_out])
        # Without targets, nanoGPT returns only the logits of the last position.
        loss = held_out_loss(lambda inputs: model(inputs, inputs)[0], ids, window=WINDOW)
        return {"output": [loss], "parameters": model.get_num_params(non_embedding=False)}

    def _texts(self) -> tuple[str, str, dict[str, int]]:
        train, held_out = split_to_context_length(Path(self.request["workload"]["text"]))
        return train, held_out, {character: i for i, character in enumerate(sorted(set(train + held_out)))}

    def _write_data(self) -> None:
        """Write the same data files that prepare.py of nanoGPT creates."""
        train, held_out, ids_of = self._texts()
        folder = self.folder / "data" / "shakespeare_char"
        folder.mkdir(parents=True)
        for name, text in (("train.bin", train), ("val.bin", held_out)):
            np.array([ids_of[character] for character in text], dtype=np.uint16).tofile(folder / name)
        meta = {"vocab_size": len(ids_of), "stoi": ids_of, "itos": {i: character for character, i in ids_of.items()}}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


if __name__ == "__main__":
    recipe = NanoGPTRecipe()
    serve({"describe": recipe.describe, "time": recipe.time, "check": recipe.check})
