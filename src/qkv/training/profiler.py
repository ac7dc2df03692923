"""Profile training and generation by category of work, with a lower bound on the time of each category."""

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

from qkv.choices import ProfileCategory
from qkv.cost import Precision
from qkv.cost.devices import DeviceSpec, roofline_bound
from qkv.cost.estimate import Estimate
from qkv.cost.kernel_launch import KernelLaunch
from qkv.cost.operation import Phase
from qkv.data.file_io import convert_os_errors_to_disk_error
from qkv.training.loop import Trainer
from qkv.training.timer import Timer

A = TypeVar("A")
WARMUP_BATCHES, PROFILED_BATCHES = 2, 4
"""Number of batches for warm-up and for profiling. `Trainer.train_and_measure_step_seconds` runs each of them twice."""
_DATA_LABEL = "qkv: data"
_CATEGORY_PATTERNS = {
    ProfileCategory.DATA: rf"^{_DATA_LABEL}",
    ProfileCategory.OPTIMIZER: r"^Optimizer\.|foreach|multi_tensor|adam",
    ProfileCategory.ATTENTION: r"scaled_dot_product|attention|flash|fmha|sdpa",
    ProfileCategory.PRODUCTS: (
        r"mm\b|mm_|addmm|bmm|linear|matmul|gemm|gemv|cutlass|nvjet|splitk|mv\b|dot\b|gru|lstm"
        r"|^linear_gelu_kernel"
    ),
    ProfileCategory.NORM: r"norm",
    ProfileCategory.EMBEDDING: r"embedding|index_select|indexselect|^embed_(row_)?kernel$",
    ProfileCategory.LOSS: (
        r"softmax|nll|cross_entropy|searchsorted|cumsum|topk|sort|argmax|scan|gather|scalar|::item|isfinite"
        r"|^cross_entropy_row_inplace"
    ),
    ProfileCategory.COPIES: r"copy|memcpy|memset|::cat|catarray|contiguous|clone|::to$|fill|zero",
}
"""Regular expressions for the names of torch operations and GPU kernels, including those of qkv. The first matching
expression determines the category. Names without a match are classified as element-wise."""
_COMPILED_PATTERNS = {category: re.compile(pattern, re.IGNORECASE) for category, pattern in _CATEGORY_PATTERNS.items()}


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Measured rates of the device: FLOP/s of a large matmul, and memory bandwidth in bytes/s."""

    matmul_flops: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The profile of one training step or one generation."""

    seconds: float
    """Total time in seconds, measured without the profiler."""
    seconds_by_category: Mapping[ProfileCategory, float]
    """Time in seconds for each category. The values add up to `seconds`."""
    bounds: Mapping[ProfileCategory, float]
    """Lower bound on the time of eager kernels at the measured rates, for each category. Empty without a cost
    estimate."""
    rates: DeviceRates | None = None

    @property
    def bound(self) -> float | None:
        return sum(self.bounds.values()) if self.bounds else None


def profile_training(trainer: Trainer, step_estimate: Estimate, *, trace: Path | None = None) -> Profile:
    """Profile a few training steps. The steps train the model, so use a trainer that was created for this purpose."""
    load_batch, device = trainer.data.batch, next(trainer.model.parameters()).device

    def load_labeled_batch(step_number: int) -> object:
        with record_function(_DATA_LABEL):
            return load_batch(step_number)

    trainer.data = replace(trainer.data, batch=load_labeled_batch)
    trainer.train_and_measure_step_seconds(WARMUP_BATCHES)
    seconds = trainer.train_and_measure_step_seconds(PROFILED_BATCHES)
    seconds_by_category = _profile_by_category(
        lambda: trainer.train_and_measure_step_seconds(PROFILED_BATCHES),
        device,
        unprofiled_seconds=seconds,
        n_repeats=2 * PROFILED_BATCHES,
        trace=trace,
    )
    rates = measure_device_rates(device, step_estimate.workload.dtype)
    return Profile(
        seconds=seconds,
        seconds_by_category=seconds_by_category,
        bounds=_bounds_by_category(step_estimate, rates),
        rates=rates,
    )


def time_then_profile_generation(
    work: Callable[[], A], device: torch.device, *, expected: Estimate | None, trace: Path | None = None
) -> tuple[A, Profile]:
    """Run the work twice, the second time with the profiler, and return its result and profile.

    Call this function after a warm-up.
    """
    timer = Timer(device)
    started = time.perf_counter()
    result = work()
    timer.synchronize()
    seconds = time.perf_counter() - started
    seconds_by_category = dict(_profile_by_category(work, device, unprofiled_seconds=seconds, n_repeats=1, trace=trace))
    seconds_by_category[ProfileCategory.SAMPLING] = seconds_by_category.pop(ProfileCategory.LOSS, 0.0)
    if expected is None:
        return result, Profile(seconds=seconds, seconds_by_category=seconds_by_category, bounds={})
    rates = measure_device_rates(device, expected.workload.dtype)
    return result, Profile(
        seconds=seconds,
        seconds_by_category=seconds_by_category,
        bounds=_bounds_by_category(expected, rates),
        rates=rates,
    )


