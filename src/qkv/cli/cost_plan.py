"""The `qkv cost plan` and `qkv cost calibrate` commands."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.options import DeviceOption
from qkv.errors import InputError

COST_DEVICE_NAMES = "a100, h100, h200, b200, l4, rtx4090, mi300x, cpu"


def plan(
    *,
    params: Annotated[
        str | None, typer.Option(metavar="N", help="Number of parameters of a GPT, such as 124M or 7B.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model to train, specified as for `qkv cost`. Cannot be combined with --params."
        ),
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Number of training tokens, such as 2.5B.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help=f"Device: {COST_DEVICE_NAMES}.")] = None,
    seq_len: Annotated[
        str | None, typer.Option(metavar="N", help="Sequence length in tokens (default: the context length).")
    ] = None,
    gpus: Annotated[str, typer.Option(metavar="N", help="Number of devices.")] = "1",
    sharding: Annotated[
        str,
        typer.Option(
            metavar="ddp|fsdp",
            help="Parallelism across devices: ddp (each device has a full copy of the model) or fsdp (the model is "
            "sharded across devices).",
        ),
    ] = "ddp",
    utilization: Annotated[
        float | None,
        typer.Option(help="Fraction of the peak FLOP/s that training reaches (MFU). The default is a typical value."),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of one device per hour.")] = None,
    activation_checkpointing: Annotated[
        bool,
        typer.Option("--activation-checkpointing", help="Recompute activations in the backward pass to save memory."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the time, memory, maximum batch size and price of a training run.

    If the model does not fit into memory, the output begins with this fact and suggests settings that would fit.

    \b
    Examples:
      qkv cost plan --params 124M --tokens 2.5B --device h200 --price 3.5
      qkv cost plan --params 7B --tokens 140B --device h100 --gpus 64 --sharding fsdp
      qkv cost plan --model bert-base --tokens 3.3B --device l4
    """
    from qkv.cli.cost_report import format_training_plan
    from qkv.cli.options import resolve_model_config
    from qkv.cost import training_plan
    from qkv.cost.devices import find_device
    from qkv.cost.workload import Sharding

    if (params is None) == (model is None):
        raise InputError("exactly one of --params and --model is required")
    if tokens is None:
        raise InputError("--tokens is required, for example --tokens 2.5B")
    if device is None:
        raise InputError(f"--device is required; it must be one of {COST_DEVICE_NAMES}")
    if sharding not in tuple(Sharding):
        raise InputError(f"--sharding {sharding}: must be one of {', '.join(Sharding)}")
    # Validate all options before loading a model config.
    device_spec, n_tokens, n_devices = find_device(device), parse_count(tokens, "tokens"), parse_count(gpus, "gpus")
    n_positions = None if seq_len is None else parse_count(seq_len, "seq-len")
    if model is not None:
        config = resolve_model_config(model)
    else:
        n_parameters = parse_count(params or "", "params")
        config = training_plan.gpt_config_for_size(n_parameters, context_length=n_positions or 1024)
    result = training_plan.plan_training(
        config,
        tokens=n_tokens,
        device=device_spec,
        seq_len=n_positions,
        n_devices=n_devices,
        sharding=Sharding(sharding),
        utilization=training_plan.DEFAULT_UTILIZATION if utilization is None else utilization,
        price=price,
        activation_checkpointing=activation_checkpointing,
    )
    print(json.dumps(result.as_dict()) if as_json else "\n".join(format_training_plan(result)))


def calibrate(
    *,
    device: DeviceOption = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Data type: float32 or bfloat16 (default: float32 on a CPU, bfloat16 on a GPU)."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file. By default, a file in the user's cache folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the backends of this machine so that `qkv cost` can predict times.

    Calibration takes one to three minutes, during which the machine should be idle.

    \b
    Examples:
      qkv cost calibrate
      qkv cost calibrate --device cpu --out cpu.json
    """
    from qkv.cli.options import select_device
    from qkv.cli.output import print_status
    from qkv.cli.process import retain_freed_memory
    from qkv.cost.calibration import default_calibration_path, save_calibration
    from qkv.cost.workload import Precision
    from qkv.training.device_calibration import calibrate as measure_kernels

    torch_device = select_device(device)
    dtype = dtype or ("float32" if torch_device.type == "cpu" else "bfloat16")
    if dtype not in ("float32", "bfloat16"):
        raise InputError(f"--dtype {dtype}: must be one of float32, bfloat16")
    retain_freed_memory()
    calibration = measure_kernels(torch_device, Precision(dtype), print_status)
    path = out or default_calibration_path(calibration.device, calibration.dtype)
    save_calibration(calibration, path)
    if as_json:
        seconds = round(calibration.duration, 1)
        print(json.dumps({"file": str(path), "device": calibration.device, "dtype": dtype, "seconds": seconds}))
    else:
        print(f"{path}: calibrated {calibration.device} at {dtype} in {calibration.duration:.0f} s")


def parse_count(text: str, option: str) -> int:
    """Parse a positive integer such as 1024, 1,024, 124M, 2.5B or 1e9.

    A comma is accepted only as a thousands separator, so 2,5B is an error.
    """
    match = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|\d[\d_]*)(\.\d+)?(?:[eE]\+?(\d{1,2})|\s*([kKmMbBtT]))?", text.strip())
    if match is None:
        raise InputError(f"--{option} {text}: must be a positive integer, such as 1024, 124M, 2.5B or 1e9")
    digits, fraction, exponent, unit = match.groups()
    power = int(exponent or {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}[(unit or "").lower()])
    number = Fraction(re.sub(r"[_,]", "", digits) + (fraction or "")) * 10**power
    if number.denominator != 1:
        raise InputError(f"--{option} {text}: must be an integer")
    if number < 1:
        raise InputError(f"--{option} {text}: must be at least 1")
    return int(number)
