"""The benchmark of predicted times writes its files, respects its time limit and can repeat the predictions."""

import itertools
import json
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import cost, cost_cases
from benchmarks.cost_cases import Case
from qkv.config import preset
from qkv.cost import Workload
from tests.cost.synthetic_calibration import make_calibration


@pytest.fixture
def two_cases(monkeypatch):
    monkeypatch.setattr(cost, "calibrate", lambda *_: make_calibration())
    cases = [
        Case(model="gpt-nano", config=preset("gpt-nano"), workload=Workload(batch_size=1, seq_len=5, mode=mode))
        for mode in ("forward", "decode")
    ]
    monkeypatch.setattr(cost, "list_cases", lambda *_: cases)
    monkeypatch.setattr(cost_cases, "LONG_CONTEXTS", (17,))
    monkeypatch.setattr(cost, "SECONDS_PER_MEASUREMENT", {"cpu": 0.01})


def test_an_output_folder_gets_the_calibration_and_all_measurements(two_cases, tmp_path, capsys):
    assert command.main(["cost", "--out", str(tmp_path), "--threads", "1"]) == 0
    assert "Mean error of 2 points" in capsys.readouterr().out
    result = json.loads((tmp_path / "cost-measurements-cpu-float32.json").read_text())
    assert result["calibration"] == make_calibration().model_dump(mode="json")
    assert [entry["workload"]["mode"] for entry in result["measurements"]] == ["forward", "decode", *["forward"] * 2]
    assert [entry["backend"] for entry in result["measurements"]] == ["eager", "cpu", "eager", "eager"]
    assert [entry["largest_tensor"] is None for entry in result["measurements"]] == [True, True, False, False]
    assert min(entry["seconds"] for entry in result["measurements"]) > 0


def test_predictions_are_repeated_without_measuring(two_cases, tmp_path, capsys, monkeypatch):
    command.main(["cost", "--out", str(tmp_path / "first"), "--threads", "1"])
    first = capsys.readouterr().out
    assert cost.REFIT_NOTE not in first
    monkeypatch.setattr(cost, "measure_backend_step", lambda *_, **__: pytest.fail("a step was measured"))
    saved = tmp_path / "first" / "cost-measurements-cpu-float32.json"
    command.main(["cost", "--refit", str(saved), "--out", str(tmp_path / "second")])
    second = capsys.readouterr().out
    assert cost.REFIT_NOTE in second
    rows = [[line for line in text.splitlines() if line.startswith("|")] for text in (first, second)]
    assert rows[0] == rows[1]
    assert json.loads((tmp_path / "second" / saved.name).read_text()) == json.loads(saved.read_text())


def test_an_output_file_gets_only_the_table(two_cases, tmp_path):
    command.main(["cost", "--out", str(tmp_path / "table.md"), "--threads", "1"])
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]


def test_no_round_starts_that_would_exceed_the_time_limit(two_cases, monkeypatch):
    log = []
    ticks = itertools.count()
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: 10.0 * next(ticks)))
    monkeypatch.setattr(cost, "MEASURING_SECONDS", {"cpu": 45.0})
    cost._MeasurementRunner(make_calibration(), cost.torch.device("cpu"), log.append).measure_all()
    assert [line for line in log if line.startswith("round")] == ["round 1 of 3", "round 2 of 3"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_cases_cover_every_family_mode_and_shipped_model(kind):
    cases = list(cost_cases.list_cases(kind, cost.Precision.FLOAT32))
    assert {(case.config.family, case.workload.mode.value) for case in cases} >= {
        *(("gpt", mode) for mode in ("prefill", "decode", "forward", "train")),
        *(("bert", mode) for mode in ("forward", "train")),
        *((family, mode) for family in ("seq2seq", "rnn") for mode in ("prefill", "decode", "train")),
    }
    for case in cases:
        case.workload.check_supported_by(case.config)
    assert {"stories", "bert", "sentiment", "es-en", "es-en-rnn", "gpt2"} <= {case.model for case in cases}
