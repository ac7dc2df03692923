"""Growth: one quantity varies at a time, and memory is the peak of a step."""

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import growth
from qkv.cost import Mode, Workload, count_parameters
from tests.cost.synthetic_calibration import make_calibration

PLAN = growth.SweepPlan(
    d_model=128, n_layers=2, lengths=(7, 13), batches=(1, 3), layers=(1, 2, 5), fixed_size=(3, 11), vocab_size=53
)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(growth, "SWEEPS", {"cpu": PLAN})
    monkeypatch.setattr(growth, "_find_or_create_calibration", lambda *_: make_calibration())
    monkeypatch.setattr(growth, "SECONDS_PER_MEASUREMENT", 0.001)
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def test_one_quantity_varies_at_a_time():
    result = [(varied, config.n_layers, size) for varied, _, config, size in PLAN.points()]
    assert result == [
        ("n, tokens", 2, (1, 7)),
        ("n, tokens", 2, (1, 13)),
        ("batch size, sequences", 2, (1, 11)),
        ("batch size, sequences", 2, (3, 11)),
        ("layers", 1, (3, 11)),
        ("layers", 2, (3, 11)),
        ("layers", 5, (3, 11)),
    ]


@pytest.mark.long
def test_a_table_and_a_plot_are_written(small, tmp_path, capsys):
    assert command.main(["growth", "--out", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 7 * 3
    assert rows[0].startswith("| n 7 | training step | ")
    assert (tmp_path / "growth-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_the_peak_is_at_least_the_weights_and_four_times_the_weights_in_training():
    config, cpu = PLAN.config(2), torch.device("cpu")
    weights = 4 * count_parameters(config).total
    peaks = {
        mode: growth._peak_bytes(
            lambda mode=mode: growth._build_model_step(config, Workload(batch_size=1, seq_len=7, mode=mode), cpu), cpu
        )
        for mode in growth.MODES
    }
    assert weights < peaks[Mode.DECODE] < 1.3 * weights
    assert 4 * weights < peaks[Mode.TRAIN] < 6 * weights
