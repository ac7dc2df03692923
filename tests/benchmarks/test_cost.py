"""The benchmark of predicted times: what it leaves behind, and that it ends in time."""

import itertools
import json
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import cost
from qkv.config import preset
from tests.cost.calibrations import made_up


@pytest.fixture
def two_points(monkeypatch):
    monkeypatch.setattr(cost, "calibrate", lambda *_: made_up())
    monkeypatch.setattr(cost, "models", lambda _: {"gpt-nano": preset("gpt-nano")})
    sizes = [("gpt-nano", mode, {"batch": 1, "length": 5}) for mode in ("forward", "decode")]
    monkeypatch.setattr(cost, "sizes", lambda _: sizes)
    monkeypatch.setattr(cost, "CONTEXTS", (17,))
    monkeypatch.setattr(cost, "SPEND", {"cpu": 0.01})


def test_a_folder_gets_the_calibration_and_every_point_with_its_parts(two_points, tmp_path, capsys):
    assert command.main(["cost", "--out", str(tmp_path), "--threads", "1"]) == 0
    assert "Mean error of 2 points" in capsys.readouterr().out
    assert json.loads((tmp_path / "cost-calibration.json").read_text()) == made_up().model_dump(mode="json")
    found = json.loads((tmp_path / "cost-points.json").read_text())
    assert [one["mode"] for one in found["points"]] == ["forward", "decode"]
    assert [one["work"]["kernel"] for one in found["long_contexts"]] == ["plain", "fused"]
    for one in (*found["points"], *found["long_contexts"]):
        parts = sum(ms for *_, ms in one["parts"])
        assert parts == pytest.approx(one["predicted_computing_ms"] + one["predicted_serial_ms"])
        assert one["config"]["family"] == "gpt"
        assert one["measured_ms"] > 0


def test_a_table_alone_gets_no_files_beside_it(two_points, tmp_path):
    command.main(["cost", "--out", str(tmp_path / "table.md"), "--threads", "1"])
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]


def test_no_round_begins_that_would_end_too_late(two_points, monkeypatch):
    said = []
    ticks = itertools.count()
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: 10.0 * next(ticks)))
    cost._Trials(made_up(), cost.torch.device("cpu"), said.append, until=45.0).rounds()
    assert [line for line in said if line.startswith("round")] == ["round 1 of 3", "round 2 of 3"]
