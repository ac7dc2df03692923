"""`qkv cost plan` and `qkv cost calibrate`: a whole training run, and what this device's kernels take."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from qkv.errors import InputError

KNOWN = "a100 h100 h200 b200 l4 rtx4090 mi300x cpu"
Length = Annotated[str | None, typer.Option(metavar="N", help="Tokens a text; the whole context unless said.")]
AsJSON = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Params = Annotated[str | None, typer.Option(metavar="N", help="Parameters of a GPT: 124M, 7B.")]
Model = Annotated[str | None, typer.Option(help="Or a model, as `qkv cost` takes it.")]
Tokens = Annotated[str | None, typer.Option(metavar="N", help="Tokens to train on: 2.5B.")]
Device = Annotated[str | None, typer.Option(help=f"{KNOWN}.")]
GPUs = Annotated[str, typer.Option(metavar="N", help="How many of them.")]
Shared = Annotated[str, typer.Option(help="What several share: ddp or fsdp.")]
Share = Annotated[float | None, typer.Option(help="Of the peak, what training reaches; a usual share unless said.")]
Price = Annotated[float | None, typer.Option(help="Money for a device and hour.")]
Again = Annotated[bool, typer.Option("--checkpointing", help="Compute activations again in backward.")]
Here = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16; float32 on a CPU, else bfloat16.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Where it goes; the user's cache folder unless said.")]


def plan(
    *, params: Params = None, model: Model = None, tokens: Tokens = None, device: Device = None, length: Length = None,
    gpus: GPUs = "1", sharding: Shared = "ddp", share: Share = None, price: Price = None, checkpointing: Again = False,
    as_json: AsJSON = False,
) -> None:  # fmt: skip
    """Time, memory, the batch that fits, and money of a training run; first of all, whether it fits.

    \b
    Examples:
      qkv cost plan --params 124M --tokens 2.5B --device h200 --price 3.5
      qkv cost plan --params 7B --tokens 140B --device h100 --gpus 64 --sharding fsdp
      qkv cost plan --model bert-base --tokens 3.3B --device l4
    """
    from qkv.cli.config_lookup import config_of
    from qkv.cli.cost_report import plan_text
    from qkv.cost import training_plan as make
    from qkv.cost.devices import find_device
    from qkv.cost.workload import Sharding

    if (params is None) == (model is None):
        raise InputError("give --params or --model, and not both")
    if tokens is None:
        raise InputError("give --tokens, how many to train on, as 2.5B")
    if device is None:
        raise InputError(f"give --device, one of {KNOWN}")
    if sharding not in tuple(Sharding):
        raise InputError(f"--sharding {sharding}: it is {' or '.join(Sharding)}")
    # What was typed is looked at before a model is read.
    target, n_tokens, n_devices = find_device(device), count(tokens, "tokens"), count(gpus, "gpus")
    n = None if length is None else count(length, "length")
    config = (
        config_of(model) if model is not None else make.gpt_config_for_size(count(params or "", "params"), context_length=n or 1024)
    )
    answer = make.plan(
        config, tokens=n_tokens, device=target, length=n, n_devices=n_devices, sharding=Sharding(sharding),
        share=make.SHARE if share is None else share, price=price, checkpointing=checkpointing,
    )  # fmt: skip
    print(json.dumps(answer.as_dict()) if as_json else "\n".join(plan_text(answer)))


def calibrate(
    *, device: Here = "auto", dtype: Dtype = None, out: Out = None, as_json: AsJSON = False
) -> None:  # fmt: skip
    """Measure this device's kernels, for `qkv cost` to predict times from.

    It takes about a minute; nothing else should run meanwhile.

    \b
    Examples:
      qkv cost calibrate
      qkv cost calibrate --device cpu --out cpu.json
    """
    from qkv.cli.device_options import chosen_device
    from qkv.cli.progress import say
    from qkv.cost.calibration import calibration_path, save_calibration
    from qkv.cost.workload import Precision
    from qkv.training.device_calibration import calibrate as measure
    from qkv.training.timer import retain_freed_memory

    target = chosen_device(device)
    named = dtype or ("float32" if target.type == "cpu" else "bfloat16")
    if named not in ("float32", "bfloat16"):
        raise InputError(f"--dtype {named}: a device is calibrated at float32 or bfloat16")
    retain_freed_memory()
    found = measure(target, Precision(named), say)
    path = out or calibration_path(found.device, found.dtype)
    save_calibration(found, path)
    result = {"file": str(path), "device": found.device, "dtype": named, "seconds": round(found.took, 1)}
    print(json.dumps(result) if as_json else f"{path}: {found.device}, {named}, in {found.took:.0f} s")


def count(text: str, name: str) -> int:
    """A whole number: 1024, 1,024, 124M, 2.5B, 1e9. A comma stands before three digits: 2,5B is no number here."""
    found = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|\d[\d_]*)(\.\d+)?(?:[eE]\+?(\d{1,2})|\s*([kKmMbBtT]))?", text.strip())
    if found is None:
        raise InputError(f"--{name} {text}: a whole number from 1 is needed, as 1024, 124M, 2.5B or 1e9")
    whole, fraction, power, unit = found.groups()
    power = int(power or {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}[(unit or "").lower()])
    number = Fraction(re.sub(r"[_,]", "", whole) + (fraction or "")) * 10**power
    if number.denominator != 1:
        raise InputError(f"--{name} {text}: is not a whole number")
    if number < 1:
        raise InputError(f"--{name} {text}: must be at least 1")
    return int(number)
