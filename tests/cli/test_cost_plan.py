"""`qkv cost plan`: what fits, the time and which bound it is, and the money."""

from tests.cli.test_cost import run


def test_a_plan_says_batch_time_and_money():
    shown = run("plan", "--params", "124M", "--tokens", "2.5B", "--device", "h200", "--price", "3.5")
    lines = {line[:16].strip(): line[17:] for line in shown.splitlines()}
    assert lines["model"].startswith("124M parameters: gpt, width 768")
    assert "× 1,024 tokens a device" in lines["batch that fits"]
    assert "at 40% of the peak; at least" in lines["time"]
    assert lines["money"].endswith("at 3.5 a device and hour")


def test_a_plan_that_does_not_fit_says_so_first_and_what_would():
    small = run("plan", "--params", "7B", "--tokens", "1e9", "--device", "l4").splitlines()
    assert small[0].startswith("does not fit")
    assert (
        "one text of 1,024 tokens takes 104 GiB on each device, which has 22.4 GiB, 20.6 GiB of it usable" in small[0]
    )
    way = small[1].removeprefix("what would").split()
    assert way[:1] == ["--gpus"]
    assert not any(line.startswith(("time ", "batch that fits")) for line in small)
    assert any(line.startswith("time, if it fitted") for line in small)
    better = run("plan", "--params", "7B", "--tokens", "1e9", "--device", "l4", *way)
    assert "batch that fits" in better
    assert not better.startswith("does not fit")


def test_what_nothing_makes_fit_says_what_was_tried_and_names_the_casts():
    never = "not even --gpus 1024 --sharding fsdp --checkpointing"
    large = run("plan", "--params", "70B", "--tokens", "1e9", "--device", "h200").splitlines()[1]
    casts = "the casts of all weights to 16 bits take 130 GiB on every device"
    assert large.split(maxsplit=2)[2] == f"a smaller model; {never}: {casts}"
    # Here they fit alone, but not beside the rest: a shorter text may help.
    close = run("plan", "--params", "62B", "--tokens", "1e9", "--device", "h200").splitlines()[1]
    assert close.split(maxsplit=2)[2].startswith(f"a shorter --length or a smaller model; {never}: the casts")


def test_a_plan_says_which_bound_its_time_is():
    h200 = ["--tokens", "1T", "--device", "h200"]
    sent = run("plan", "--params", "70B", *h200, "--gpus", "64", "--sharding", "fsdp").splitlines()[-1]
    assert sent.endswith("325 days, bound by sending between devices; the work alone 197 days at 40% of the peak")
    moved = run("plan", "--params", "400B", *h200).splitlines()[-1]
    assert "bound by reading and writing each device's memory; the work alone" in moved
