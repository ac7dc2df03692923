"""Can `qkv cost --measure` measure this here: is it the device that was named, and has it the memory?"""

import os
from typing import TYPE_CHECKING

from qkv.errors import InputError

if TYPE_CHECKING:
    import torch

    from qkv.cost import Estimate
    from qkv.cost.devices import DeviceSpec


def place_to_measure(estimate: "Estimate", asked: "DeviceSpec | None") -> str:
    """The full name of the device here; what it is not, or what it cannot hold, is refused before anything runs."""
    from qkv.cli.device_options import chosen_device
    from qkv.cost.devices import USABLE_MEMORY_FRACTION, matches_device
    from qkv.cost.units import format_bytes
    from qkv.training.device_calibration import device_name

    found = chosen_device("cpu" if asked is not None and asked.name == "cpu" else "auto")
    here = device_name(found)
    if asked is not None and not matches_device(asked.name, here):
        raise InputError(f"--measure: {asked.name} cannot be measured here, where the device is {here}")
    room, peak = memory_of(found), estimate.memory.peak
    if room is not None and peak > USABLE_MEMORY_FRACTION * room:
        held, whole, usable = (format_bytes(int(n)) for n in (peak, room, USABLE_MEMORY_FRACTION * room))
        raise InputError(f"--measure: it takes {held}, and {here} has {whole}, {usable} of it usable")
    return here


def memory_of(device: "torch.device") -> int | None:
    """Bytes; None where the system does not tell."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= getattr(os, "sysconf_names", {}).keys():
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
