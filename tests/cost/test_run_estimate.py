"""Time of a run from a calibration or from a fraction of the matmul rate."""

import pytest

from qkv.config import preset
from qkv.cost import Mode, Precision, Workload, estimate_run
from qkv.cost.calibration import find_newest_calibration, save_calibration
from qkv.cost.prediction import predict_time
from qkv.errors import InputError
from tests.cost.synthetic_calibration import make_calibration

CONFIG = preset("gpt-nano")
RUN_SETTINGS = {"batch_size": 3, "seq_len": 31, "steps": 7, "accumulation_steps": 2, "matmul_rate": 1e9}


def test_the_time_comes_from_the_calibration():
    run = estimate_run(CONFIG, **RUN_SETTINGS, calibration=make_calibration())
    workload = Workload(batch_size=3, seq_len=31, mode=Mode.TRAIN, accumulation_steps=2)
    assert run.seconds == pytest.approx(14 * predict_time(CONFIG, workload, make_calibration()).seconds)
    assert run.summary.endswith("(eager backend, calibrated on synthetic)")


def test_without_a_calibration_the_time_is_a_fraction_of_the_matmul_rate():
    run = estimate_run(CONFIG, **RUN_SETTINGS)
    assert run.seconds == pytest.approx(run.flops / 0.3e9)
    assert run.summary.endswith("at 30 % of 1.0 GFLOP/s")


def test_a_calibration_in_another_precision_is_an_error():
    with pytest.raises(InputError, match=r"train .*mixed.*float32"):
        estimate_run(CONFIG, **RUN_SETTINGS, calibration=make_calibration("cuda", "bfloat16"))


def test_the_newest_matching_calibration_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_newest_calibration(CONFIG, Mode.TRAIN, Precision.FLOAT32) is None
    save_calibration(make_calibration(), tmp_path / "qkv" / "calibration-a.json")
    save_calibration(make_calibration("cuda", "bfloat16"), tmp_path / "qkv" / "calibration-b.json")
    (tmp_path / "qkv" / "calibration-c.json").write_text("{")
    assert find_newest_calibration(CONFIG, Mode.TRAIN, Precision.FLOAT32) == make_calibration()
    assert find_newest_calibration(CONFIG, Mode.TRAIN, Precision.MIXED) == make_calibration("cuda", "bfloat16")
    assert find_newest_calibration(CONFIG, Mode.TRAIN, Precision.FLOAT32, device="h200") is None


@pytest.mark.parametrize("table", ["layer.train", "gelu.train"])
def test_a_calibration_from_before_a_norm_or_activation_was_added_is_ignored(table, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = CONFIG.replace(norm="layer", activation="gelu")
    calibration = make_calibration()
    tables = {name: timings for name, timings in calibration.tables.items() if name != table}
    save_calibration(calibration.replace(tables=tables), tmp_path / "qkv" / "calibration-a.json")
    messages = []
    assert find_newest_calibration(config, Mode.TRAIN, Precision.FLOAT32, log=messages.append) is None
    assert len(messages) == 1
    assert "calibration-a.json" in messages[0]
    assert table in messages[0]
    assert find_newest_calibration(config, Mode.PREFILL, Precision.FLOAT32, log=messages.append) is not None
    others = config.replace(norm="rms", activation="silu")
    assert find_newest_calibration(others, Mode.TRAIN, Precision.FLOAT32, log=messages.append) is not None
    assert find_newest_calibration(config, Mode.TRAIN, Precision.FLOAT32, device="h200", log=messages.append) is None
    assert len(messages) == 1
