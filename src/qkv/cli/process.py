"""The process of a command: process-wide settings, and processes started by torchrun.

Only the command line changes process-wide settings, because importing or calling a library must not.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from qkv.cli.output import print_status
from qkv.errors import ConfigError, DiskError, InputError, QKVError, TrainingError

if TYPE_CHECKING:
    import torch

    from qkv.cost import Sharding
    from qkv.training import Distributed


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt in glibc


def retain_freed_memory() -> bool:
    """Make glibc retain freed memory of allocations up to 1 GiB.

    Returns False if the C library does not support this. By default, glibc may return allocations of 32 MiB or more to
    the system, depending on previous allocations. The next allocation then causes one page fault per 4 KiB, which
    doubles the time of eager attention at 2048 positions.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 2**30) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def silence_profiler() -> None:
    """Silence the messages that PyTorch's profiler prints to standard error when it starts and stops."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@contextmanager
def distributed_context(device: "torch.device", sharding: str | None) -> "Iterator[tuple[Distributed, torch.device]]":
    """Yield the distributed context and this process's device.

    Without torchrun, yield the single-process context and the given device.
    """
    from qkv.training.distributed import SINGLE_PROCESS, is_launched_by_torchrun

    kind = _parse_sharding(sharding)
    if is_launched_by_torchrun():
        yield from _torchrun_context_exiting_on_errors(device, kind)
    elif sharding is not None:
        raise ConfigError(f"--sharding {kind} requires torchrun: torchrun --nproc-per-node 4 -m qkv.cli train …")
    else:
        yield SINGLE_PROCESS, device


def require_single_process(command: str, device: "torch.device") -> None:
    """Raise `InputError` if torchrun started several processes because they would all write to the same folder."""
    with distributed_context(device, None) as (distributed, _):
        if distributed.world_size > 1:
            raise InputError(
                f"qkv {command} supports only one process, but torchrun started {distributed.world_size}; run the "
                "command without torchrun"
            )


def _parse_sharding(sharding: str | None) -> "Sharding":
    from qkv.cost import Sharding

    if sharding is not None and sharding not in tuple(Sharding):
        raise InputError(f"--sharding {sharding}: must be one of {', '.join(Sharding)}")
    return Sharding(sharding or Sharding.DDP)


def _torchrun_context_exiting_on_errors(
    device: "torch.device", kind: "Sharding"
) -> "Iterator[tuple[Distributed, torch.device]]":
    from qkv.training.torchrun import DISTRIBUTED_CLASSES, is_peer_failure, select_local_device

    rank_device = select_local_device(device)
    distributed = DISTRIBUTED_CLASSES[kind](
        rank_device, lambda reason: exit_now(_peer_failure_message(reason) if reason else "", 1)
    )

    def exit_now(message: str, code: int) -> NoReturn:
        """Exit without cleanup because collective operations with a failed rank would block forever."""
        if message:
            print_status(message)
        sys.stdout.flush()
        sys.stderr.flush()
        distributed.delay_rank0_exit_after_error()
        os._exit(code)

    try:
        yield distributed, rank_device
    except QKVError as error:
        exit_now(f"error: {error}" if distributed.claim_error_report() else "", exit_code(error))
    except SystemExit as stop:
        exit_now("", stop.code if isinstance(stop.code, int) else 1)
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        message = _peer_failure_message("lost the connection to another process")
        exit_now(message if distributed.claim_error_report() else "", 1)
    distributed.close()


def exit_code(error: QKVError) -> int:
    """Return 1 for disk and training errors, and 2 for invalid input."""
    return 1 if isinstance(error, DiskError | TrainingError) else 2


def _peer_failure_message(reason: str) -> str:
    return f"error: {reason}; this run is stopping. Resume from the last checkpoint with: qkv train --resume RUN"
