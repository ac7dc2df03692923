"""`qkv cost plan`: maximum batch, time, bottleneck and price."""

import re

from tests.cli.test_cost import run


def test_a_plan_has_batch_time_and_price():
    output = run("plan", "--params", "124M", "--tokens", "2.5B", "--device", "h200", "--price", "3.5")
    lines = {line[:16].strip(): line[17:] for line in output.splitlines()}
    assert lines["model"].startswith("124M parameters: gpt, width 768")
    assert "× 1,024 tokens" in lines["maximum batch"]
    assert " 40% " in lines["time"]
    assert " 3.5 " in lines["price"]


def test_a_plan_that_does_not_fit_starts_with_options_that_would():
    small = run("plan", "--params", "7B", "--tokens", "1e9", "--device", "l4").splitlines()
    assert small[0].startswith("does not fit")
    assert all(value in small[0] for value in ("1,024", "104 GiB", "22.4 GiB", "20.6 GiB"))
    options = small[1].removeprefix("would fit").split()
    assert options[:1] == ["--gpus"]
    assert not any(line.startswith(("time ", "maximum batch")) for line in small)
    assert any(line.startswith("time, if ") for line in small)
    better = run("plan", "--params", "7B", "--tokens", "1e9", "--device", "l4", *options)
    assert "maximum batch" in better
    assert not better.startswith("does not fit")


def test_a_model_that_never_fits_lists_the_options_tried_and_the_size_of_the_casts():
    tried = "--gpus 1024 --sharding fsdp --activation-checkpointing"
    large = run("plan", "--params", "70B", "--tokens", "1e9", "--device", "h200").splitlines()[1]
    assert tried in large
    assert "130 GiB" in large
    assert "--seq-len" not in large
    # Here the casts by themselves would fit, so a shorter sequence may help.
    close = run("plan", "--params", "62B", "--tokens", "1e9", "--device", "h200").splitlines()[1]
    assert "--seq-len" in close
    assert tried in close


def test_a_plan_reports_the_bottleneck():
    h200 = ["--tokens", "1T", "--device", "h200"]
    network = run("plan", "--params", "70B", *h200, "--gpus", "64", "--sharding", "fsdp").splitlines()[-1]
    assert re.search(r"325 days.*communication.*197 days.*40%", network)
    memory = run("plan", "--params", "400B", *h200).splitlines()[-1]
    assert re.search(r"limited by .*memory", memory)
