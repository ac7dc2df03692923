"""Calibrate a device by measuring its kernels at a grid of sizes."""

import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from qkv.choices import Activation, AttentionKernel, NormKind
from qkv.cost.calibration import Calibration, TimingTable, TimingTableBuilder, merge_fastest
from qkv.cost.workload import Precision
from qkv.training import kernel_benchmarks
from qkv.training.kernel_benchmarks import KernelBenchmarkSettings
from qkv.training.launch_overhead import LaunchOverheadBenchmark
from qkv.training.reference_steps import measure_reference_steps
from qkv.training.timer import Timer, WorkFunction
from qkv.utils import gpu_name_or_cpu_threads

CalibrationLog = Callable[[str], None]
ELEMENTWISE = (
    "add",
    "gate",
    "lookup",
    "softmax",
    "rotary",
    *(kind.value for kind in (*NormKind, *Activation)),
)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The sizes to measure. Points above `max_flops` are extrapolated from smaller ones."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    n_elements: tuple[int, ...]
    batch_times_heads: tuple[int, ...]
    sequence_lengths: tuple[int, ...]
    n_cached_keys: tuple[int, ...]
    max_flops: int | float
    max_attention_scores: int
    """Maximum number of attention scores in one measurement."""
    streamed_weight_bytes: tuple[int, ...]
    """Total size in bytes of the weights that are read one after the other."""
    recurrence_axes: tuple[tuple[int, ...], ...] = ((2, 8, 32, 200), (1, 16, 64), (32, 128, 512))
    """The numbers of steps, the batch sizes and the state widths."""
    d_heads: tuple[int, ...] = (32, 128)
    """Head widths for attention."""
    unaligned_matmul: tuple[tuple[int, ...], int, int]
    """Rows, inner size and columns for measuring matmuls whose number of columns is not a multiple of 8."""


CPU = Grid(
    rows=(1, 2, 8, 32, 128, 512, 2048),
    widths=(64, 256, 1024, 4096),
    n_elements=(2**8, 2**12, 2**15, 2**18, 2**20, 2**22, 2**23, 2**24),
    batch_times_heads=(2, 8, 64),
    sequence_lengths=(8, 32, 128, 512, 2048),
    n_cached_keys=(16, 128, 1024, 4096),
    max_flops=1.2e9,
    max_attention_scores=2**24,
    streamed_weight_bytes=(2**20, 2**23, 2**25, 2**26, 2**28),
    unaligned_matmul=((8, 128), 256, 4096),
)
# d_head=64 is the most common head width on GPUs and is measured directly. Narrower heads are treated as if their width
# were 64.
GPU = Grid(
    rows=(1, 8, 64, 512, 4096, 32768),
    widths=(64, 256, 1024, 4096, 16384),
    n_elements=(2**8, 2**14, 2**18, 2**21, 2**24, 2**27),
    batch_times_heads=(4, 16, 128, 1024),
    sequence_lengths=(16, 64, 256, 1024, 4096, 16384),
    n_cached_keys=(16, 256, 2048, 16384),
    max_flops=2e12,
    max_attention_scores=2**29,
    streamed_weight_bytes=(2**22, 2**25, 2**27, 2**30),
    unaligned_matmul=((64, 1024, 8192), 768, 50304),
    d_heads=(64, 128),
    recurrence_axes=((2, 32, 200), (1, 64), (64, 512)),
)


