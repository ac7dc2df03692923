"""`qkv cost --measure`: workloads that cannot be measured are rejected before they run."""

import re

import pytest
import torch
from typer.testing import CliRunner

from qkv.cli import app, cost_measurement
from qkv.cost.calibration import matches_device, save_calibration
from qkv.cost.devices import find_device
from qkv.errors import InputError
from qkv.utils import gpu_name_or_cpu_threads
from tests.cli.test_cost import run
from tests.cost.synthetic_calibration import make_calibration


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_calibration(make_calibration(device=gpu_name_or_cpu_threads(torch.device("cpu"))), tmp_path / "c.json")
    return ["--measure", "--device", "cpu", "--calibration", str(tmp_path / "c.json")]


def test_a_workload_that_exceeds_the_memory_is_rejected_before_the_model_is_built(calibrated, monkeypatch):
    monkeypatch.setattr(cost_measurement, "total_memory", lambda _device: 24 * 2**30)
    monkeypatch.setattr(
        "qkv.training.benchmark_steps.build_random_model", lambda *_: pytest.fail("the model was built")
    )
    message = r"--measure: .*34\.\d GiB.*cpu, \d+ threads?.*24.0 GiB.*22.1 GiB"
    with pytest.raises(InputError, match=message):
        run("llama-3-8b", *calibrated)


def test_the_memory_of_this_machine_is_in_bytes():
    assert 2**28 < (cost_measurement.total_memory(torch.device("cpu")) or 2**30) < 2**50


def test_a_device_of_another_machine_cannot_be_measured():
    other = "l4" if torch.cuda.is_available() and matches_device("h200", torch.cuda.get_device_name()) else "h200"
    with pytest.raises(InputError, match=rf"--measure: .*\b{other}\b"):
        run("gpt2", "--measure", "--device", other)


@pytest.mark.parametrize(
    ("name", "full_name", "is_match"),
    [
        ("h200", "NVIDIA H200", True),
        ("rtx4090", "NVIDIA GeForce RTX 4090", True),
        ("cpu", "cpu, 2 threads", True),
        ("l4", "NVIDIA L40S", False),
        ("h100", "NVIDIA H200", False),
    ],
)
def test_a_short_name_matches_the_full_name_of_a_device(name, full_name, is_match):
    assert matches_device(find_device(name).name, full_name) is is_match


@pytest.mark.parametrize(
    ("model", "mode", "backend"), [("gpt-nano", "decode", "cpu"), ("gpt-nano", "forward", "eager")]
)
def test_the_backend_is_named_next_to_each_time(calibrated, model, mode, backend):
    output = run(model, "--mode", mode, "--seq-len", "16", *calibrated)
    unit = " per token" if mode == "decode" else ""
    for line in ("predicted", "measured"):
        assert re.search(rf"time, {line} +\S+ ms{unit} \({backend} backend", output)
    operations = run(model, "--mode", mode, "--seq-len", "16", "--backend", "eager", *calibrated)
    assert "(eager backend" in operations
    assert "blocks.attention.q_proj" in operations


def test_a_backend_that_does_not_run_the_workload_is_an_error(calibrated):
    with pytest.raises(InputError, match=r"--backend cuda\b"):
        run("gpt-nano", "--mode", "decode", "--seq-len", "16", "--backend", "cuda", *calibrated)


@pytest.mark.parametrize("arguments", [["calibrate", "--help"], ["gpt2", "--measure"]], ids=["help", "error"])
def test_the_duration_of_a_calibration_is_stated(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["cost", *arguments])
    assert " minute" in f"{done.output} {done.exception}"
