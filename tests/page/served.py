"""Serve the shipped model and small models of all families for the browser tests: python -m tests.page.served FOLDER.

The context of `long` is longer than 512 tokens. FOLDER gets the run folder `text` with
checkpoints, and the model `gone`, which tests may delete.
"""

import sys
from pathlib import Path

from qkv.choices import TokenizerKind
from qkv.serving.explorer import Explorer
from qkv.serving.model_registry import ModelRegistry
from qkv.serving.server import find_next_or_any_free_port, serve
from tests.serving.explorer_client import tasks
from tests.tasks.small_gpt import save_task, small_gpt
from tests.training.runs import build_cpu_trainer, prepare_small_run


def main() -> None:
    folder = Path(sys.argv[1])
    small = {name: task for name, task in tasks().items() if name != "gpt"}
    long = small_gpt(TokenizerKind.BPE, context=1031)
    long.model.float()
    gone = save_task(tasks()["gpt"], folder / "gone")
    prepared = prepare_small_run(folder / "text", steps=4, save_every=2, eval_every=2)
    build_cpu_trainer(prepared).train()
    paths = ["stories", str(gone), str(prepared.run.path)]
    explorer = Explorer(ModelRegistry(paths, memory={**small, "long": long}))
    serve(
        explorer, port=find_next_or_any_free_port(8500), browser=False, ready=lambda address: print(address, flush=True)
    )


if __name__ == "__main__":
    main()
