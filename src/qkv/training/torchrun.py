"""Distributed training with torchrun: data parallelism (DDP) and fully sharded data parallelism (FSDP)."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

from qkv.config import TrainingConfig
from qkv.cost.workload import Sharding
from qkv.errors import ConfigError
from qkv.models import Model, build
from qkv.nn import Block
from qkv.training.checkpoint import (
    SHARDS_FOLDER,
    RunFolder,
    TrainingProgress,
    full_tensor,
    is_sharded,
    save_sharded_safetensors,
)
from qkv.training.distributed import Distributed, IsCounted, StopRequest, Tensors, Texts
from qkv.training.objectives import LossOutput, Metric, Objective

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

INTERVAL_SECONDS = 1.0
TIMEOUT_SECONDS = 15.0
"""Time without a heartbeat after which a process is considered lost. A lost process was killed or hangs, or its machine
is down."""
_ERROR_REPORTS_KEY = "error_reports"
"""Store key for the number of processes that have asked to report the error. Only the first one reports it."""


class Heartbeat:
    """A background thread that calls `on_peer_lost` if another process has sent no heartbeat for too long.

    The argument of `on_peer_lost` is the reason, or an empty string if another process has already reported the error.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, on_peer_lost: Callable[[str], None]) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"heartbeat/{other}" for other in range(world_size)]
        self._on_peer_lost = on_peer_lost
        self._stopped = threading.Event()
        self._is_reported = False
        self._thread = threading.Thread(target=self._beat_and_monitor, name="heartbeat", daemon=True)
        store.set(self._keys[rank], "0")
        store.wait(self._keys, timedelta(minutes=5))
        self._thread.start()

    @classmethod
    def connect(
        cls, host: str, port: int, *, prefix: str, rank: int, world_size: int, on_peer_lost: Callable[[str], None]
    ) -> "Heartbeat":
        """Create a heartbeat with its own connection to the store.

        On a shared connection, heartbeats would block behind other pending operations.
        """
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        return cls(PrefixStore(prefix, store), rank=rank, world_size=world_size, on_peer_lost=on_peer_lost)

    def claim_error_report(self) -> bool:
        """Return True for the first process that calls this method, and False for all others.

        If the store is unreachable, rank 0 (which hosts the store) has exited, and rank 1 reports the error.
        """
        try:
            return self._store.add(_ERROR_REPORTS_KEY, 1) == 1
        except DistError:
            return self._rank == 1 and not self._is_reported

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(5 * INTERVAL_SECONDS)

    def _report_loss(self, reason: str) -> None:
        self._on_peer_lost(reason if self.claim_error_report() else "")

    def _beat_and_monitor(self) -> None:
        n_sent, last_change = 0, {key: (b"", time.monotonic()) for key in self._keys}
        while not self._stopped.wait(INTERVAL_SECONDS):
            n_sent += 1
            try:
                self._store.set(self._keys[self._rank], str(n_sent))
                beats = self._store.multi_get(self._keys)
                self._is_reported = self._store.add(_ERROR_REPORTS_KEY, 0) > 0
            except (DistError, RuntimeError):
                if not self._stopped.is_set():
                    self._report_loss("lost the connection to the process that hosts the store")
                return
            now = time.monotonic()
            for rank, (key, beat) in enumerate(zip(self._keys, beats, strict=True)):
                if last_change[key][0] != beat:
                    last_change[key] = (beat, now)
                elif now - last_change[key][1] > TIMEOUT_SECONDS:
                    self._report_loss(f"rank {rank} has sent no heartbeat for {TIMEOUT_SECONDS:.0f} s")
                    return


T = TypeVar("T")

_TEXT_BYTES = 4096  # maximum path length on Linux


def is_peer_failure(error: RuntimeError) -> bool:
    """Return True if the error means that another process disconnected, rather than that this process failed."""
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in ("gloo", "nccl"))


