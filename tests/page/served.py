"""The shipped model and small ones of the other families, served for the browser: python -m tests.page.served FOLDER.

`long` has room for more than 512 tokens; in FOLDER lie `run`, which has checkpoints, and `gone`, which may be removed.
"""

import sys
from pathlib import Path

from qkv.choices import TokenizerKind
from qkv.serving.explorer import Explorer
from qkv.serving.server import free_port, serve
from qkv.serving.model_registry import ModelRegistry
from tests.serving.explorer_client import tasks
from tests.tasks.small_gpt import saved, small_task
from tests.training.runs import make_ready, trainer_of


def main() -> None:
    folder = Path(sys.argv[1])
    small = {name: task for name, task in tasks().items() if name != "gpt"}
    long = small_task(TokenizerKind.BPE, context=1031)
    long.model.float()
    gone = saved(tasks()["gpt"], folder / "gone")
    prepared = make_ready(folder / "text", steps=4, save_every=2, eval_every=2)
    trainer_of(prepared).train()
    given = ["stories", str(gone), str(prepared.run.path)]
    explorer = Explorer(ModelRegistry(given, memory={**small, "long": long}))
    serve(explorer, port=free_port(8500), browser=False, ready=lambda address: print(address, flush=True))


if __name__ == "__main__":
    main()
