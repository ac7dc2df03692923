"""nanoGPT's own train.py, by the line its README gives for a CPU, and its checkpoint on the held-out text."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines import nanogpt
from benchmarks.engines.child import run_to_end
from benchmarks.engines.heldout import heldout_loss, split_text
from benchmarks.engines.speaking import Answer, Question, scratch_folder, serve

WINDOW = 64
STEPS = 2000
README_LINE = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 "
    f"--n_head=4 --n_embd=128 --max_iters={STEPS} --lr_decay_iters={STEPS} --dropout=0.0"
)


class NanoGPTRecipe:
    """Works in a folder of its own: the clone is read, never written."""

    def __init__(self) -> None:
        self.place = scratch_folder()
        self.question: dict[str, Any] = {}

    def describe(self, question: Question) -> Answer:
        self.question = question
        folder = nanogpt.find(question["options"]["peers"])
        return {"versions": {"torch": torch.__version__, "nanoGPT": nanogpt.version(folder)}}

    def time(self, question: Question) -> Answer:  # noqa: ARG002 - its recipe says how long it takes
        folder = nanogpt.find(self.question["options"]["peers"])
        for name in ("configurator.py", "config"):
            (self.place / name).symlink_to((folder / name).resolve())
        self._write_data()
        command = [sys.executable, "-W", "ignore", str((folder / "train.py").resolve())]
        command += ["config/train_shakespeare_char.py", "--out_dir=out", *README_LINE.split()]
        return {**run_to_end(command, cwd=self.place), "steps": STEPS}

    def check(self, question: Question) -> Answer:  # noqa: ARG002
        module = nanogpt.load(nanogpt.find(self.question["options"]["peers"]))
        saved = torch.load(self.place / "out" / "ckpt.pt", weights_only=True)
        model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
        model.load_state_dict(saved["model"])
        _, heldout, ids_of = self._texts()
        ids = torch.tensor([ids_of[character] for character in heldout])
        # Without targets it gives the last position's logits alone.
        loss = heldout_loss(lambda given: model(given, given)[0], ids, window=WINDOW)
        return {"output": [loss], "parameters": model.get_num_params(non_embedding=False)}

    def _texts(self) -> tuple[str, str, dict[str, int]]:
        train, heldout = split_text(Path(self.question["work"]["text"]))
        return train, heldout, {character: i for i, character in enumerate(sorted(set(train + heldout)))}

    def _write_data(self) -> None:
        """The files its prepare.py makes."""
        train, heldout, ids_of = self._texts()
        folder = self.place / "data" / "shakespeare_char"
        folder.mkdir(parents=True)
        for name, text in (("train.bin", train), ("val.bin", heldout)):
            np.array([ids_of[character] for character in text], dtype=np.uint16).tofile(folder / name)
        meta = {"vocab_size": len(ids_of), "stoi": ids_of, "itos": {i: character for character, i in ids_of.items()}}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


if __name__ == "__main__":
    recipe = NanoGPTRecipe()
    serve({"describe": recipe.describe, "time": recipe.time, "check": recipe.check})
