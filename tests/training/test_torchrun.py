"""Tests for training with several processes (DDP and FSDP)."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from qkv.config import TrainingConfig
from qkv.errors import ConfigError
from qkv.training.distributed import SINGLE_PROCESS, SingleProcess
from tests.timeouts import wait_until
from tests.training import translation_runs
from tests.training.distributed_runs import (
    TRAIN,
    max_difference_relative_to_peak,
    read_metrics,
    run_ranks,
    start_ranks,
    start_torchrun,
    wait_for_step,
    worker_pids,
)
from tests.training.processes import run_command, run_process
from tests.training.runs import recipe, write_text
from tests.training.test_bert import recipe as bert_recipe
from tests.training.test_bert import write_texts

TOLERANCE = 1e-6
TIMEOUT = 240
"""Timeout in seconds, only a guard against hangs."""
RECIPES = {
    "gpt": recipe(batch_size=8, steps=17, ema_decay=0.9, cross_documents=False),
    "bert": bert_recipe(batch_size=8),
    "seq2seq": translation_runs.recipe("seq2seq", batch_size=8, micro_batch_size=2),
    "rnn": translation_runs.recipe("rnn", batch_size=8, micro_batch_size=2),
}


def fake_rank(rank: int, world_size: int) -> SingleProcess:
    """Returns a context with this rank and world size that never communicates."""
    distributed = SingleProcess()
    distributed.rank, distributed.world_size = rank, world_size
    return distributed


@given(n=st.integers(0, 23), world_size=st.integers(1, 7))
def test_every_item_counts_once_and_all_ranks_process_the_same_number(n, world_size):
    items_by_rank = [
        list(fake_rank(rank, world_size).shard_with_uncounted_repeats(range(n))) for rank in range(world_size)
    ]
    assert sorted(item for items in items_by_rank for item, counts in items if counts) == list(range(n))
    assert len({len(items) for items in items_by_rank}) == 1


@given(batch=st.integers(1, 48), data=st.data())
def test_micro_batches_divide_the_batch_and_suffice_for_all_ranks(batch, data):
    world_size = data.draw(st.integers(1, batch))
    micro = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    training = TrainingConfig(steps=1, warmup_steps=0, seq_len=5, batch_size=batch, micro_batch_size=micro)
    rows = fake_rank(0, world_size).shrink_micro_batch_to_fill_ranks(training).micro_batch_size
    assert batch % rows == 0
    assert rows <= micro
    assert batch // rows >= world_size
    assert SINGLE_PROCESS.shrink_micro_batch_to_fill_ranks(training) is training


def test_fine_tuning_with_several_processes_reports_one_error(tmp_path):
    processes = start_ranks(tmp_path, 2, ("finetune", "bert", "--data", "rows.tsv", "--device", "cpu"))
    for process in processes:
        process.join(TIMEOUT)
    assert [process.exitcode for process in processes] == [2, 2]
    (error,) = [line for rank in range(2) for line in (tmp_path / f"err-{rank}").read_text().splitlines()]
    assert re.match(r"qkv: error: .*\bqkv finetune\b.*\b2\b", error)
    assert not (tmp_path / "runs").exists()


def test_a_batch_smaller_than_the_world_size_raises_an_error():
    training = TrainingConfig(steps=1, warmup_steps=0, seq_len=5, batch_size=3)
    with pytest.raises(ConfigError, match=r"batch_size .*\b5\b.*, got 3$"):
        fake_rank(0, 5).shrink_micro_batch_to_fill_ranks(training)


def write_inputs(folder: Path, family: str = "gpt", **training) -> Path:
    settings = RECIPES[family]
    settings = settings.replace(training=settings.training.replace(**training))
    (folder / "a.toml").write_text(settings.to_toml())
    (write_texts if family == "bert" else write_text)(folder / "text.txt")
    translation_runs.write_tsv(folder / "pairs.tsv", translation_runs.reversed_pairs(200, longest=9))
    return folder


def run_single_process(folder: Path, *arguments: str) -> None:
    assert run_process(run_command, str(folder), list(arguments)) == 0, (folder / "err").read_text()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """A GPT trained by one process, in the subfolder `one`."""
    folder = write_inputs(tmp_path_factory.mktemp("uninterrupted"))
    run_single_process(folder, *TRAIN, "one")
    return folder


def runs_agree(first: Path, second: Path) -> bool:
    """Returns True if the metrics of two runs agree, and checks that their final weights do."""
    last = [max((run / "checkpoints").glob("step-*")) / "model.safetensors" for run in (first, second)]
    first_weights, second_weights = map(load_file, last)
    assert first_weights.keys() == second_weights.keys()
    for name, weight in first_weights.items():
        torch.testing.assert_close(weight, second_weights[name], rtol=1e-4, atol=1e-5)
    return max_difference_relative_to_peak(first, second) <= TOLERANCE


def test_two_processes_train_like_one(uninterrupted, tmp_path):
    stderr = run_ranks(write_inputs(tmp_path), 2, (*TRAIN, "run"))
    assert "on each of 2 (ddp)" in stderr
    assert runs_agree(uninterrupted / "one", tmp_path / "run")


def test_fsdp_with_a_single_process_raises_an_error(tmp_path):
    folder = write_inputs(tmp_path)
    assert run_process(run_command, str(folder), [*TRAIN, "run", "--sharding", "fsdp"]) == 2
    assert "error: --sharding fsdp" in (folder / "err").read_text()


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("family", list(RECIPES))
def test_several_processes_train_like_one(tmp_path, family, world_size, sharding):
    folder = write_inputs(tmp_path, family)
    run_single_process(folder, *TRAIN, "one")
    run_ranks(folder, world_size, (*TRAIN, "run", "--sharding", sharding))
    assert runs_agree(folder / "one", folder / "run")


@pytest.mark.long
@pytest.mark.parametrize(
    "shardings", [("ddp", "ddp", None), ("fsdp", "fsdp", None), ("fsdp", "ddp", "fsdp"), ("ddp", "fsdp", None)]
)
def test_a_run_stopped_on_four_ranks_resumes_on_two_and_one(uninterrupted, tmp_path, shardings):
    folder, run = write_inputs(tmp_path), tmp_path / "run"
    agent = start_torchrun(folder, 4, (*TRAIN, "run", "--sharding", shardings[0]), pause_at=5)
    wait_for_step(run, 4)
    agent.send_signal(signal.SIGTERM)
    agent.wait(TIMEOUT)
    stopped = read_metrics(run)[-1]["step"]
    assert stopped < 17
    assert max((run / "checkpoints").iterdir()).name == f"step-{stopped:08d}"
    assert (folder / "output.log").read_text().count(f"qkv: stopped by SIGTERM at step {stopped}") == 1
    again = ("train", "--resume", "run", "--device", "cpu")
    agent = start_torchrun(folder, 2, (*again, "--sharding", shardings[1]))
    wait_for_step(run, min(stopped + 4, 17))
    agent.send_signal(signal.SIGINT)
    agent.wait(TIMEOUT)
    if shardings[2] is None:
        run_single_process(folder, *again)
    else:
        run_ranks(folder, 4, (*again, "--sharding", shardings[2]))
    assert read_metrics(run)[-1]["step"] == 17
    assert runs_agree(uninterrupted / "one", run)


@pytest.mark.long
@pytest.mark.parametrize("killed_rank", [0, 2])
def test_a_killed_process_ends_the_others_and_torchrun_restarts_them(uninterrupted, tmp_path, killed_rank):
    folder, run = write_inputs(tmp_path), tmp_path / "run"
    agent = start_torchrun(folder, 4, (*TRAIN, "run", "--resume-if-exists"), restarts=1, pause_at=8)
    wait_for_step(run, 7)
    first_pids = worker_pids(agent)
    os.kill(first_pids[killed_rank], signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first_pids), "the first workers have ended")
    assert agent.wait(TIMEOUT) == 0, (folder / "output.log").read_text()
    log = (folder / "output.log").read_text()
    assert log.count("qkv: error:") <= 1
    assert re.search(r"^qkv: .*\bstep \d+", log, re.M)
    assert "Traceback" not in log
    assert runs_agree(uninterrupted / "one", run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("signal_number", "reason"), [(signal.SIGKILL, "rank 2|connection"), (signal.SIGSTOP, "rank 2")]
)
def test_a_dead_process_ends_the_others_without_torchrun(tmp_path, signal_number, reason):
    folder = write_inputs(tmp_path, steps=4000)
    processes = start_ranks(folder, 4, (*TRAIN, "run"))
    wait_for_step(folder / "run", 7)
    os.kill(processes[2].pid, signal_number)
    others = [process for process in processes if process is not processes[2]]
    for process in others:
        process.join(TIMEOUT)
    processes[2].kill()
    assert [process.exitcode for process in others] == [1, 1, 1]
    errors = [
        line for rank in (0, 1, 3) for line in (folder / f"err-{rank}").read_text().splitlines() if "error" in line
    ]
    assert len(errors) == 1
    assert any(part in errors[0] for part in reason.split("|"))


@pytest.mark.long
def test_a_non_finite_value_is_reported_once_by_the_rank_that_caused_it(tmp_path):
    processes = start_ranks(
        write_inputs(tmp_path, optimizer="adamw", save_every=2), 3, (*TRAIN, "run"), inject_nan=True
    )
    for process in processes:
        process.join(TIMEOUT)
    assert [process.exitcode for process in processes] == [1, 1, 1]
    errors = [
        line for rank in range(3) for line in (tmp_path / f"err-{rank}").read_text().splitlines() if "error" in line
    ]
    assert len(errors) == 1
    assert re.search(r"step 3: loss nan: .*blocks\.1\.attention\b.* step 2 ", errors[0])
    assert read_metrics(tmp_path / "run")[-1]["step"] == 3


@pytest.mark.long
@pytest.mark.parametrize("setting", ["training.compile=true", "training.lora_rank=2"])
def test_settings_that_fsdp_does_not_support_raise_one_error(tmp_path, setting):
    arguments = ("train", "a.toml", setting, *TRAIN[2:], "run", "--sharding", "fsdp")
    processes = start_ranks(write_inputs(tmp_path, ema_decay=None), 2, arguments)
    for process in processes:
        process.join(TIMEOUT)
    assert [process.exitcode for process in processes] == [2, 2]
    errors = [line for rank in range(2) for line in (tmp_path / f"err-{rank}").read_text().splitlines()]
    name = setting.partition("=")[0].removeprefix("training.")
    (error,) = errors
    assert re.match(rf"qkv: error: --sharding fsdp .*\b{name}\b", error)
