"""Growth: what is varied is varied alone, and bytes are those of the model and its largest moment."""

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import growth
from qkv.cost import Mode, Workload, parameters
from tests.cost.calibrations import made_up

PLAN = growth.Plan(
    d_model=128, n_layers=2, lengths=(7, 13), batches=(1, 3), layers=(1, 2, 5), usual=(3, 11), vocabulary=53
)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(growth, "PLANS", {"cpu": PLAN})
    monkeypatch.setattr(growth, "_calibration", lambda *_: made_up())
    monkeypatch.setattr(growth, "SPEND", 0.001)
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def test_one_thing_is_varied_at_a_time():
    found = [(varied, config.n_layers, size) for varied, _, config, size in PLAN.points()]
    assert found == [
        ("n, tokens", 2, (1, 7)), ("n, tokens", 2, (1, 13)), ("batch, rows", 2, (1, 11)), ("batch, rows", 2, (3, 11)),
        ("layers", 1, (3, 11)), ("layers", 2, (3, 11)), ("layers", 5, (3, 11)),
    ]  # fmt: skip


@pytest.mark.long
def test_a_table_and_one_picture_come_of_it(small, tmp_path, capsys):
    assert command.main(["growth", "--out", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 7 * 3
    assert rows[0].startswith("| n 7 | training step | ")
    assert (tmp_path / "growth-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_holds_at_least_the_weights_and_a_training_step_four_times_them():
    config, cpu = PLAN.config(2), torch.device("cpu")
    own = 4 * parameters(config).total
    held = {
        mode: growth._held(lambda mode=mode: growth._made(config, Workload(batch=1, length=7, mode=mode), cpu), cpu)
        for mode in growth.MODES
    }
    assert own < held[Mode.DECODE] < 1.3 * own
    assert 4 * own < held[Mode.TRAIN] < 6 * own