def calibrate(
    device: torch.device,
    dtype: Precision,
    report: CalibrationLog = lambda _line: None,
    *,
    grid: Grid | None = None,
    with_fast_backend: bool = True,
    seconds_per_measurement: float = 0.02,
) -> Calibration:
    """Measure the kernels of the device and complete steps of its fast backend, which takes one to three minutes.

    The device should otherwise be idle.
    """
    started = time.perf_counter()
    training_dtype = dtype.training_precision
    timer = Timer(device, seconds_per_measurement=seconds_per_measurement)
    grid = grid or (GPU if timer.is_gpu else CPU)
    tables: dict[str, TimingTable] = {}
    launch_overheads = LaunchOverheadBenchmark(timer, dtype=dtype, training_dtype=training_dtype)
    for is_training in (False, True):
        benchmark = KernelBenchmarkSettings(
            device=device, dtype=training_dtype if is_training else dtype, is_training=is_training
        )
        measured: dict[str, TimingTable] = {}
        # Recurrences and launches depend on the CPU, which other processes may slow down temporarily. Each of them is
        # measured several times, and the minimum is used.
        for kind, measure in (
            ("recurrences", _measure_recurrences),
            ("matmuls", _measure_matmuls),
            ("attention", _measure_attention),
            ("element-wise", _measure_memory_bound_kernels),
            ("recurrences (second pass)", _measure_recurrences),
        ):
            report(f"{time.perf_counter() - started:.0f} s: {kind}, {benchmark.dtype.value}")
            if measure is not _measure_recurrences:
                launch_overheads.measure_and_keep_fastest()
            measured = merge_fastest(measured, measure(timer, benchmark, grid))
        tables |= {f"{name}.{'train' if is_training else 'infer'}": table for name, table in measured.items()}
    tables["stream"] = _measure_seconds_per_weight_byte(
        timer, KernelBenchmarkSettings(device=device, dtype=dtype, is_training=False), grid
    )
    reference_steps = measure_reference_steps(timer, dtype, report) if with_fast_backend else {}
    return Calibration(
        device=gpu_name_or_cpu_threads(device),
        kind=device.type,
        dtype=dtype,
        n_threads=torch.get_num_threads(),
        torch_version=torch.__version__.partition("+")[0],
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        duration=time.perf_counter() - started,
        tables=tables,
        launch_overheads=launch_overheads.overheads(),
        reference_steps=reference_steps,
    )


def _measure_table(
    timer: Timer,
    axes: tuple[tuple[int, ...], ...],
    make: Callable[..., WorkFunction | None],
    exponents: tuple[int, ...] = (),
    *,
    capture: bool = True,
) -> TimingTable:
    """Measure the function that `make` builds for each grid point.

    `make` returns None for points that are too expensive to measure.
    """
    builder = TimingTableBuilder(axes=axes, exponents=exponents)
    for point in product(*axes):
        work = make(*point)
        if work is not None:
            builder.measured[point] = timer.measure_kernel(work, capture=capture)
    if timer.is_gpu:
        torch.cuda.empty_cache()  # otherwise, the memory of captured graphs is not reused
    return builder.build()


def _measure_matmuls(timer: Timer, benchmark: KernelBenchmarkSettings, grid: Grid) -> dict[str, TimingTable]:
    max_flops = grid.max_flops / (3 if benchmark.is_training else 1)

    def make(rows: int, inner: int, columns: int) -> WorkFunction | None:
        return (
            kernel_benchmarks.build_uncached_matmul(benchmark, rows, inner, columns)
            if 2 * rows * inner * columns <= max_flops
            else None
        )

    return {
        "matmul": _measure_table(timer, (grid.rows, grid.widths, grid.widths), make),
        "misaligned": _measure_unaligned_matmul_slowdown(timer, benchmark, grid),
    }


def _measure_unaligned_matmul_slowdown(timer: Timer, benchmark: KernelBenchmarkSettings, grid: Grid) -> TimingTable:
    """Measure how much slower a matmul is if the number of columns is not a multiple of 8.

    The slowdown is measured for multiples of 1, 2 and 4, and for several numbers of rows.
    """
    all_rows, inner, columns = grid.unaligned_matmul
    ratios = []
    for rows in all_rows:
        aligned, *unaligned = (
            timer.measure_kernel(kernel_benchmarks.build_uncached_matmul(benchmark, rows, inner, columns - offset))
            for offset in (0, 7, 6, 4)
        )
        ratios += [seconds / aligned for seconds in unaligned]
    return TimingTable(axes=(all_rows, (1, 2, 4)), exponents=(0, 0), seconds=tuple(ratios))