def select_local_device(device: torch.device) -> torch.device:
    """Select the GPU for this process's local rank. A CPU device is returned unchanged."""
    local_rank, n_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if device.type != "cuda":
        return device
    if local_rank >= n_gpus:
        raise ConfigError(
            f"local rank {local_rank} has no GPU because this machine has only {n_gpus}; start torchrun with "
            f"--nproc-per-node {n_gpus}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


class _TorchrunBase(Distributed):
    """Base class with the collective operations shared by DDP and FSDP.

    Gradients use the device's backend. Control messages use a separate gloo group on the CPU.
    """

    def __init__(self, device: torch.device, on_peer_lost: Callable[[str], None]) -> None:
        """Initialize the process group and the heartbeat.

        If a peer process is lost, `on_peer_lost` is called from another thread and must end this process. Its argument
        is the reason if this process should report it, and an empty string otherwise.
        """
        # torchrun's store survives a restart. Using a different prefix for each restart hides the keys written by
        # earlier processes.
        prefix = f"qkv/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store, self.rank, self.world_size = next(dist.rendezvous("env://"))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore(prefix, store), rank=self.rank, world_size=self.world_size
        )
        self._device = device
        # Ranks may wait for a long time while rank 0 prepares data, so this group has a very long timeout. The
        # heartbeat detects processes that have died.
        control_group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        assert isinstance(
            control_group, dist.ProcessGroup
        )  # new_group returns a placeholder only to ranks outside the group
        self._control_group = control_group
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._heartbeat = Heartbeat.connect(
            *address, prefix=prefix, rank=self.rank, world_size=self.world_size, on_peer_lost=on_peer_lost
        )

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def broadcast_from_rank0(self, compute: Callable[[], int | float]) -> float:
        result = torch.tensor(compute() if self.is_main_process else 0.0, dtype=torch.float64)
        dist.broadcast(result, 0, group=self._control_group)
        return float(result)

    def all_gather_str(self, text: str) -> list[str]:
        buffer = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        encoded = text.encode()[:_TEXT_BYTES]
        buffer[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        buffers = [torch.empty_like(buffer) for _ in range(self.world_size)]
        dist.all_gather(buffers, buffer, group=self._control_group)
        return [bytes(gathered.tolist()).rstrip(b"\0").decode(errors="replace") for gathered in buffers]

    def synchronize_stop_request(self, stop: StopRequest) -> Signals | None:
        number = torch.tensor(0 if stop.signal is None else stop.signal.value)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._control_group)
        if number:
            stop.signal = Signals(int(number))
        return stop.signal if number else None

    def barrier(self) -> None:
        dist.barrier(group=self._control_group)

    def claim_error_report(self) -> bool:
        """Return True only on the first rank that calls this method.

        That rank reports the error for all ranks.
        """
        return self._heartbeat.claim_error_report()

    def delay_rank0_exit_after_error(self) -> None:
        """Delay the exit of rank 0 briefly after an error if torchrun does not host the store.

        The other ranks query the store on rank 0 to decide which rank reports the error.
        """
        if self.is_main_process and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(2 * INTERVAL_SECONDS)

    def close(self) -> None:
        """Wait for all ranks, then shut down the process group."""
        self.barrier()
        self._heartbeat.stop()
        dist.destroy_process_group()