def measure_device_rates(device: torch.device, dtype: Precision) -> DeviceRates:
    """Measure the matmul throughput and memory bandwidth of the device, which takes about 0.5 seconds."""
    timer = Timer(device, seconds_per_measurement=0.1)
    is_gpu = device.type == "cuda"
    torch_dtype = torch.float32 if dtype is Precision.FLOAT32 else torch.bfloat16
    n = 8192 if is_gpu else 1024
    a = torch.randn(n, n, device=device).to(torch_dtype)
    x = torch.ones(2**28 if is_gpu else 2**25, device=device)
    y = torch.empty_like(x) if is_gpu else x
    # CPU workloads mostly read memory, so CPU bandwidth is measured with a sum. GPU bandwidth is measured with a copy.
    stream = (lambda: y.copy_(x)) if is_gpu else x.sum
    bytes_moved = x.nbytes * (2 if is_gpu else 1)
    return DeviceRates(
        matmul_flops=2 * n**3 / timer.measure_kernel(lambda: a @ a),
        bandwidth=bytes_moved / timer.measure_kernel(stream),
    )


def _profile_by_category(
    work: Callable[[], object], device: torch.device, *, unprofiled_seconds: float, n_repeats: int, trace: Path | None
) -> Mapping[ProfileCategory, float]:
    """Profile the work and return the seconds per repetition for each category.

    CPU times are scaled to add up to `unprofiled_seconds` because the profiler slows down the CPU.
    """
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # suppresses warnings from the profiler itself
        with torch.profiler.profile(activities=activities) as profile:
            started = time.perf_counter()
            work()
            Timer(device).synchronize()
            profiled_seconds = time.perf_counter() - started
        events = profile.events() or []
    seconds_by_category: dict[ProfileCategory, float] = defaultdict(float)
    if is_gpu:
        kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
        for kernel, microseconds in zip(
            kernels, durations_without_earlier_overlap([kernel.time_range for kernel in kernels]), strict=True
        ):
            seconds_by_category[_category_of_operation_name(kernel.name)] += microseconds / 1e6 / n_repeats
    else:
        forward = _categories_by_sequence_nr(events)
        for event in events:
            seconds_by_category[_category_of_outermost_caller(event, forward)] += (
                event.self_cpu_time_total / 1e6 * unprofiled_seconds / profiled_seconds
            )
    seconds_by_category[ProfileCategory.BETWEEN] = max(0.0, unprofiled_seconds - sum(seconds_by_category.values()))
    if trace is not None:
        with convert_os_errors_to_disk_error(trace, 0):
            profile.export_chrome_trace(str(trace))
    return seconds_by_category


def durations_without_earlier_overlap(ranges: Sequence[Interval]) -> list[float]:
    """Return the duration of each time range, excluding any overlap with earlier ranges.

    A kernel may start before the previous kernel has ended and then wait for that kernel.
    """
    exclusive, last_end = [0.0] * len(ranges), float("-inf")
    for index in sorted(range(len(ranges)), key=lambda index: ranges[index].start):
        exclusive[index] = max(0.0, ranges[index].end - max(ranges[index].start, last_end))
        last_end = max(last_end, ranges[index].end)
    return exclusive


def _category_of_operation_name(name: str) -> ProfileCategory:
    return next(
        (category for category, pattern in _COMPILED_PATTERNS.items() if pattern.search(name)),
        ProfileCategory.ELEMENTWISE,
    )


def _categories_by_sequence_nr(events: Sequence[FunctionEvent]) -> dict[int, ProfileCategory]:
    """Return the category of each forward operation, keyed by sequence number.

    Backward operations have the same sequence number as their forward operation.
    """
    categories: dict[int, ProfileCategory] = {}
    for event in events:
        if event.sequence_nr >= 0 and not _is_gradient(event):
            categories.setdefault(event.sequence_nr, _category_of_outermost_caller(event, {}))
    return categories


def _category_of_outermost_caller(event: FunctionEvent, forward: Mapping[int, ProfileCategory]) -> ProfileCategory:
    """Return the category of the outermost caller that has a specific category.

    For example, a copy inside a norm is assigned to the norm.
    """
    category, caller = ProfileCategory.ELEMENTWISE, event
    while caller is not None:
        if _is_gradient(caller) and caller.sequence_nr in forward:
            return forward[caller.sequence_nr]
        if (caller_category := _category_of_operation_name(caller.name)) not in (
            ProfileCategory.ELEMENTWISE,
            ProfileCategory.COPIES,
        ) or caller is event:
            category = caller_category
        caller = caller.cpu_parent
    return category


def _is_gradient(event: FunctionEvent) -> bool:
    return event.name.startswith("autograd::") or "Backward" in event.name


def _bounds_by_category(estimate: Estimate, rates: DeviceRates) -> dict[ProfileCategory, float]:
    measured_device = DeviceSpec(
        name="here",
        title="this device",
        float32=rates.matmul_flops,
        half=rates.matmul_flops,
        bandwidth=rates.bandwidth,
        memory=0.0,
        link_bandwidth=0.0,
        source="measured",
    )
    bounds, seconds = roofline_bound(estimate, measured_device), defaultdict[ProfileCategory, float](float)
    for launch in bounds.launches:
        times = 1 if launch.phase is Phase.UPDATE else estimate.workload.accumulation_steps
        seconds[_launch_category(launch)] += times * bounds.kernel_seconds(launch)
    return seconds


def _launch_category(launch: KernelLaunch) -> ProfileCategory:
    if launch.phase is Phase.UPDATE:
        return ProfileCategory.OPTIMIZER
    if launch.name in ("attention", "scores", "softmax", "mix"):
        return ProfileCategory.ATTENTION
    if launch.matmuls:
        return ProfileCategory.PRODUCTS
    category_by_name = {
        "norm": ProfileCategory.NORM,
        "loss": ProfileCategory.LOSS,
        "embedding": ProfileCategory.EMBEDDING,
    }
    return next(
        (category for word, category in category_by_name.items() if word in launch.part), ProfileCategory.ELEMENTWISE
    )
