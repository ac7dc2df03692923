"""`qkv cost`: tables, times and errors. Estimates do not import torch."""

import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from qkv.cli import app
from qkv.cli.cost_plan import COST_DEVICE_NAMES, parse_count
from qkv.cost.calibration import load_calibration, save_calibration
from qkv.cost.devices import DEVICES
from qkv.errors import ConfigError, InputError, QKVError
from qkv.utils import gpu_name_or_cpu_threads
from tests.cost.synthetic_calibration import make_calibration

WITHOUT_TORCH = """
import sys
from qkv.cli import main
sys.argv = ["qkv", "cost", *{arguments}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {{"torch", "numpy", "matplotlib"}} & set(sys.modules)
"""


@pytest.fixture(autouse=True)
def _no_calibration_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments):
    done = CliRunner().invoke(app, ["cost", *arguments], catch_exceptions=True)
    if isinstance(done.exception, QKVError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["gpt2"], ["stories", "--json"], ["plan", "--params", "124M", "--tokens", "2.5B", "--device", "h200"]],
    ids=["preset", "shipped", "plan"],
)
def test_an_estimate_does_not_import_torch(arguments):
    code = WITHOUT_TORCH.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_hugging_face_config_does_not_import_torch(tmp_path):
    sizes = {"vocab_size": 503, "n_positions": 64, "n_embd": 24, "n_layer": 5, "n_head": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    test_an_estimate_does_not_import_torch([str(tmp_path)])


def test_the_table_counts_the_selected_kernel_and_does_not_mention_the_lecture():
    output = run("gpt2")
    assert "291,648,307,200" in output
    assert "lecture" not in output.lower()
    assert "slide" not in output.lower()
    fused, eager = (
        re.search(r"P·V +bn²d .* (\d.*MiB)", run("gpt2", "--kernel", kernel))[1] for kernel in ("fused", "eager")
    )
    # Outputs written and values read; eager attention also reads the n×n weights of 12 heads. 4 bytes, 12 layers.
    assert fused == f"{12 * 2 * 1024 * 768 * 4 / 2**20:.1f} MiB"
    assert eager == f"{12 * (2 * 1024 * 768 + 12 * 1024**2) * 4 / 2**20:.0f} MiB"
    assert re.search(r"GELU\(YW₁\)W₂ +bnd² ", output)
    assert "SiLU(YW₁)W₂" in run("llama-2-7b")
    assert max(map(len, output.splitlines())) <= 100


def test_the_lecture_table_has_complexities_exact_numbers_and_errata():
    output = run("gpt2", "--lecture")
    assert "O(bnd² + bn²d)" in output
    assert "4·12·768²; " in output
    errata = json.loads(run("gpt2", "--json"))["errata"]
    assert errata
    assert output.count("Error on the slides: ") == len(errata)
    assert "1,557,611,200" in run("gpt2-xl")
    assert "57,982,058,496" in run("gpt3")


def test_json_has_the_numbers():
    result = json.loads(run("gpt2", "--mode", "decode", "--dtype", "float16", "--device", "h200", "--json"))
    assert result["parameters"]["total"] == 124_439_808
    assert result["memory"]["cache"] == 37_748_736
    assert result["time"]["bound"]["device"] == "h200"
    assert result["lecture"][0]["order"] == "bd²"


def test_latex_is_a_tabular_with_formulas():
    output = run("bert-base", "--latex")
    assert output.startswith(r"\begin{tabular}{llrlrr}")
    assert "$O(bn^2d)$" in output
    assert "xW\\_Q" in output
    assert output.count(r"\\") == 11


def test_a_generation_has_a_table_for_prefill_and_decoding():
    output = run("gpt2", "--mode", "generate", "--seq-len", "100", "--new-tokens", "50")
    assert "prefill:" in output
    assert "all decode steps:" in output


def test_a_config_file_a_run_and_a_hugging_face_folder_are_models(tmp_path):
    settings = {"vocab_size": 101, "context_length": 32, "d_model": 8, "n_heads": 2, "n_layers": 3}
    (tmp_path / "mine.json").write_text(json.dumps({"family": "gpt", **settings}))
    total = json.loads(run(str(tmp_path / "mine.json"), "--json"))["parameters"]["total"]
    checkpoint = tmp_path / "run" / "checkpoints" / "000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps({"family": "gpt", **settings}))
    assert json.loads(run(str(tmp_path / "run"), "--json"))["parameters"]["total"] == total
    published = {
        "model_type": "gpt2", "vocab_size": 101, "n_positions": 32, "n_embd": 8, "n_head": 2, "n_layer": 3,
    }  # fmt: skip
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(published))
    assert json.loads(run(str(tmp_path / "hf"), "--json"))["parameters"]["total"] == total


