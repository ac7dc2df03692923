"""Timing tables interpolate and extrapolate measurements, and calibrations are saved and loaded."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import preset
from qkv.cost import calibration
from qkv.cost.calibration import (
    TimingTable,
    TimingTableBuilder,
    default_calibration_path,
    find_newest_calibration,
    list_calibrations,
    load_calibration,
    merge_fastest,
    save_calibration,
)
from qkv.cost.prediction import predict_time
from qkv.cost.workload import Mode, Precision, Workload
from qkv.errors import ConfigError, DiskError, InputError
from tests.cost.synthetic_calibration import make_calibration


def test_grid_points_are_returned_unchanged():
    table = TimingTable(axes=((1, 4, 16), (2, 8)), seconds=(3.0, 5.0, 7.0, 11.0, 13.0, 17.0))
    assert [table.interpolate(x, y) for x in (1, 4, 16) for y in (2, 8)] == pytest.approx([3, 5, 7, 11, 13, 17])


@given(st.floats(1, 4096), st.floats(1, 4096), st.floats(0.1, 3), st.floats(0.1, 3))
def test_interpolation_is_exact_for_power_laws(x, y, p, q):
    axis = (1.0, 8.0, 100.0, 4096.0)
    table = TimingTable(axes=(axis, axis), seconds=tuple(a**p * b**q for a in axis for b in axis))
    assert table.interpolate(x, y) == pytest.approx(x**p * y**q, rel=1e-9)


@given(st.floats(1, 8000), st.floats(1, 8000), st.floats(0.1, 3), st.integers(1, 2))
def test_linear_interpolation_is_exact_for_a_fixed_time_plus_work(x, y, fixed, exponent):
    axis = (1.0, 8.0, 100.0, 4096.0)
    table = TimingTable(
        axes=(axis, axis), exponents=(1, exponent), seconds=tuple(fixed + a * b**exponent for a in axis for b in axis)
    )
    inside = [min(size, axis[-1]) for size in (x, y)]
    growth = max(1, x / axis[-1]) * max(1, y / axis[-1]) ** exponent
    expected = (fixed + inside[0] * inside[1] ** exponent) * growth
    assert table.interpolate_linearly(x, y) == pytest.approx(expected, rel=1e-6)


def test_times_grow_by_the_exponents_above_the_grid_and_are_constant_below_it():
    table = TimingTable(axes=((2.0, 4.0), (10.0, 20.0)), exponents=(1, 2), seconds=(1.0, 2.0, 3.0, 5.0))
    assert table.interpolate(12, 60) == pytest.approx(5 * 3 * 9)
    assert table.interpolate(1, 1) == pytest.approx(1.0)
    assert TimingTable(axes=((7.0,),), exponents=(0,), seconds=(3.0,)).interpolate(10**9) == pytest.approx(3.0)


def test_a_missing_point_is_extrapolated_from_the_cheapest_smaller_point():
    builder = TimingTableBuilder(axes=((1, 2), (1, 10)), exponents=(1, 2))
    builder.measured = {(1, 1): 1.0, (1, 10): 150.0, (2, 1): 5.0}
    assert builder.build().interpolate(2, 10) == pytest.approx(min(150 * 2, 5 * 100))


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"axes": ((1, 2),), "seconds": (1.0,)}, r"\b2 values, got 1$"),
        ({"axes": ((2, 1),), "seconds": (1.0, 2.0)}, "increasing"),
        ({"axes": ((1,),), "seconds": (0.0,)}, r"^seconds.0=0.0: "),
        ({"axes": ((1,),), "seconds": (1.0,), "exponents": (1, 1)}, r"\b1 axes\b.*\b2$"),
    ],
)
def test_an_invalid_table_is_an_error(settings, values):
    with pytest.raises(ConfigError, match=values):
        TimingTable(**settings)


def test_a_saved_calibration_is_loaded_unchanged(tmp_path):
    path = tmp_path / "deep" / "c.json"
    save_calibration(make_calibration(), path)
    assert load_calibration(path) == make_calibration()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{", r"c.json: .*JSON"),
        ("[1]", r"c.json: .*\blist\b"),
        ('{"device": "x"}', r"c.json: .*\bkind\b"),
    ],
)
def test_an_invalid_file_is_named_in_the_error(tmp_path, text, values):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(InputError, match=values):
        load_calibration(path)


def test_an_older_format_is_an_error(tmp_path):
    settings = make_calibration().model_dump(mode="json") | {"format": 1}
    (tmp_path / "c.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"format must be 5, got 1; .*qkv cost calibrate"):
        load_calibration(tmp_path / "c.json")


def test_the_error_for_a_missing_file_names_the_command_that_creates_it(tmp_path):
    with pytest.raises(InputError, match=r"none.json: .*qkv cost calibrate"):
        load_calibration(tmp_path / "none.json")


def test_a_failed_write_is_a_disk_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"c\.json"):
        save_calibration(make_calibration(), tmp_path / "file" / "c.json")


def test_calibrations_are_listed_from_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_calibration_path("NVIDIA H200, 1", Precision.BFLOAT16)
    assert path == tmp_path / "qkv" / "calibration-nvidia-h200-1-bfloat16.json"
    assert list_calibrations() == []
    save_calibration(make_calibration(), path)
    assert list_calibrations() == [path]


@pytest.mark.parametrize(
    ("device", "name", "matches"),
    [
        ("cpu, 2 threads", "cpu, 2 threads", True),
        ("cpu, 2 threads", "cpu, 1 thread", False),
        ("cpu, 2 threads", "cpu", True),
        ("NVIDIA H200", "h200", True),
        ("NVIDIA L40S", "l4", False),
        ("NVIDIA GeForce RTX 4090", "rtx4090", True),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100", False),
    ],
)
def test_a_calibration_matches_full_and_short_device_names(device, name, matches):
    assert make_calibration(device=device).is_for_device(name) == matches


def test_merging_keeps_the_smaller_time_of_each_point():
    table = TimingTable(axes=((1, 2),), seconds=(3.0, 5.0))
    result = merge_fastest({"a": table, "b": table}, {"b": table.replace(seconds=(4.0, 2.0)), "c": table})
    assert {name: table.seconds for name, table in result.items()} == {
        "a": (3.0, 5.0),
        "b": (3.0, 2.0),
        "c": (3.0, 5.0),
    }


@pytest.mark.parametrize(
    ("mode", "dtype", "seq_len", "milliseconds"),
    [(Mode.DECODE, Precision.BFLOAT16, 500, (0.2, 0.32)), (Mode.TRAIN, Precision.MIXED, 300, (15, 30))],
)
def test_the_shipped_calibration_predicts_the_steps_of_gpt2_on_an_h200(
    tmp_path, monkeypatch, mode, dtype, seq_len, milliseconds
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = find_newest_calibration(preset("gpt2"), mode, dtype, device="h200")
    assert shipped is not None
    assert shipped.device_and_date == "NVIDIA H200, 2026-11-19"
    prediction = predict_time(preset("gpt2"), Workload(batch_size=1, mode=mode, dtype=dtype, seq_len=seq_len), shipped)
    assert prediction.backend == "cuda"
    assert milliseconds[0] < 1000 * prediction.seconds < milliseconds[1]


def test_a_shipped_calibration_is_used_only_for_its_device(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "SHIPPED_FOLDER", tmp_path / "shipped")
    shipped = make_calibration("cuda", "bfloat16", device="NVIDIA H200")
    save_calibration(shipped, tmp_path / "shipped" / "calibration-nvidia-h200-bfloat16.json")
    settings = (preset("gpt2"), Mode.DECODE, Precision.BFLOAT16)
    assert find_newest_calibration(*settings, device="h200") == shipped
    assert find_newest_calibration(*settings, device="h100") is None
    assert find_newest_calibration(*settings) is None
    newer = shipped.replace(duration=2.0)
    save_calibration(newer, default_calibration_path(newer.device, newer.dtype))
    assert find_newest_calibration(*settings, device="h200") == newer