class DDP(_TorchrunBase):
    """Distributed data parallelism, in which every rank holds the full model.

    Each rank processes its own micro-batches of every batch.
    """

    sharding = Sharding.DDP
    _wrapped: DistributedDataParallel | None = None

    def wrap_objective(self, model: nn.Module, objective: Objective) -> Objective:
        device_ids = None if self._device.type == "cpu" else [self._device]
        wrapped = self._wrapped = DistributedDataParallel(
            _ObjectiveModule(model, objective), device_ids=device_ids, gradient_as_bucket_view=True
        )
        return lambda micro_batch: _to_loss_output(wrapped(micro_batch))

    def shard_with_uncounted_repeats(self, items: Iterable[T]) -> Iterator[tuple[T, IsCounted]]:
        """Yield this rank's items as in the base class.

        Gradients are synchronized only in the backward pass of the last item.
        """
        previous: tuple[T, IsCounted] | None = None
        for current in super().shard_with_uncounted_repeats(items):
            if previous is not None:
                self._set_gradient_sync(False)
                yield previous
            previous = current
        if previous is not None:
            self._set_gradient_sync(True)
            yield previous

    def gather_and_evaluate_on_rank0(
        self, model: Model, compute_metrics: Callable[[Model], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        return compute_metrics(model) if self.is_main_process else {}

    def save_checkpoint(self, run: RunFolder, progress: TrainingProgress, *, tensors: Tensors, texts: Texts) -> None:
        if self.is_main_process:
            run.save(progress, tensors=tensors, texts=texts)
        self.barrier()

    def _set_gradient_sync(self, enabled: bool) -> None:  # noqa: FBT001
        if self._wrapped is not None:
            self._wrapped.require_backward_grad_sync = enabled


class FSDP(_TorchrunBase):
    """Fully sharded data parallelism, in which every rank holds a shard of each weight, gradient and optimizer state.

    The full weights of a block are gathered only while the block is computed.
    """

    sharding = Sharding.FSDP
    _wrapped: "FSDPModule | None" = None

    def _check_supported(self, training: TrainingConfig) -> None:
        for setting, is_enabled in (("compile", training.compile), ("lora_rank", training.lora_rank is not None)):
            if is_enabled:
                raise ConfigError(f"--sharding fsdp cannot be combined with {setting}; use --sharding ddp")

    def wrap_objective(self, model: nn.Module, objective: Objective) -> Objective:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._device.type, (self.world_size,))
        for block in [part for part in model.modules() if isinstance(part, Block)]:
            fully_shard(block, mesh=mesh)
        module = _ObjectiveModule(model, objective)
        wrapped = self._wrapped = fully_shard(module, mesh=mesh)

        def sharded_objective(micro_batch: Any) -> LossOutput:  # noqa: ANN401 - the batch type depends on the family
            output = _to_loss_output(module(micro_batch))
            if not torch.is_grad_enabled():
                wrapped.reshard()  # otherwise, the next training step would use these gathered weights
            return output

        return sharded_objective

    def gather_and_evaluate_on_rank0(
        self, model: Model, compute_metrics: Callable[[Model], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Evaluate an unsharded copy of the model on rank 0.

        Generation reads weights outside the forward calls that gather them, so it cannot use the sharded model.
        """
        gathered = self._gather_on_rank0(dict(model.named_parameters()))
        if not self.is_main_process:
            return {}
        copy = build(model.config).to(self._device)
        unexpected = copy.load_state_dict(gathered, strict=False).unexpected_keys
        assert not unexpected  # tied weights may be missing because they are listed under only one of their names
        copy.eval()
        return compute_metrics(copy)

    def save_checkpoint(self, run: RunFolder, progress: TrainingProgress, *, tensors: Tensors, texts: Texts) -> None:
        """Write a checkpoint from all ranks.

        Rank 0 writes the full model weights to one file, and every rank writes its own shards of the resume state.
        """
        weights, resume = tensors["model.safetensors"], tensors["resume.safetensors"]
        sharded = {name: tensor for name, tensor in resume.items() if is_sharded(tensor)}
        unsharded = {name: tensor for name, tensor in resume.items() if name not in sharded}
        gathered = self._gather_on_rank0(weights)

        def write_shards(partial_folder: str) -> None:
            save_sharded_safetensors(sharded, Path(self.all_gather_str(partial_folder)[0]) / SHARDS_FOLDER)

        if self.is_main_process:
            files = {"model.safetensors": gathered, "resume.safetensors": unsharded}
            run.save(progress, tensors=files, texts=texts, write_extra_files=lambda folder: write_shards(str(folder)))
        else:
            write_shards("")
        self.barrier()

    def _gather_on_rank0(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather full tensors into the CPU memory of rank 0.

        The tensors are gathered one at a time to limit the peak memory of the device.
        """
        gathered = {}
        for name, tensor in tensors.items():
            full = full_tensor(tensor.detach())
            if self.is_main_process:
                gathered[name] = full.cpu()
        return gathered


DISTRIBUTED_CLASSES: dict[Sharding, type[_TorchrunBase]] = {Sharding.DDP: DDP, Sharding.FSDP: FSDP}


class _ObjectiveModule(nn.Module):
    """A module that combines the model and the objective because DDP and FSDP hook into a module's forward call."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, micro_batch: Any) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:  # noqa: ANN401
        output = self.objective(micro_batch)
        return output.loss, {name: (metric.total.detach(), metric.count) for name, metric in output.metrics.items()}


def _to_loss_output(result: tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]) -> LossOutput:
    loss, metrics = result
    return LossOutput(loss, {name: Metric(total, count) for name, (total, count) in metrics.items()})
