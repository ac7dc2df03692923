"""`qkv cost --measure`: what cannot be measured here is refused before it runs; which road was timed is said."""

import pytest
import torch
from typer.testing import CliRunner

from qkv.cli import app, cost_measurement
from qkv.cost.calibration import save_calibration
from qkv.cost.devices import find_device, matches_device
from qkv.errors import InputError
from qkv.training.device_calibration import device_name
from tests.cli.test_cost import run
from tests.cost.synthetic_calibration import made_up


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_calibration(made_up(device=device_name(torch.device("cpu"))), tmp_path / "c.json")
    return ["--measure", "--device", "cpu", "--calibration", str(tmp_path / "c.json")]


def test_what_this_devices_memory_cannot_hold_is_refused_before_it_is_made(calibrated, monkeypatch):
    monkeypatch.setattr(cost_here, "memory_of", lambda _device: 24 * 2**30)
    monkeypatch.setattr("qkv.training.benchmark_steps.random_model", lambda *_: pytest.fail("the model was made"))
    message = r"--measure: it takes 34\.\d GiB, and cpu, \d+ threads? has 24.0 GiB, 22.1 GiB of it usable$"
    with pytest.raises(InputError, match=message):
        run("llama-3-8b", *calibrated)


def test_the_memory_of_this_machine_is_told_in_bytes():
    assert 2**28 < (cost_here.memory_of(torch.device("cpu")) or 2**30) < 2**50


def test_another_device_cannot_be_measured_here():
    other = "l4" if torch.cuda.is_available() and matches_device("h200", torch.cuda.get_device_name()) else "h200"
    with pytest.raises(InputError, match=rf"--measure: {other} cannot be measured here, where the device is \w+"):
        run("gpt2", "--measure", "--device", other)


@pytest.mark.parametrize(
    ("name", "full_name", "is_it"),
    [
        ("h200", "NVIDIA H200", True),
        ("rtx4090", "NVIDIA GeForce RTX 4090", True),
        ("cpu", "cpu, 2 threads", True),
        ("l4", "NVIDIA L40S", False),
        ("h100", "NVIDIA H200", False),
    ],
)
def test_a_short_name_is_found_in_a_devices_own(name, full_name, is_it):
    assert matches_device(find_device(name).name, full_name) is is_it


@pytest.mark.parametrize(
    ("model", "mode", "is_said"),
    [("gpt-nano", "decode", True), ("gpt-nano", "prefill", False), ("rnn-nano", "decode", False)],
)
def test_measured_decoding_says_that_writing_takes_a_faster_road(calibrated, model, mode, is_said):
    shown = run(model, "--mode", mode, "--length", "16", *calibrated)
    assert "time, measured" in shown
    assert ("this timed the model's own step; writing text takes a faster one" in shown) is is_said


@pytest.mark.parametrize("arguments", [["calibrate", "--help"], ["gpt2", "--measure"]], ids=["help", "error"])
def test_a_calibration_takes_about_a_minute(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["cost", *arguments])
    assert "about a minute" in f"{done.output} {done.exception}"
