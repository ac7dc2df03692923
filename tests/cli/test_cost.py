"""`qkv cost`: the table, the plan, the times; no torch for what is arithmetic."""

import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from qkv.cli import app
from qkv.cli.cost_plan import KNOWN, count
from qkv.cost.calibration import load_calibration, save_calibration
from qkv.cost.devices import DEVICES
from qkv.errors import ConfigError, InputError, QKVError
from qkv.training.device_calibration import device_name
from tests.cost.synthetic_calibration import made_up

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
def test_arithmetic_needs_no_torch(arguments):
    code = WITHOUT_TORCH.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_published_config_needs_no_torch_either(tmp_path):
    sizes = {"vocab_size": 503, "n_positions": 64, "n_embd": 24, "n_layer": 5, "n_head": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    test_arithmetic_needs_no_torch([str(tmp_path)])


def test_the_table_is_of_the_kernel_that_is_named_and_speaks_of_no_lecture():
    shown = run("gpt2")
    assert "291,648,307,200" in shown
    assert "lecture" not in shown.lower()
    assert "slide" not in shown.lower()
    fused, plain = (
        re.search(r"P·V +bn²d .* (\d.*MiB)", run("gpt2", "--kernel", kernel))[1] for kernel in ("fused", "plain")
    )
    # Queries' results written, values read; and, plain, 12 heads' n×n weights read: 4 bytes a number, 12 layers.
    assert fused == f"{12 * 2 * 1024 * 768 * 4 / 2**20:.1f} MiB"
    assert plain == f"{12 * (2 * 1024 * 768 + 12 * 1024**2) * 4 / 2**20:.0f} MiB"
    assert re.search(r"GELU\(YW₁\)W₂ +bnd² ", shown)
    assert "SiLU(YW₁)W₂" in run("llama-2-7b")
    assert max(map(len, shown.splitlines())) <= 100


def test_the_lecture_has_its_orders_beside_exact_numbers_and_says_the_slips():
    shown = run("gpt2", "--lecture")
    assert "O(bnd² + bn²d)" in shown
    assert "4·12·768²; C's slide lacks the 4" in shown
    assert "Slip: E counts the IO" in shown
    assert "1,557,611,200" in run("gpt2-xl")
    assert "57,982,058,496" in run("gpt3")


def test_json_holds_the_same_as_numbers():
    found = json.loads(run("gpt2", "--mode", "decode", "--dtype", "float16", "--device", "h200", "--json"))
    assert found["parameters"]["total"] == 124_439_808
    assert found["memory"]["cache"] == 37_748_736
    assert found["time"]["bound"]["device"] == "h200"
    assert found["lecture"][0]["order"] == "bd²"


def test_latex_is_a_tabular_with_its_formulas():
    shown = run("bert-base", "--latex")
    assert shown.startswith(r"\begin{tabular}{llrlrr}")
    assert "$O(bn^2d)$" in shown
    assert "xW\\_Q" in shown
    assert shown.count(r"\\") == 11


def test_a_generation_shows_prompt_and_steps():
    shown = run("gpt2", "--mode", "generate", "--length", "100", "--new", "50")
    assert "the prompt:" in shown
    assert "all decoding steps:" in shown


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


def test_a_config_of_a_million_billion_parameters_is_answered(tmp_path):
    settings = {"vocab_size": 10**6, "context_length": 1000, "d_model": 10**6, "n_heads": 1000, "n_layers": 100}
    (tmp_path / "big.json").write_text(json.dumps({"family": "gpt", **settings}))
    assert json.loads(run(str(tmp_path / "big.json"), "--json"))["parameters"]["total"] > 10**15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2", "--batch", "-1"], "--batch -1: a whole number from 1 is needed"),
        (["gpt2", "--batch", "0"], "--batch 0: must be at least 1"),
        (["gpt2", "--length", "1.5"], "--length 1.5: is not a whole number"),
        (["gpt2", "--length", "1" + "0" * 30], "length=1000000000000000000000000000000: input should be less"),
        (["gpt2", "--length", "2000"], "length=2000 is more than the model's context_length=1024"),
        (["gpt3x"], r"gpt3x: neither a preset nor a file.*did you mean 'gpt3'\?"),
        (["gpt2", "--mode", "fly"], "--mode fly: it is one of train, forward"),
        (["gpt2", "--dtype", "int8"], "--dtype int8: it is one of float32"),
        (["gpt2", "--device", "h2000"], "unknown device 'h2000'; did you mean 'h200'"),
        (["bert-base", "--mode", "decode"], "mode=decode: bert reads whole sequences"),
        (["gpt2", "--mode", "generate"], "mode=generate needs new"),
        (["gpt2", "--json", "--latex"], "choose one"),
        (["gpt2", "--plot", "x.xyz"], r"x.xyz: the name must end in one of .png"),
        (["gpt2", "--measure"], r"no calibration of .* for forward at float32 .* qkv cost calibrate .*--dtype float32"),
        (
            ["gpt2", "--measure", "--mode", "train", "--dtype", "mixed"],
            r"train at mixed .* calibrate .*--dtype bfloat16",
        ),
        (["gpt2", "--measure", "--dtype", "mixed"], "no calibration is for forward at mixed: take --dtype float32 or"),
        (["gpt2", "--measure", "--mode", "generate", "--new", "3"], "--measure times one step"),
        (["plan", "--tokens", "1B", "--device", "h200"], "give --params or --model"),
        (["plan", "--params", "1B", "--device", "h200"], "give --tokens, how many to train on"),
        (["plan", "--params", "1B", "--tokens", "1B"], "give --device, one of a100 h100"),
        (["plan", "--params", "12", "--tokens", "1B", "--device", "h200"], "params=12 must be from"),
        (["plan", "--params", "1e-9", "--tokens", "1B", "--device", "h200"], "--params 1e-9: a whole number"),
        (["plan", "--params", "1B", "--tokens", "2,5B", "--device", "h200"], "--tokens 2,5B: a whole number"),
        (["plan", "--model", "nothing", "--tokens", "1B", "--device", "h2000"], "unknown device 'h2000'"),
        (["plan", "--params", "1e6", "--tokens", "1B", "--device", "l4", "--length", "1e6"], "params=1000000 is less"),
        (["plan", "--params", "1B", "--tokens", "1B", "--device", "l4", "--sharding", "x"], "--sharding x: it is ddp"),
        (
            ["plan", "--params", "1B", "--tokens", "1B", "--device", "l4", "--gpus", "0"],
            "--gpus 0: must be at least 1",
        ),
        (["calibrate", "--dtype", "int8"], "--dtype int8: a device is calibrated at"),
    ],
)
def test_bad_input_is_answered_in_one_line(arguments, message):
    with pytest.raises((InputError, ConfigError), match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "mamba"}', r"config.json: model_type='mamba' is unknown"),
        ('{"family": "gpt", "vocab_size": 5}', r"config.json: gpt: context_length is missing"),
        ("{", r"config.json: not valid JSON"),
    ],
    ids=["unknown family", "missing field", "not json"],
)
def test_a_folder_whose_config_is_bad_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(str(tmp_path))


