"""The line before a run: its time by a share of the matrix rate, or by a calibration of the device."""

import pytest

from qkv.config import preset
from qkv.cost import Mode, Precision, Workload, preflight
from qkv.cost.calibration import fitting_calibration, save_calibration
from qkv.cost.prediction import predict
from qkv.errors import InputError
from tests.cost.calibrations import made_up

RUN = {"batch": 3, "length": 31, "steps": 7, "accumulation": 2, "matmul_rate": 1e9}


def test_a_calibration_gives_the_time_and_is_named():
    plan = preflight(preset("gpt-nano"), **RUN, calibration=made_up())
    work = Workload(batch=3, length=31, mode=Mode.TRAIN, accumulation=2)
    assert plan.seconds == pytest.approx(14 * predict(preset("gpt-nano"), work, made_up()).seconds)
    assert plan.line.endswith("by the calibration of made up")


def test_without_one_the_time_is_a_share_of_the_matrix_rate():
    plan = preflight(preset("gpt-nano"), **RUN)
    assert plan.seconds == pytest.approx(plan.flops / 0.3e9)
    assert plan.line.endswith("at 30 % of 1.0 GFLOP/s")


def test_a_calibration_of_another_precision_is_refused():
    with pytest.raises(InputError, match="for train at mixed, not float32"):
        preflight(preset("gpt-nano"), **RUN, calibration=made_up("cuda", "bfloat16"))


def test_the_newest_calibration_that_fits_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fitting_calibration(Mode.TRAIN, Precision.FLOAT32) is None
    save_calibration(made_up(), tmp_path / "qkv" / "calibration-a.json")
    save_calibration(made_up("cuda", "bfloat16"), tmp_path / "qkv" / "calibration-b.json")
    (tmp_path / "qkv" / "calibration-c.json").write_text("{")
    assert fitting_calibration(Mode.TRAIN, Precision.FLOAT32) == made_up()
    assert fitting_calibration(Mode.TRAIN, Precision.MIXED) == made_up("cuda", "bfloat16")
    assert fitting_calibration(Mode.TRAIN, Precision.FLOAT32, device="h200") is None
