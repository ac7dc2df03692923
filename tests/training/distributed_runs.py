"""Run `qkv train` in several processes, with torchrun or with its environment variables (which is faster)."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.training.processes import start_process

TRAIN = ("train", "a.toml", "--data", ".", "--device", "cpu", "--out")


def _run_as_rank(folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    import torch

    from qkv.cli import main
    from qkv.training import torchrun

    torchrun.SILENCE = 60.0  # a process that only waits for a core of a loaded machine is not gone
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


def _run_with_nan_on_rank1(folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Run as a rank. Rank 1 produces NaN in step 3."""
    from qkv.training.step import EagerStep

    original = EagerStep.compute_gradients

    def gradients_with_nan(train_step, batch, step):
        if step == 3:
            train_step.model.blocks[1].attention.register_forward_hook(lambda _module, _inputs, output: output / 0)
        return original(train_step, batch, step)

    if environment["RANK"] == "1":
        EagerStep.compute_gradients = gradients_with_nan
    _run_as_rank(folder, arguments, environment)


def start_ranks(folder: Path, world_size: int, arguments, *, inject_nan: bool = False):
    """Start ranks without the torchrun agent, so that only our code can end the others when one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return [
        start_process(_run_with_nan_on_rank1 if inject_nan else _run_as_rank, str(folder), list(arguments), rank)
        for rank in ranks
    ]


def run_ranks(folder: Path, world_size: int, arguments) -> str:
    """Run all ranks, check that they succeed, and return what rank 0 wrote to stderr."""
    processes = start_ranks(folder, world_size, arguments)
    for process in processes:
        process.join(240)
    errors = [(folder / f"err-{rank}").read_text() for rank in range(world_size)]
    assert [process.exitcode for process in processes] == [0] * world_size, errors
    assert not any(errors[1:])
    return errors[0]


def start_torchrun(
    folder: Path, world_size: int, arguments, *, restarts: int = 0, pause_at: int | None = None
) -> subprocess.Popen:
    """Start torchrun. With `pause_at`, every process waits before this step for a signal, except after a restart."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += ["--max-restarts", str(restarts)]
    command += (
        ["-m", "qkv.cli"] if pause_at is None else [str(Path(__file__).with_name("paused_training.py")), str(pause_at)]
    )
    with (folder / "output.log").open("w") as log:
        return subprocess.Popen(
            [*command, *arguments], cwd=folder, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def worker_pids(agent: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if b"train" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def read_metrics(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while not any(line["step"] >= step for line in read_metrics(run)):
        assert time.monotonic() < deadline, f"{run} did not reach step {step}"
        time.sleep(0.01)


def max_difference_relative_to_peak(first: Path, second: Path) -> float:
    """Returns the largest relative difference between the metrics of two runs. Steps and tokens must be equal."""
    pairs = list(zip(read_metrics(first), read_metrics(second), strict=True))
    largest = 0.0
    for a, b in pairs:
        assert a.keys() == b.keys()
        for name in a.keys() - {"seconds"}:
            if isinstance(a[name], float):
                largest = max(largest, abs(a[name] - b[name]) / max(1e-9, abs(a[name])))
            else:
                assert a[name] == b[name], name
    return largest
