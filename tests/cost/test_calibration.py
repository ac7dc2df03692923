"""What was measured, looked up between and beyond its points; the file it stands in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.cost.calibration import (
    Measured,
    Table,
    default_path,
    known_calibrations,
    least,
    load_calibration,
    save_calibration,
)
from qkv.cost.workload import Precision
from qkv.errors import ConfigError, DiskError, InputError
from tests.cost.calibrations import made_up


def test_a_measured_point_is_given_back_as_it_is():
    table = Table(axes=((1, 4, 16), (2, 8)), seconds=(3.0, 5.0, 7.0, 11.0, 13.0, 17.0))
    assert [table.at(x, y) for x in (1, 4, 16) for y in (2, 8)] == pytest.approx([3, 5, 7, 11, 13, 17])


@given(st.floats(1, 4096), st.floats(1, 4096), st.floats(0.1, 3), st.floats(0.1, 3))
def test_a_power_law_is_met_exactly_between_the_points(x, y, p, q):
    axis = (1.0, 8.0, 100.0, 4096.0)
    table = Table(axes=(axis, axis), seconds=tuple(a**p * b**q for a in axis for b in axis))
    assert table.at(x, y) == pytest.approx(x**p * y**q, rel=1e-9)


def test_beyond_the_grid_seconds_grow_by_the_power_that_the_table_says_and_below_it_they_stay():
    table = Table(axes=((2.0, 4.0), (10.0, 20.0)), growth=(1, 2), seconds=(1.0, 2.0, 3.0, 5.0))
    assert table.at(12, 60) == pytest.approx(5 * 3 * 9)
    assert table.at(1, 1) == pytest.approx(1.0)
    assert Table(axes=((7.0,),), growth=(0,), seconds=(3.0,)).at(10**9) == pytest.approx(3.0)


def test_a_point_that_was_too_dear_grows_from_the_cheapest_smaller_one():
    measured = Measured(axes=((1, 2), (1, 10)), growth=(1, 2))
    measured.found = {(1, 1): 1.0, (1, 10): 150.0, (2, 1): 5.0}
    assert measured.table().at(2, 10) == pytest.approx(min(150 * 2, 5 * 100))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"axes": ((1, 2),), "seconds": (1.0,)}, "a table of 2 has 1"),
        ({"axes": ((2, 1),), "seconds": (1.0, 2.0)}, "axes must grow"),
        ({"axes": ((1,),), "seconds": (0.0,)}, r"seconds.0=0.0: input should be greater than 0"),
        ({"axes": ((1,),), "seconds": (1.0,), "growth": (1, 1)}, "1 axes has 2 powers"),
    ],
)
def test_a_table_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Table(**settings)


def test_a_file_gives_back_what_was_saved(tmp_path):
    path = tmp_path / "deep" / "c.json"
    save_calibration(made_up(), path)
    assert load_calibration(path) == made_up()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"c.json: is not JSON"),
        ("[1]", r"c.json: holds a list, not a calibration"),
        ('{"device": "x"}', r"c.json: kind is missing"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, text, message):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_calibration(path)


def test_an_older_format_says_to_calibrate_again(tmp_path):
    settings = made_up().model_dump(mode="json") | {"format": 1}
    (tmp_path / "c.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="format=1, this version reads format=3: calibrate again"):
        load_calibration(tmp_path / "c.json")


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(InputError, match=r"none.json: cannot be read: .*; make it: qkv cost calibrate"):
        load_calibration(tmp_path / "none.json")


def test_what_cannot_be_written_is_a_disk_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be written"):
        save_calibration(made_up(), tmp_path / "file" / "c.json")


def test_calibrations_lie_in_the_users_cache_folder_newest_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path("NVIDIA H200, 1", Precision.BFLOAT16)
    assert path == tmp_path / "qkv" / "calibration-nvidia-h200-1-bfloat16.json"
    assert known_calibrations() == []
    save_calibration(made_up(), path)
    assert known_calibrations() == [path]


@pytest.mark.parametrize(
    ("device", "asked", "is_it"),
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
def test_a_calibration_knows_its_device_by_full_and_by_short_name(device, asked, is_it):
    assert made_up(device=device).is_of(asked) == is_it


def test_what_was_measured_twice_counts_at_its_least():
    table = Table(axes=((1, 2),), seconds=(3.0, 5.0))
    found = least({"a": table, "b": table}, {"b": table.replace(seconds=(4.0, 2.0)), "c": table})
    assert {name: one.seconds for name, one in found.items()} == {"a": (3.0, 5.0), "b": (3.0, 2.0), "c": (3.0, 5.0)}
