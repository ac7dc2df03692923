"""The benchmark of predicted times writes its files and respects its time limit."""

import itertools
import json
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import cost
from qkv.config import preset
from tests.cost.synthetic_calibration import make_calibration


@pytest.fixture
def two_points(monkeypatch):
    monkeypatch.setattr(cost, "calibrate", lambda *_: make_calibration())
    monkeypatch.setattr(cost, "build_configs", lambda _: {"gpt-nano": preset("gpt-nano")})
    sizes = [("gpt-nano", mode, {"batch_size": 1, "seq_len": 5}) for mode in ("forward", "decode")]
    monkeypatch.setattr(cost, "workload_sizes", lambda _: sizes)
    monkeypatch.setattr(cost, "LONG_CONTEXTS", (17,))
    monkeypatch.setattr(cost, "SECONDS_PER_MEASUREMENT", {"cpu": 0.01})


def test_an_output_folder_gets_the_calibration_and_all_points(two_points, tmp_path, capsys):
    assert command.main(["cost", "--out", str(tmp_path), "--threads", "1"]) == 0
    assert "Mean error of 2 points" in capsys.readouterr().out
    assert json.loads((tmp_path / "cost-calibration.json").read_text()) == make_calibration().model_dump(mode="json")
    result = json.loads((tmp_path / "cost-points.json").read_text())
    assert [point["mode"] for point in result["points"]] == ["forward", "decode"]
    assert [point["workload"]["kernel"] for point in result["long_contexts"]] == ["eager", "fused"]
    for point in (*result["points"], *result["long_contexts"]):
        parts = sum(ms for *_, ms in point["parts"])
        assert parts == pytest.approx(point["predicted_compute_ms"] + point["predicted_recurrence_ms"])
        assert point["config"]["family"] == "gpt"
        assert point["measured_ms"] > 0


def test_an_output_file_gets_only_the_table(two_points, tmp_path):
    command.main(["cost", "--out", str(tmp_path / "table.md"), "--threads", "1"])
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]


def test_no_round_starts_that_would_exceed_the_time_limit(two_points, monkeypatch):
    log = []
    ticks = itertools.count()
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: 10.0 * next(ticks)))
    cost._MeasurementRunner(make_calibration(), cost.torch.device("cpu"), log.append, until=45.0).rounds()
    assert [line for line in log if line.startswith("round")] == ["round 1 of 3", "round 2 of 3"]
