"""Check whether `qkv cost --measure` can run a workload on this machine."""

import os
from typing import TYPE_CHECKING

from qkv.errors import InputError

if TYPE_CHECKING:
    import torch

    from qkv.cost import Estimate
    from qkv.cost.devices import DeviceSpec


def validated_measurement_device_name(estimate: "Estimate", requested_device: "DeviceSpec | None") -> str:
    """Return the full name of this machine's device.

    Raise `InputError` if the device is not the requested one or does not have enough memory for the workload.
    """
    from qkv.cli.options import select_device
    from qkv.cost.calibration import matches_device
    from qkv.cost.devices import USABLE_MEMORY_FRACTION
    from qkv.cost.estimate import format_bytes
    from qkv.utils import gpu_name_or_cpu_threads

    device = select_device("cpu" if requested_device is not None and requested_device.name == "cpu" else "auto")
    name = gpu_name_or_cpu_threads(device)
    if requested_device is not None and not matches_device(requested_device.name, name):
        raise InputError(f"--measure: requires {requested_device.name}, but the device of this machine is {name}")
    total, peak = total_memory(device), estimate.memory.peak
    if total is not None and peak > USABLE_MEMORY_FRACTION * total:
        required, available, usable = (format_bytes(int(n)) for n in (peak, total, USABLE_MEMORY_FRACTION * total))
        raise InputError(f"--measure: requires {required} of memory, but {name} has {available} ({usable} usable)")
    return name


def total_memory(device: "torch.device") -> int | None:
    """Return the total memory of a device in bytes, or None if the amount is unknown."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= getattr(os, "sysconf_names", {}).keys():
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
