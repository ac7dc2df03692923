"""Several processes train as one does: the same numbers, one voice, one end."""

import os
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
from tests.training import translations
from tests.training.processes import command, run_to_end
from tests.training.runs import recipe, write_text
from tests.training.several import TRAIN, difference, metrics, run_ranks, start_ranks, torchrun, wait_for_step, workers
from tests.training.test_bert import recipe as bert_recipe
from tests.training.test_bert import write_texts
from tests.waiting import wait_until

CLOSE = 1e-6
PATIENCE = 240
"""Seconds; a guard against a hang only."""
RECIPES = {
    "gpt": recipe(batch_size=8, steps=17, ema_decay=0.9, cross_documents=False),
    "bert": bert_recipe(batch_size=8),
    "seq2seq": translations.recipe("seq2seq", batch_size=8, micro_batch_size=2),
    "rnn": translations.recipe("rnn", batch_size=8, micro_batch_size=2),
}


def one_of(rank: int, world: int) -> SingleProcess:
    """Knows its place and nobody."""
    distributed = SingleProcess()
    distributed.rank, distributed.world_size = rank, world
    return distributed


@given(n=st.integers(0, 23), world=st.integers(1, 7))
def test_every_item_counts_once_and_all_do_equally_many(n, world):
    taken = [list(one_of(rank, world).shared(range(n))) for rank in range(world)]
    assert sorted(item for own in taken for item, counts in own if counts) == list(range(n))
    assert len({len(own) for own in taken}) == 1


@given(batch=st.integers(1, 48), data=st.data())
def test_parts_are_small_enough_for_all_and_divide_the_batch(batch, data):
    world = data.draw(st.integers(1, batch))
    micro = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    training = TrainingConfig(steps=1, warmup_steps=0, seq_len=5, batch_size=batch, micro_batch_size=micro)
    rows = one_of(0, world).fitted(training).micro_batch_size
    assert batch % rows == 0
    assert rows <= micro
    assert batch // rows >= world
    assert SINGLE_PROCESS.fitted(training) is training


def test_fine_tuning_by_several_is_refused_by_one_of_them(tmp_path):
    processes = start_ranks(tmp_path, 2, ("finetune", "bert", "--data", "rows.tsv", "--device", "cpu"))
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [2, 2]
    said = "".join((tmp_path / f"err-{rank}").read_text() for rank in range(2))
    assert said == "qkv: error: qkv finetune works in one process, torchrun started 2: leave torchrun out\n"
    assert not (tmp_path / "runs").exists()


def test_a_batch_too_small_to_share_is_refused():
    training = TrainingConfig(steps=1, warmup_steps=0, seq_len=5, batch_size=3)
    with pytest.raises(ConfigError, match="batch_size=3 is too small to be shared by 5 processes"):
        one_of(0, 5).fitted(training)


def place(folder: Path, family: str = "gpt", **training) -> Path:
    chosen = RECIPES[family]
    chosen = chosen.replace(training=chosen.training.replace(**training))
    (folder / "a.toml").write_text(chosen.to_toml())
    (write_texts if family == "bert" else write_text)(folder / "text.txt")
    translations.write_tsv(folder / "pairs.tsv", translations.reversed_pairs(200, longest=9))
    return folder


def alone(folder: Path, *arguments: str) -> None:
    assert run_to_end(command, str(folder), list(arguments)) == 0, (folder / "err").read_text()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """A GPT trained by one process, in `one`."""
    folder = place(tmp_path_factory.mktemp("unbroken"))
    alone(folder, *TRAIN, "one")
    return folder


def the_same(one: Path, other: Path) -> bool:
    """The numbers on the way, and the weights in the end."""
    last = [max((run / "checkpoints").glob("step-*")) / "model.safetensors" for run in (one, other)]
    mine, theirs = map(load_file, last)
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-5)
    return difference(one, other) <= CLOSE


def test_two_processes_train_as_one_does(unbroken, tmp_path):
    said = run_ranks(place(tmp_path), 2, (*TRAIN, "run"))
    assert "on each of 2 (ddp)" in said
    assert the_same(unbroken / "one", tmp_path / "run")


def test_what_fsdp_is_for_is_said_where_there_is_one_process(tmp_path):
    folder = place(tmp_path)
    assert run_to_end(command, str(folder), [*TRAIN, "run", "--sharding", "fsdp"]) == 2
    assert "error: --sharding fsdp is for several processes: torchrun" in (folder / "err").read_text()


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("family", list(RECIPES))
def test_so_many_processes_train_as_one_does(tmp_path, family, world, sharding):
    folder = place(tmp_path, family)
    alone(folder, *TRAIN, "one")
    run_ranks(folder, world, (*TRAIN, "run", "--sharding", sharding))
    assert the_same(folder / "one", folder / "run")


