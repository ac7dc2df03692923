"""Where does the time of a piece of work go? By kind of work, beside what each kind must take at the least."""

import os
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, Interval
from torch.profiler import ProfilerActivity, record_function

from qkv.choices import WorkKind
from qkv.cost import Precision
from qkv.cost.devices import Device
from qkv.cost.estimate import Estimate
from qkv.cost.launch import Launch
from qkv.cost.operation import Phase
from qkv.cost.time import bound
from qkv.data.disk import writing
from qkv.training.stopwatch import Stopwatch
from qkv.training.trainer import Trainer

A = TypeVar("A")
WARM_UP, STEPS = 2, 4
"""Of training; `Trainer.seconds_a_step` takes each twice."""
_DATA = "qkv: data"
_NAMES = {
    WorkKind.DATA: rf"^{_DATA}",
    WorkKind.OPTIMIZER: r"^Optimizer\.|foreach|multi_tensor|adam",
    WorkKind.ATTENTION: r"scaled_dot_product|attention|flash|fmha|sdpa|^look_back|^merge|^give_heads|^attend_text",
    WorkKind.PRODUCTS: (
        r"mm\b|mm_|addmm|bmm|linear|matmul|gemm|gemv|cutlass|nvjet|splitk|mv\b|dot\b|gru|lstm"
        r"|^one_row|^many_rows|^expand_tiles"
    ),
    WorkKind.NORM: r"norm",
    WorkKind.EMBEDDING: r"embedding|index_select|indexselect|^embed(_row)?$",
    WorkKind.LOSS: (
        r"softmax|nll|cross_entropy|searchsorted|cumsum|topk|sort|argmax|scan|gather|scalar|::item|isfinite"
        r"|^best_of_blocks|^take_best|^loss_row"
    ),
    WorkKind.COPIES: r"copy|memcpy|memset|::cat|catarray|contiguous|clone|::to$|fill|zero",
}
"""What names of torch's operations and of a GPU's kernels hold, ours too; the first that fits, or element-wise."""
_KINDS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What this device reaches, measured just now: FLOP/s of a large product, bytes/s from memory."""

    products: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Of one step, or one piece of work."""

    seconds: float
    """As it runs without a profiler."""
    spent: Mapping[WorkKind, float]
    """They add up to `seconds`."""
    bounds: Mapping[WorkKind, float]
    """At the measured rates each kernel of torch's eager road could not be faster; empty where that is not known."""
    rates: Rates | None = None

    @property
    def bound(self) -> float | None:
        return sum(self.bounds.values()) if self.bounds else None


def profile_training(trainer: Trainer, step: Estimate, *, trace: Path | None = None) -> Profile:
    """A few steps of a trainer made for that: they change its model. `step`: what they should cost."""
    make, device = trainer.data.batch, next(trainer.model.parameters()).device

    def labelled(number: int) -> object:
        with record_function(_DATA):
            return make(number)

    trainer.data = replace(trainer.data, batch=labelled)
    trainer.seconds_a_step(WARM_UP)
    seconds = trainer.seconds_a_step(STEPS)
    spent = _spent(lambda: trainer.seconds_a_step(STEPS), device, seconds=seconds, times=2 * STEPS, trace=trace)
    rates = measure_rates(device, step.work.dtype)
    return Profile(seconds=seconds, spent=spent, bounds=_bounds(step, rates), rates=rates)


def profile_generation(
    work: Callable[[], A], device: torch.device, *, expected: Estimate | None, trace: Path | None = None
) -> tuple[A, Profile]:
    """What the work gives, and where its time went. `work` must be warm; it is done twice."""
    watch = Stopwatch(device)
    started = time.perf_counter()
    result = work()
    watch.wait()
    seconds = time.perf_counter() - started
    spent = dict(_spent(work, device, seconds=seconds, times=1, trace=trace))
    spent[WorkKind.SAMPLING] = spent.pop(WorkKind.LOSS, 0.0)
    if expected is None:
        return result, Profile(seconds=seconds, spent=spent, bounds={})
    rates = measure_rates(device, expected.work.dtype)
    return result, Profile(seconds=seconds, spent=spent, bounds=_bounds(expected, rates), rates=rates)


