"""One command in several processes: one of them speaks, and all of them end together."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from qkv.cli.progress import say
from qkv.errors import ConfigError, DiskError, InputError, QKVError, TrainingError

if TYPE_CHECKING:
    import torch

    from qkv.cost import Sharding
    from qkv.training import Distributed


@contextmanager
def together(device: "torch.device", sharding: str | None) -> "Iterator[tuple[Distributed, torch.device]]":
    """Who works at this command, and where: alone, or one of the processes that torchrun started."""
    from qkv.training.distributed import SINGLE_PROCESS, is_launched_by_torchrun

    kind = _kind(sharding)
    if is_launched_by_torchrun():
        yield from _as_one_of_many(device, kind)
    elif sharding is not None:
        raise ConfigError(f"--sharding {kind} is for several processes: torchrun --nproc-per-node 4 -m qkv.cli train …")
    else:
        yield SINGLE_PROCESS, device


def refuse_several(command: str, device: "torch.device") -> None:
    """For a command that is done by one process: several would write into one folder."""
    with together(device, None) as (distributed, _):
        if distributed.world_size > 1:
            raise InputError(f"qkv {command} works in one process, torchrun started {distributed.world_size}: leave torchrun out")


def _kind(sharding: str | None) -> "Sharding":
    from qkv.cost import Sharding

    if sharding is not None and sharding not in tuple(Sharding):
        raise InputError(f"--sharding {sharding}: it is {' or '.join(Sharding)}")
    return Sharding(sharding or Sharding.DDP)


def _as_one_of_many(device: "torch.device", kind: "Sharding") -> "Iterator[tuple[Distributed, torch.device]]":
    from qkv.training.torchrun import DISTRIBUTED_CLASSES, is_peer_failure, local_device

    mine = local_device(device)
    distributed = DISTRIBUTED_CLASSES[kind](mine, lambda why: end(_gone(why) if why else "", 1))

    def end(line: str, code: int) -> NoReturn:
        """At once: what the others are waited for in would never end."""
        if line:
            say(line)
        sys.stdout.flush()
        sys.stderr.flush()
        distributed.keep_store_alive()
        os._exit(code)

    try:
        yield distributed, mine
    except QKVError as error:
        end(f"error: {error}" if distributed.claim_error_report() else "", exit_code(error))
    except SystemExit as stop:
        end("", stop.code if isinstance(stop.code, int) else 1)
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        end(_gone("the connection to another process broke") if distributed.claim_error_report() else "", 1)
    distributed.close()


def exit_code(error: QKVError) -> int:
    return 1 if isinstance(error, DiskError | TrainingError) else 2


def _gone(why: str) -> str:
    return f"error: {why}: this run ends here; its last checkpoint is good, go on: qkv train --resume RUN"