@pytest.mark.long
@pytest.mark.parametrize(
    "roads", [("ddp", "ddp", None), ("fsdp", "fsdp", None), ("fsdp", "ddp", "fsdp"), ("ddp", "fsdp", None)]
)
def test_a_run_stopped_at_four_goes_on_at_two_and_at_one(unbroken, tmp_path, roads):
    folder, run = place(tmp_path), tmp_path / "run"
    agent = torchrun(folder, 4, (*TRAIN, "run", "--sharding", roads[0]), pause_at=5)
    wait_for_step(run, 4)
    agent.send_signal(signal.SIGTERM)
    agent.wait(PATIENCE)
    stopped = metrics(run)[-1]["step"]
    assert stopped < 17
    assert max((run / "checkpoints").iterdir()).name == f"step-{stopped:08d}"
    assert (folder / "said").read_text().count(f"qkv: stopped by SIGTERM at step {stopped}; go on") == 1
    again = ("train", "--resume", "run", "--device", "cpu")
    agent = torchrun(folder, 2, (*again, "--sharding", roads[1]))
    wait_for_step(run, min(stopped + 4, 17))
    agent.send_signal(signal.SIGINT)
    agent.wait(PATIENCE)
    if roads[2] is None:
        alone(folder, *again)
    else:
        run_ranks(folder, 4, (*again, "--sharding", roads[2]))
    assert metrics(run)[-1]["step"] == 17
    assert the_same(unbroken / "one", run)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_ends_the_rest_and_torchrun_starts_them_again(unbroken, tmp_path, victim):
    folder, run = place(tmp_path), tmp_path / "run"
    agent = torchrun(folder, 4, (*TRAIN, "run", "--go-on"), restarts=1, pause_at=8)
    wait_for_step(run, 7)
    first = workers(agent)
    os.kill(first[victim], signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first), "the first workers have ended")
    assert agent.wait(PATIENCE) == 0, (folder / "said").read_text()
    said = (folder / "said").read_text()
    assert said.count("qkv: error:") <= 1
    assert "qkv: going on at step" in said
    assert "Traceback" not in said
    assert the_same(unbroken / "one", run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "broke|no sign"), (signal.SIGSTOP, "rank 2 has given no")]
)
def test_without_torchrun_too_a_dead_process_ends_the_rest(tmp_path, number, why):
    folder = place(tmp_path, steps=4000)
    processes = start_ranks(folder, 4, (*TRAIN, "run"))
    wait_for_step(folder / "run", 7)
    os.kill(processes[2].pid, number)
    rest = [process for process in processes if process is not processes[2]]
    for process in rest:
        process.join(PATIENCE)
    processes[2].kill()
    assert [process.exitcode for process in rest] == [1, 1, 1]
    said = [line for rank in (0, 1, 3) for line in (folder / f"err-{rank}").read_text().splitlines() if "error" in line]
    assert len(said) == 1
    assert any(part in said[0] for part in why.split("|"))


@pytest.mark.long
def test_a_number_that_is_none_is_named_by_whoever_made_it_and_said_once(tmp_path):
    processes = start_ranks(place(tmp_path, optimizer="adamw", save_every=2), 3, (*TRAIN, "run"), is_spoilt=True)
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [1, 1, 1]
    said = [
        line for rank in range(3) for line in (tmp_path / f"err-{rank}").read_text().splitlines() if "error" in line
    ]
    assert len(said) == 1
    assert "step 3: loss nan: the output of blocks.1.attention is not a finite number" in said[0]
    assert "the checkpoint of step 2 is intact" in said[0]
    assert metrics(tmp_path / "run")[-1]["step"] == 3


@pytest.mark.long
@pytest.mark.parametrize("setting", ["training.compile=true", "training.lora_rank=2"])
def test_what_cannot_be_cut_is_refused_in_one_line(tmp_path, setting):
    arguments = ("train", "a.toml", setting, *TRAIN[2:], "run", "--sharding", "fsdp")
    processes = start_ranks(place(tmp_path, ema_decay=None), 2, arguments)
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [2, 2]
    said = [line for rank in range(2) for line in (tmp_path / f"err-{rank}").read_text().splitlines()]
    name = setting.partition("=")[0].removeprefix("training.")
    assert said == [f"qkv: error: --sharding fsdp cannot be used with {name}; --sharding ddp can"]
