"""`qkv train` in several processes at once: under torchrun, or started here as torchrun would, which is quicker."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.training.processes import start

TRAIN = ("train", "a.toml", "--data", ".", "--device", "cpu", "--out")


def _as_rank(folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    import torch

    from qkv.cli import main
    from qkv.training import heartbeat

    heartbeat.SILENCE = 60.0  # a process that only waits for a core of a loaded machine is not gone
    os.environ |= environment
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = ["qkv", *arguments]
    with (
        Path(f"out-{environment['RANK']}").open("w", buffering=1) as out,
        Path(f"err-{environment['RANK']}").open("w", buffering=1) as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        main()


def _spoilt(folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    """The second process divides by zero in step 3."""
    from qkv.training import Trainer

    plain = Trainer._gradients

    def gradients(trainer, batch, step):
        if step == 3:
            trainer.model.blocks[1].attention.register_forward_hook(lambda _part, _given, output: output / 0)
        return plain(trainer, batch, step)

    if environment["RANK"] == "1":
        Trainer._gradients = gradients
    _as_rank(folder, arguments, environment)


def start_ranks(folder: Path, world: int, arguments, *, is_spoilt: bool = False):
    """Without torchrun's agent: what ends the rest when one dies is ours alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [here | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [start(_spoilt if is_spoilt else _as_rank, str(folder), list(arguments), rank) for rank in ranks]


def run_ranks(folder: Path, world: int, arguments) -> str:
    """To their end, which must be a good one; what the first said."""
    processes = start_ranks(folder, world, arguments)
    for process in processes:
        process.join(240)
    said = [(folder / f"err-{rank}").read_text() for rank in range(world)]
    assert [process.exitcode for process in processes] == [0] * world, said
    assert not any(said[1:])
    return said[0]


def torchrun(
    folder: Path, world: int, arguments, *, restarts: int = 0, pause_at: int | None = None
) -> subprocess.Popen:
    """`pause_at`: before this step every process waits for a signal, unless torchrun has started it again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += ["--max-restarts", str(restarts)]
    command += ["-m", "qkv.cli"] if pause_at is None else [str(Path(__file__).with_name("paused.py")), str(pause_at)]
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            [*command, *arguments], cwd=folder, stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def workers(agent: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if b"train" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def metrics(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for_step(run: Path, step: int) -> None:
    until = time.monotonic() + 240
    while not any(line["step"] >= step for line in metrics(run)):
        assert time.monotonic() < until, f"{run} did not come to step {step}"
        time.sleep(0.01)


def difference(one: Path, other: Path) -> float:
    """The largest relative difference of two runs' numbers; their steps, tokens and order must be the same."""
    pairs = list(zip(metrics(one), metrics(other), strict=True))
    found = 0.0
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"seconds"}:
            if isinstance(mine[name], float):
                found = max(found, abs(mine[name] - theirs[name]) / max(1e-9, abs(mine[name])))
            else:
                assert mine[name] == theirs[name], name
    return found