def _measure_attention(timer: Timer, benchmark: KernelBenchmarkSettings, grid: Grid) -> dict[str, TimingTable]:
    # Attention has a higher limit because its cost depends most on long contexts.
    max_flops = 4 * grid.max_flops / (4 if benchmark.is_training else 1)
    tables = {}
    for kernel, causal in (
        (AttentionKernel.FUSED, True),
        (AttentionKernel.FUSED, False),
        (AttentionKernel.EAGER, True),
    ):

        def make(
            groups: int,
            n: int,
            d_head: int,
            kernel: AttentionKernel = kernel,
            causal: bool = causal,  # noqa: FBT001
        ) -> WorkFunction | None:
            n_scores = groups * n * n
            if 4 * d_head * n_scores > max_flops or (
                kernel is AttentionKernel.EAGER and n_scores > grid.max_attention_scores
            ):
                return None
            return kernel_benchmarks.build_attention(benchmark, groups, n, d_head, kernel=kernel, causal=causal)

        name = f"{'causal' if causal and kernel is AttentionKernel.FUSED else 'full'}-{kernel.value}"
        tables[name] = _measure_table(
            timer, (grid.batch_times_heads, grid.sequence_lengths, grid.d_heads), make, exponents=(1, 2, 1)
        )
    if benchmark.is_training:
        return tables
    for kernel in AttentionKernel:

        def step(groups: int, n: int, d_head: int, kernel: AttentionKernel = kernel) -> WorkFunction | None:
            is_too_large = groups * n * d_head > grid.n_elements[-1]
            return (
                None
                if is_too_large
                else kernel_benchmarks.build_decode_attention(benchmark, groups, n, d_head, kernel=kernel)
            )

        tables[f"decode-{kernel.value}"] = _measure_table(
            timer, (grid.batch_times_heads, grid.n_cached_keys, grid.d_heads), step
        )
    return tables


def _measure_recurrences(timer: Timer, benchmark: KernelBenchmarkSettings, grid: Grid) -> dict[str, TimingTable]:
    tables = {}
    for bidirectional in (False, True):

        def make(steps: int, batch: int, d_state: int, bidirectional: bool = bidirectional) -> WorkFunction | None:  # noqa: FBT001
            flops = 12 * steps * batch * d_state**2 * (3 if bidirectional else 1) * (3 if benchmark.is_training else 1)
            if flops > min(grid.max_flops, 2e10):
                return None
            return kernel_benchmarks.build_recurrence(benchmark, steps, batch, d_state, bidirectional=bidirectional)

        # A recurrence may synchronize with the device at every step and therefore cannot be captured in a CUDA graph.
        tables["bidirectional" if bidirectional else "unidirectional"] = _measure_table(
            timer, grid.recurrence_axes, make, exponents=(1, 1, 2), capture=False
        )
    gru, lstm = (
        timer.measure_kernel(
            kernel_benchmarks.build_recurrence(
                benchmark, *(axis[1] for axis in grid.recurrence_axes), bidirectional=False, cell=cell
            ),
            capture=False,
        )
        for cell in (nn.GRU, nn.LSTM)
    )
    tables["lstm"] = TimingTable(axes=((1,),), seconds=(lstm / gru,))
    return tables


def _measure_memory_bound_kernels(
    timer: Timer, benchmark: KernelBenchmarkSettings, grid: Grid
) -> dict[str, TimingTable]:
    axes = (grid.n_elements,)
    tables = {}
    for kind in ELEMENTWISE:
        # The gradient of an embedding may synchronize with the device and therefore cannot be captured in a CUDA graph.
        can_capture = not (kind == "lookup" and benchmark.is_training)
        tables[kind] = _measure_table(
            timer,
            axes,
            lambda n, kind=kind: kernel_benchmarks.build_non_matmul(benchmark, kind, n),
            capture=can_capture,
        )
    if benchmark.dtype is Precision.MIXED:
        tables["cast"] = _measure_table(timer, axes, lambda n: kernel_benchmarks.build_cast(benchmark, n))
    if benchmark.is_training:
        tables["bias"] = _measure_table(timer, axes, lambda n: kernel_benchmarks.build_bias_gradient(benchmark, n))
        tables["loss"] = _measure_table(timer, axes, lambda n: kernel_benchmarks.build_cross_entropy(benchmark, n))
        tables["fill"] = _measure_table(timer, axes, lambda n: kernel_benchmarks.build_zero_fill(benchmark, n))
        tables["update"] = _measure_table(
            timer, axes, lambda n: kernel_benchmarks.build_clip_and_adamw_step(benchmark, n), capture=False
        )
    return tables


def _measure_seconds_per_weight_byte(timer: Timer, benchmark: KernelBenchmarkSettings, grid: Grid) -> TimingTable:
    """Measure the time in seconds to read one byte of weights, for several total weight sizes."""
    seconds = []
    for n_bytes in grid.streamed_weight_bytes:
        read_weights, real_bytes = kernel_benchmarks.build_weight_stream(
            benchmark, n_bytes, side=4096 if timer.is_gpu else 1024
        )
        seconds.append(timer.measure_kernel(read_weights) / real_bytes)
    return TimingTable(axes=(grid.streamed_weight_bytes,), exponents=(0,), seconds=tuple(seconds))