def test_a_config_with_a_quadrillion_parameters_is_estimated(tmp_path):
    settings = {"vocab_size": 10**6, "context_length": 1000, "d_model": 10**6, "n_heads": 1000, "n_layers": 100}
    (tmp_path / "big.json").write_text(json.dumps({"family": "gpt", **settings}))
    assert json.loads(run(str(tmp_path / "big.json"), "--json"))["parameters"]["total"] > 10**15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2", "--batch-size", "-1"], "--batch-size -1: "),
        (["gpt2", "--batch-size", "0"], "--batch-size 0: .* 1"),
        (["gpt2", "--seq-len", "1.5"], "--seq-len 1.5: "),
        (["gpt2", "--seq-len", "1" + "0" * 30], "seq_len.*1000000000000000000000000000000.* 1000000000000000"),
        (["gpt2", "--seq-len", "2000"], "seq_len .*context_length=1024, got 2000"),
        (["gpt3x"], "gpt3x: .*'gpt3'"),
        (["gpt2", "--mode", "fly"], "--mode fly: .*train, forward"),
        (["gpt2", "--dtype", "int8"], "--dtype int8: .*float32"),
        (["gpt2", "--device", "h2000"], "'h2000'.*'h200'"),
        (["bert-base", "--mode", "decode"], "mode=decode.*bert"),
        (["gpt2", "--mode", "generate"], "mode=generate.*new"),
        (["gpt2", "--json", "--latex"], "--lecture, --json and --latex"),
        (["gpt2", "--plot", "x.xyz"], r"x.xyz: .*\.png"),
        (["gpt2", "--measure"], r"--measure: .*forward at float32.* qkv cost calibrate .*--dtype float32"),
        (
            ["gpt2", "--measure", "--mode", "train", "--dtype", "mixed"],
            r"train at mixed.* calibrate .*--dtype bfloat16",
        ),
        (["gpt2", "--measure", "--dtype", "mixed"], "forward at mixed.*--dtype float32 or"),
        (["gpt2", "--measure", "--mode", "generate", "--new-tokens", "3"], "--measure.*--mode generate"),
        (["plan", "--tokens", "1B", "--device", "h200"], "--params and --model"),
        (["plan", "--params", "1B", "--device", "h200"], "--tokens"),
        (["plan", "--params", "1B", "--tokens", "1B"], "--device.*a100, h100"),
        (["plan", "--params", "12", "--tokens", "1B", "--device", "h200"], "params .*got 12$"),
        (["plan", "--params", "1e-9", "--tokens", "1B", "--device", "h200"], "--params 1e-9: "),
        (["plan", "--params", "1B", "--tokens", "2,5B", "--device", "h200"], "--tokens 2,5B: "),
        (["plan", "--model", "nothing", "--tokens", "1B", "--device", "h2000"], "'h2000'"),
        (["plan", "--params", "1e6", "--tokens", "1B", "--device", "l4", "--seq-len", "1e6"], "params .*got 1000000;"),
        (
            ["plan", "--params", "1B", "--tokens", "1B", "--device", "l4", "--sharding", "x"],
            "--sharding x: .*ddp, fsdp",
        ),
        (
            ["plan", "--params", "1B", "--tokens", "1B", "--device", "l4", "--gpus", "0"],
            "--gpus 0: .* 1",
        ),
        (["calibrate", "--dtype", "int8"], "--dtype int8: .*float32, bfloat16"),
    ],
)
def test_invalid_input_is_reported_in_one_line(arguments, message):
    with pytest.raises((InputError, ConfigError), match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "mamba"}', r"config.json: .*'mamba'"),
        ('{"family": "gpt", "vocab_size": 5}', r"config.json: .*context_length"),
        ("{", r"config.json: .*JSON"),
    ],
    ids=["unknown family", "missing field", "not json"],
)
def test_the_error_of_an_invalid_config_names_the_file(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(str(tmp_path))


def test_the_error_of_a_missing_file_or_folder_names_it(tmp_path):
    with pytest.raises(InputError, match=rf"{tmp_path}: .*config.json.*checkpoints"):
        run(str(tmp_path))
    with pytest.raises(InputError, match=r"none/x.png: .*none"):
        run("gpt-nano", "--plot", str(tmp_path / "none" / "x.png"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("1,024", 1024),
        ("124M", 124_000_000),
        ("2.5B", 2_500_000_000),
        ("1.50k", 1500),
        ("3t", 3 * 10**12),
        ("1e9", 10**9),
        ("2.5E+3", 2500),
        ("1_000", 1000),
        ("0.5k", 500),
    ],
)
def test_counts_can_be_abbreviated(text, number):
    assert parse_count(text, "tokens") == number


def test_a_step_that_does_not_fit_is_reported_before_its_time():
    large = ["gpt2-xl", "--mode", "train", "--batch-size", "64", "--device", "l4"]
    lines = run(*large).splitlines()
    (warning,) = [i for i, line in enumerate(lines) if line.startswith("does not fit")]
    time = next(i for i, line in enumerate(lines) if line.startswith("time, bound"))
    assert warning < time
    assert "l4 has 22.4 GiB (20.6 GiB usable)" in lines[warning]
    assert "    8.35 s on l4" in lines[time]
    assert json.loads(run(*large, "--json"))["time"]["bound"]["fits"] is False
    assert "does not fit" not in run("gpt2", "--device", "l4")
    assert json.loads(run("gpt2", "--device", "l4", "--json"))["time"]["bound"]["fits"] is True


def test_a_calibration_is_read_from_a_file_or_found_in_the_cache(tmp_path):
    save_calibration(make_calibration(), tmp_path / "c.json")
    result = json.loads(run("gpt-nano", "--calibration", str(tmp_path / "c.json"), "--json"))
    assert result["time"]["calibrated"]["device"] == "synthetic"
    assert result["time"]["calibrated"]["seconds"] > 0
    assert "calibrated" not in json.loads(run("gpt-nano", "--json"))["time"]
    save_calibration(make_calibration(), tmp_path / "cache" / "qkv" / "calibration-synthetic-float32.json")
    assert json.loads(run("gpt-nano", "--json"))["time"]["calibrated"] == result["time"]["calibrated"]
    assert load_calibration(tmp_path / "c.json").device == "synthetic"


def test_a_calibration_without_the_norm_of_the_model_is_reported_and_not_used(tmp_path):
    calibration = make_calibration()
    tables = {name: table for name, table in calibration.tables.items() if name != "layer.infer"}
    save_calibration(calibration.replace(tables=tables), tmp_path / "cache" / "qkv" / "calibration-old.json")
    done = CliRunner().invoke(app, ["cost", "gpt-nano"])
    assert done.exit_code == 0
    assert "predicted" not in done.stdout
    assert "calibration-old.json is not used" in done.stderr
    assert "layer.infer" in done.stderr
    with pytest.raises(InputError, match=r"layer\.infer"):
        run("gpt-nano", "--calibration", str(tmp_path / "cache" / "qkv" / "calibration-old.json"))


def test_a_measurement_is_compared_with_the_prediction(tmp_path):
    save_calibration(make_calibration(device=gpu_name_or_cpu_threads(torch.device("cpu"))), tmp_path / "c.json")
    output = run("gpt-nano", "--seq-len", "16", "--measure", "--calibration", str(tmp_path / "c.json"))
    assert "time, predicted" in output
    assert "time, measured" in output
    assert "blocks.feed_forward.up_proj" in output
    assert "blocks.attention.attention" in output
    assert re.search(r"error .*: \d+%$", output, re.MULTILINE)


def test_a_calibration_for_another_device_or_number_of_threads_is_not_used(tmp_path):
    cache = tmp_path / "cache" / "qkv"
    save_calibration(make_calibration(device="cpu, 999 threads"), cache / "calibration-other.json")
    with pytest.raises(InputError, match=r"--measure: .*cpu, [0-9]+ threads?.*qkv cost calibrate"):
        run("gpt-nano", "--measure")
    with pytest.raises(InputError, match=r"other.json: .*cpu, [0-9]+ thr.*cpu, 999 threads"):
        run("gpt-nano", "--measure", "--calibration", str(cache / "calibration-other.json"))
    assert "calibrated" not in json.loads(run("gpt-nano", "--device", "l4", "--dtype", "float32", "--json"))["time"]
    result = json.loads(run("gpt-nano", "--device", "cpu", "--json"))
    assert result["time"]["calibrated"]["device"] == "cpu, 999 threads"


def test_a_plot_without_a_device_reports_which_roofline_it_shows(tmp_path):
    done = CliRunner().invoke(app, ["cost", "gpt-nano", "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr.startswith("qkv: --plot: ")
    assert "h200" in done.stderr


def test_the_help_lists_every_device():
    assert COST_DEVICE_NAMES.split(", ") == list(DEVICES)
