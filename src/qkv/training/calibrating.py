"""What a device's kernels cost: measured at a grid of sizes, in about a minute, on the real parts."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from qkv.choices import Activation, Kernel
from qkv.cost.calibration import Calibration, Measured, Table, least
from qkv.cost.workload import Precision
from qkv.training import kernels
from qkv.training.kernels import Road
from qkv.training.launching import Launching
from qkv.training.stopwatch import Stopwatch, Work

Report = Callable[[str], None]
ELEMENTWISE = ("add", "gate", "layer", "rms", "look-up", "softmax", "rotation", *(one.value for one in Activation))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Which sizes are measured; what would take more than `most_flops` is worked out from smaller ones."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    numbers: tuple[int, ...]
    groups: tuple[int, ...]
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    most_flops: int | float
    most_square: int
    """Most scores of one attention."""
    stream: tuple[int, ...]
    """Bytes of weights read in turn."""
    recurrence: tuple[tuple[int, ...], ...] = ((2, 8, 32, 200), (1, 16, 64), (32, 128, 512))
    """Steps, batch, width of the state."""
    d_heads: tuple[int, ...] = (32, 128)
    """Widths of a head that attention is tried with."""
    odd: tuple[tuple[int, ...], int, int]
    """Rows, inner and columns of products that are also tried with columns that are no multiple of 8."""


CPU = Grid(
    rows=(1, 2, 8, 32, 128, 512, 2048), widths=(64, 256, 1024, 4096),
    numbers=(2**8, 2**12, 2**15, 2**18, 2**20, 2**22, 2**23, 2**24), groups=(2, 8, 64), lengths=(8, 32, 128, 512, 2048),
    contexts=(16, 128, 1024, 4096), most_flops=1.2e9, most_square=2**24, stream=(2**20, 2**23, 2**25, 2**26, 2**28),
    odd=((8, 128), 256, 4096),
)  # fmt: skip
# Heads of 64 are the usual ones on a GPU and are timed themselves; narrower ones count as such.
GPU = Grid(
    rows=(1, 8, 64, 512, 4096, 32768), widths=(64, 256, 1024, 4096, 16384),
    numbers=(2**8, 2**14, 2**18, 2**21, 2**24, 2**27), groups=(4, 16, 128, 1024),
    lengths=(16, 64, 256, 1024, 4096, 16384), contexts=(16, 256, 2048, 16384), most_flops=2e12, most_square=2**29,
    stream=(2**22, 2**25, 2**27, 2**30), odd=((64, 1024, 8192), 768, 50304), d_heads=(64, 128),
    recurrence=((2, 32, 200), (1, 64), (64, 512)),
)  # fmt: skip


def calibrate(
    device: torch.device, dtype: Precision, report: Report = lambda _line: None, *, grid: Grid | None = None,
    spend: float = 0.02,
) -> Calibration:  # fmt: skip
    """Half a minute to a minute; nothing else should run on the device meanwhile. `spend`: seconds a measurement."""
    started = time.perf_counter()
    training_dtype = dtype.in_training
    watch = Stopwatch(device, spend=spend)
    grid = grid or (GPU if watch.is_gpu else CPU)
    tables: dict[str, Table] = {}
    launching = Launching(watch, dtype=dtype, training_dtype=training_dtype)
    for is_training in (False, True):
        road = Road(device=device, dtype=training_dtype if is_training else dtype, is_training=is_training)
        made: dict[str, Table] = {}
        # Recurrences wait for the CPU as launching does: both are looked at more than once, and the least counts.
        for kind, measure in (
            ("recurrences", _recurrences), ("products", _products), ("attention", _attentions),
            ("element-wise", _elementwise), ("recurrences again", _recurrences),
        ):  # fmt: skip
            report(f"{time.perf_counter() - started:.0f} s: {kind}, {road.dtype.value}")
            if measure is not _recurrences:
                launching.look()
            made = least(made, measure(watch, road, grid))
        tables |= {f"{name}.{'train' if is_training else 'infer'}": table for name, table in made.items()}
    tables["stream"] = _stream(watch, Road(device=device, dtype=dtype, is_training=False), grid)
    return Calibration(
        device=device_name(device), kind=device.type, dtype=dtype, threads=torch.get_num_threads(),
        torch=torch.__version__.partition("+")[0], took=time.perf_counter() - started, tables=tables,
        launches=launching.overheads(),
    )  # fmt: skip


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    n = torch.get_num_threads()
    return f"cpu, {n} thread{'s' if n > 1 else ''}"


def _table(
    watch: Stopwatch, axes: tuple[tuple[int, ...], ...], make: Callable[..., Work | None],
    growth: tuple[int, ...] = (), *, capture: bool = True,
) -> Table:  # fmt: skip
    """`make` gives the work at a point, or None where it would be too much."""
    measured = Measured(axes=axes, growth=growth)
    for point in product(*axes):
        work = make(*point)
        if work is not None:
            measured.found[point] = watch.kernel(work, capture=capture)
    if watch.is_gpu:
        torch.cuda.empty_cache()  # what graphs held is not given to others by itself
    return measured.table()


def _products(watch: Stopwatch, road: Road, grid: Grid) -> dict[str, Table]:
    most = grid.most_flops / (3 if road.is_training else 1)

    def make(rows: int, inner: int, columns: int) -> Work | None:
        return kernels.product(road, rows, inner, columns) if 2 * rows * inner * columns <= most else None

    return {"product": _table(watch, (grid.rows, grid.widths, grid.widths), make), "odd": _odd(watch, road, grid)}


def _odd(watch: Stopwatch, road: Road, grid: Grid) -> Table:
    """How many times as long a product takes whose columns are a multiple of 1, 2 or 4 alone, by its rows."""
    all_rows, inner, columns = grid.odd
    ratios = []
    for rows in all_rows:
        even, *odd = (watch.kernel(kernels.product(road, rows, inner, columns - less)) for less in (0, 7, 6, 4))
        ratios += [one / even for one in odd]
    return Table(axes=(all_rows, (1, 2, 4)), growth=(0, 0), seconds=tuple(ratios))


def _attentions(watch: Stopwatch, road: Road, grid: Grid) -> dict[str, Table]:
    # Long contexts are what attention is calibrated for: they may take longer.
    most = 4 * grid.most_flops / (4 if road.is_training else 1)
    tables = {}
    for kernel, causal in ((Kernel.FUSED, True), (Kernel.FUSED, False), (Kernel.PLAIN, True)):

        def make(
            groups: int, n: int, d_head: int, kernel: Kernel = kernel, causal: bool = causal  # noqa: FBT001
        ) -> Work | None:  # fmt: skip
            square = groups * n * n
            if 4 * d_head * square > most or (kernel is Kernel.PLAIN and square > grid.most_square):
                return None
            return kernels.attention(road, groups, n, d_head, kernel=kernel, causal=causal)

        name = f"{'causal' if causal and kernel is Kernel.FUSED else 'full'}-{kernel.value}"
        tables[name] = _table(watch, (grid.groups, grid.lengths, grid.d_heads), make, growth=(1, 2, 1))
    if road.is_training:
        return tables
    for kernel in Kernel:

        def step(groups: int, n: int, d_head: int, kernel: Kernel = kernel) -> Work | None:
            too_much = groups * n * d_head > grid.numbers[-1]
            return None if too_much else kernels.attention_step(road, groups, n, d_head, kernel=kernel)

        tables[f"step-{kernel.value}"] = _table(watch, (grid.groups, grid.contexts, grid.d_heads), step)
    return tables


def _recurrences(watch: Stopwatch, road: Road, grid: Grid) -> dict[str, Table]:
    tables = {}
    for two_way in (False, True):

        def make(steps: int, batch: int, d_state: int, two_way: bool = two_way) -> Work | None:  # noqa: FBT001
            flops = 12 * steps * batch * d_state**2 * (3 if two_way else 1) * (3 if road.is_training else 1)
            if flops > min(grid.most_flops, 2e10):
                return None
            return kernels.recurrence(road, steps, batch, d_state, two_way=two_way)

        # A recurrence may wait for the device at each step: it is timed as it runs.
        tables["two-way" if two_way else "one-way"] = _table(
            watch, grid.recurrence, make, growth=(1, 1, 2), capture=False
        )
    gru, lstm = (
        watch.kernel(
            kernels.recurrence(road, *(axis[1] for axis in grid.recurrence), two_way=False, cell=cell), capture=False
        )
        for cell in (nn.GRU, nn.LSTM)
    )
    tables["lstm"] = Table(axes=((1,),), seconds=(lstm / gru,))
    return tables


def _elementwise(watch: Stopwatch, road: Road, grid: Grid) -> dict[str, Table]:
    axes = (grid.numbers,)
    tables = {}
    for kind in ELEMENTWISE:
        # A table's gradient may wait for the device, so it is not captured.
        is_captured = not (kind == "look-up" and road.is_training)
        tables[kind] = _table(watch, axes, lambda n, kind=kind: kernels.elementwise(road, kind, n), capture=is_captured)
    if road.dtype is Precision.MIXED:
        tables["cast"] = _table(watch, axes, lambda n: kernels.cast(road, n))
    if road.is_training:
        tables["bias"] = _table(watch, axes, lambda n: kernels.bias(road, n))
        tables["loss"] = _table(watch, axes, lambda n: kernels.loss(road, n))
        tables["fill"] = _table(watch, axes, lambda n: kernels.fill(road, n))
        tables["update"] = _table(watch, axes, lambda n: kernels.update(road, n), capture=False)
    return tables


def _stream(watch: Stopwatch, road: Road, grid: Grid) -> Table:
    """Seconds a byte of weights, by how many bytes there are in all."""
    seconds = []
    for n_bytes in grid.stream:
        read, real = kernels.stream(road, n_bytes, side=4096 if watch.is_gpu else 1024)
        seconds.append(watch.kernel(read) / real)
    return Table(axes=(grid.stream,), growth=(0,), seconds=tuple(seconds))