def test_a_folder_without_a_config_and_a_place_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(InputError, match=r"holds neither config.json nor a run"):
        run(str(tmp_path))
    with pytest.raises(InputError, match=r"none/x.png: there is no folder"):
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
def test_numbers_may_be_written_short(text, number):
    assert count(text, "tokens") == number


def test_a_step_that_does_not_fit_says_so_before_its_time():
    large = ["gpt2-xl", "--mode", "train", "--batch", "64", "--device", "l4"]
    lines = run(*large).splitlines()
    (said,) = [i for i, line in enumerate(lines) if line.startswith("does not fit")]
    time = next(i for i, line in enumerate(lines) if line.startswith("time, at least"))
    assert said < time
    assert "l4 has 22.4 GiB, 20.6 GiB of it usable: the times are as if it did" in lines[said]
    assert "    8.35 s on l4" in lines[time]
    assert json.loads(run(*large, "--json"))["time"]["bound"]["fits"] is False
    assert "does not fit" not in run("gpt2", "--device", "l4")
    assert json.loads(run("gpt2", "--device", "l4", "--json"))["time"]["bound"]["fits"] is True


def test_a_calibration_predicts_and_is_found_in_the_cache(tmp_path):
    save_calibration(made_up(), tmp_path / "c.json")
    found = json.loads(run("gpt-nano", "--calibration", str(tmp_path / "c.json"), "--json"))
    assert found["time"]["calibrated"]["device"] == "made up"
    assert found["time"]["calibrated"]["seconds"] > 0
    assert "calibrated" not in json.loads(run("gpt-nano", "--json"))["time"]
    save_calibration(made_up(), tmp_path / "cache" / "qkv" / "calibration-made-up-float32.json")
    assert json.loads(run("gpt-nano", "--json"))["time"]["calibrated"] == found["time"]["calibrated"]
    assert load_calibration(tmp_path / "c.json").device == "made up"


def test_measuring_prints_predicted_measured_and_the_error(tmp_path):
    save_calibration(made_up(device=device_name(torch.device("cpu"))), tmp_path / "c.json")
    shown = run("gpt-nano", "--length", "16", "--measure", "--calibration", str(tmp_path / "c.json"))
    assert "predicted ÷ measured" in shown
    assert "blocks.feed_forward.up_proj" in shown
    assert "blocks.attention.attention" in shown
    assert "mean error of the operations" in shown


def test_a_calibration_of_other_threads_or_another_device_is_not_used(tmp_path):
    cache = tmp_path / "cache" / "qkv"
    save_calibration(made_up(device="cpu, 999 threads"), cache / "calibration-other.json")
    with pytest.raises(InputError, match=r"there is no calibration of cpu, [0-9]+ threads?"):
        run("gpt-nano", "--measure")
    with pytest.raises(InputError, match=r"other.json: is a calibration of cpu, 999 threads, not of cpu, [0-9]+ thr"):
        run("gpt-nano", "--measure", "--calibration", str(cache / "calibration-other.json"))
    assert "calibrated" not in json.loads(run("gpt-nano", "--device", "l4", "--dtype", "float32", "--json"))["time"]
    found = json.loads(run("gpt-nano", "--device", "cpu", "--json"))
    assert found["time"]["calibrated"]["device"] == "cpu, 999 threads"


def test_a_plot_is_written_and_says_whose_roofline_it_has(tmp_path):
    done = CliRunner().invoke(app, ["cost", "gpt-nano", "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "the roofline is that of h200, as no --device is given" in done.stderr


def test_the_help_names_every_device():
    assert KNOWN.split() == list(DEVICES)