def measure_rates(device: torch.device, dtype: Precision) -> Rates:
    """In about half a second."""
    watch = Stopwatch(device, spend=0.1)
    is_gpu = device.type == "cuda"
    kind = torch.float32 if dtype is Precision.FLOAT32 else torch.bfloat16
    n = 8192 if is_gpu else 1024
    a = torch.randn(n, n, device=device).to(kind)
    x = torch.ones(2**28 if is_gpu else 2**25, device=device)
    y = torch.empty_like(x) if is_gpu else x
    # A CPU reads more than it writes; a GPU's copy does both.
    stream = (lambda: y.copy_(x)) if is_gpu else x.sum
    moved = x.nbytes * (2 if is_gpu else 1)
    return Rates(products=2 * n**3 / watch.kernel(lambda: a @ a), memory=moved / watch.kernel(stream))


def _spent(
    work: Callable[[], object], device: torch.device, *, seconds: float, times: int, trace: Path | None
) -> Mapping[WorkKind, float]:
    """Seconds of one time by kind. A CPU's are brought to `seconds`, for being watched makes it slower."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells standard error when it begins and ends
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=activities) as profile:
            started = time.perf_counter()
            work()
            Stopwatch(device).wait()
            watched = time.perf_counter() - started
        events = profile.events() or []
    spent: dict[WorkKind, float] = defaultdict(float)
    if is_gpu:
        kernels = [one for one in events if one.device_type == DeviceType.CUDA and not one.is_user_annotation]
        for kernel, microseconds in zip(kernels, own_times([one.time_range for one in kernels]), strict=True):
            spent[_kind(kernel.name)] += microseconds / 1e6 / times
    else:
        forward = _forward_kinds(events)
        for event in events:
            spent[_kind_within(event, forward)] += event.self_cpu_time_total / 1e6 * seconds / watched
    spent[WorkKind.BETWEEN] = max(0.0, seconds - sum(spent.values()))
    if trace is not None:
        with writing(trace, 0):
            profile.export_chrome_trace(str(trace))
    return spent


def own_times(ranges: Sequence[Interval]) -> list[float]:
    """Of each, what no earlier one has: a kernel may begin before the one before it has ended, and wait for it."""
    own, ended = [0.0] * len(ranges), float("-inf")
    for place in sorted(range(len(ranges)), key=lambda place: ranges[place].start):
        own[place] = max(0.0, ranges[place].end - max(ranges[place].start, ended))
        ended = max(ended, ranges[place].end)
    return own


def _kind(name: str) -> WorkKind:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), WorkKind.ELEMENTWISE)


def _forward_kinds(events: Sequence[FunctionEvent]) -> dict[int, WorkKind]:
    """By the number that a forward operation shares with its gradient's."""
    found: dict[int, WorkKind] = {}
    for event in events:
        if event.sequence_nr >= 0 and not _is_gradient(event):
            found.setdefault(event.sequence_nr, _kind_within(event, {}))
    return found


def _kind_within(event: FunctionEvent, forward: Mapping[int, WorkKind]) -> WorkKind:
    """What is called on behalf of a norm is the norm's, whatever it is: the outermost call decides that says a kind."""
    kind, caller = WorkKind.ELEMENTWISE, event
    while caller is not None:
        if _is_gradient(caller) and caller.sequence_nr in forward:
            return forward[caller.sequence_nr]
        if (said := _kind(caller.name)) not in (WorkKind.ELEMENTWISE, WorkKind.COPIES) or caller is event:
            kind = said
        caller = caller.cpu_parent
    return kind


def _is_gradient(event: FunctionEvent) -> bool:
    return event.name.startswith("autograd::") or "Backward" in event.name


def _bounds(made: Estimate, rates: Rates) -> dict[WorkKind, float]:
    here = Device(
        name="here", title="this device", float32=rates.products, half=rates.products, bandwidth=rates.memory,
        memory=0.0, link=0.0, source="measured",
    )  # fmt: skip
    least, found = bound(made, here), defaultdict[WorkKind, float](float)
    for launch in least.launches:
        times = 1 if launch.phase is Phase.UPDATE else made.work.accumulation
        found[_kind_of(launch)] += times * least.of(launch)
    return found


def _kind_of(launch: Launch) -> WorkKind:
    if launch.phase is Phase.UPDATE:
        return WorkKind.OPTIMIZER
    if launch.name in ("attention", "scores", "softmax", "mix"):
        return WorkKind.ATTENTION
    if launch.products:
        return WorkKind.PRODUCTS
    words = {"norm": WorkKind.NORM, "loss": WorkKind.LOSS, "embedding": WorkKind.EMBEDDING}
    return next((kind for word, kind in words.items() if word in launch.part), WorkKind.ELEMENTWISE)
