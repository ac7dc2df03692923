"""Several processes, started by torchrun: copies of the model (DDP), or one model in pieces (FSDP)."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qkv.config import TrainingConfig
from qkv.cost.workload import Sharding
from qkv.errors import ConfigError
from qkv.models import Model, build
from qkv.nn import Block
from qkv.training.heartbeat import EVERY, Heartbeat
from qkv.training.objectives import Measure, Objective, Outcome
from qkv.training.pieces import PIECES, is_cut, whole, write_pieces
from qkv.training.ranks import Ranks, Tensors, Texts
from qkv.training.run import Progress, RunFolder
from qkv.training.signals import StopRequest

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")

_TEXT_BYTES = 4096  # a path may be so long


def is_of_another(error: RuntimeError) -> bool:
    """Whether it says that another process broke off, not that something is wrong in this one."""
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in ("gloo", "nccl"))


def own_device(device: torch.device) -> torch.device:
    """Of a machine's GPUs, each of its processes takes its own."""
    number, n = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if device.type != "cuda":
        return device
    if number >= n:
        raise ConfigError(f"process {number} of this machine has no GPU: there are {n}; torchrun --nproc-per-node {n}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


class _Together(Ranks):
    """What both kinds share: small words between processes go over the CPUs, gradients over what the devices have."""

    def __init__(self, device: torch.device, lost: Callable[[str], None]) -> None:
        """`lost` is called, from another thread, when another process is gone, and must end this one.

        It gets the reason where this process is to say it, else no text.
        """
        # torchrun's own store outlives a restart, and what the dead wrote there must not be taken for the living's.
        part = f"qkv/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store, self.rank, self.world = next(dist.rendezvous("env://"))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore(part, store), rank=self.rank, world_size=self.world)
        self._device = device
        # While one prepares its data or writes, the others may wait for days: the heartbeat sees who is dead.
        words = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        assert isinstance(words, dist.ProcessGroup)  # which it is for those who are in the group
        self._words = words
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._heartbeat = Heartbeat.connected(*address, part=part, rank=self.rank, world=self.world, lost=lost)

    def summed(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers)
        return numbers

    def of_first(self, number: Callable[[], int | float]) -> float:
        told = torch.tensor(number() if self.is_first else 0.0, dtype=torch.float64)
        dist.broadcast(told, 0, group=self._words)
        return float(told)

    def texts(self, text: str) -> list[str]:
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        said = text.encode()[:_TEXT_BYTES]
        mine[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self._words)
        return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in every]

    def any_rank_stopping(self, stop: StopRequest) -> Signals | None:
        number = torch.tensor(0 if stop.signal is None else stop.signal.value)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._words)
        if number:
            stop.signal = Signals(int(number))
        return stop.signal if number else None

    def wait(self) -> None:
        dist.barrier(group=self._words)

    def speaks(self) -> bool:
        """Whether it is this process that says why all of them end: the first to know does."""
        return self._heartbeat.is_first()

    def linger(self) -> None:
        """Before an end that is none of all: the first is where the others ask who speaks, unless torchrun is."""
        if self.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(2 * EVERY)

    def close(self) -> None:
        """When all have come to their end."""
        self.wait()
        self._heartbeat.stop()
        dist.destroy_process_group()


class Copies(_Together):
    """Each process has all of the model and takes its parts of every batch (DDP)."""

    sharding = Sharding.DDP
    _shared: DistributedDataParallel | None = None

    def share(self, model: nn.Module, objective: Objective) -> Objective:
        on = None if self._device.type == "cpu" else [self._device]
        shared = self._shared = DistributedDataParallel(
            _Judged(model, objective), device_ids=on, gradient_as_bucket_view=True
        )
        return lambda part: _outcome(shared(part))

    def shared(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """As for all; the gradients are sent once, with the last of the items."""
        before: tuple[T, bool] | None = None
        for now in super().shared(items):
            if before is not None:
                self._sends(False)
                yield before
            before = now
        if before is not None:
            self._sends(True)
            yield before

    def examined(self, model: Model, examine: Callable[[Model], Mapping[str, Any]]) -> Mapping[str, Any]:
        return examine(model) if self.is_first else {}

    def save(self, run: RunFolder, progress: Progress, *, tensors: Tensors, texts: Texts) -> None:
        if self.is_first:
            run.save(progress, tensors=tensors, texts=texts)
        self.wait()

    def _sends(self, yes: bool) -> None:  # noqa: FBT001
        if self._shared is not None:
            self._shared.require_backward_grad_sync = yes


class Pieces(_Together):
    """Each process has a piece of every weight, gradient and optimizer state (FSDP); a block at work is whole."""

    sharding = Sharding.FSDP
    _shared: "FSDPModule | None" = None

    def fitted(self, training: TrainingConfig) -> TrainingConfig:
        for setting, is_used in (("compile", training.compile), ("lora_rank", training.lora_rank is not None)):
            if is_used:
                raise ConfigError(f"--sharding fsdp cannot be used with {setting}; --sharding ddp can")
        return super().fitted(training)

    def share(self, model: nn.Module, objective: Objective) -> Objective:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._device.type, (self.world,))
        for block in [part for part in model.modules() if isinstance(part, Block)]:
            fully_shard(block, mesh=mesh)
        judge = _Judged(model, objective)
        shared = self._shared = fully_shard(judge, mesh=mesh)

        def judged(part: Any) -> Outcome:  # noqa: ANN401 - each family its own batch
            outcome = _outcome(judge(part))
            if not torch.is_grad_enabled():
                shared.reshard()  # else what was gathered here would be taken for the weights of the next step
            return outcome

        return judged

    def examined(self, model: Model, examine: Callable[[Model], Mapping[str, Any]]) -> Mapping[str, Any]:
        """On a whole copy, which the first makes: generation asks for weights outside the parts' own calls."""
        gathered = self._gathered(dict(model.named_parameters()))
        if not self.is_first:
            return {}
        copy = build(model.config).to(self._device)
        others = copy.load_state_dict(gathered, strict=False).unexpected_keys
        assert not others  # and tied weights alone are missing: they are there under one of their names
        copy.eval()
        return examine(copy)

    def save(self, run: RunFolder, progress: Progress, *, tensors: Tensors, texts: Texts) -> None:
        """The weights to use in one file, which the first writes; what going on needs, by each its own pieces."""
        used, resume = tensors["model.safetensors"], tensors["resume.safetensors"]
        cut = {name: tensor for name, tensor in resume.items() if is_cut(tensor)}
        kept = {name: tensor for name, tensor in resume.items() if name not in cut}
        gathered = self._gathered(used)

        def write(aside: str) -> None:
            write_pieces(cut, Path(self.texts(aside)[0]) / PIECES)

        if self.is_first:
            files = {"model.safetensors": gathered, "resume.safetensors": kept}
            run.save(progress, tensors=files, texts=texts, further=lambda aside: write(str(aside)))
        else:
            write("")
        self.wait()

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole, in the first's main memory, one after the other."""
        gathered = {}
        for name, tensor in tensors.items():
            full = whole(tensor.detach())
            if self.is_first:
                gathered[name] = full.cpu()
        return gathered


SHARED_BY: dict[Sharding, type[_Together]] = {Sharding.DDP: Copies, Sharding.FSDP: Pieces}


class _Judged(nn.Module):
    """The model and what is asked of it as one call, for both ways of sharing begin and end with a module's forward."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, part: Any) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:  # noqa: ANN401
        outcome = self.objective(part)
        return outcome.loss, {name: (one.total.detach(), one.count) for name, one in outcome.measures.items()}


def _outcome(found: tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]) -> Outcome:
    loss, measures = found
    return Outcome(loss, {name: Measure(total, count) for name, (total, count) in measures.items()})
