"""Format the results of `qkv cost` as text and LaTeX."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkv.cli.output import format_table

if TYPE_CHECKING:
    from qkv.cost import Estimate
    from qkv.cost.devices import DeviceSpec
    from qkv.cost.lecture_tables import LectureRow, LectureTable
    from qkv.cost.training_plan import TrainingPlan

LECTURE_HEADER = ("operation", "lecture E", "FLOPs", "lecture E: IO", "elements moved, unfused", "FLOPs/byte")
COST_HEADER = ("operation", "complexity", "FLOPs", "share", "bytes moved", "FLOPs/byte")
COMPLEXITY_LEGEND = (
    "In the complexity terms, b is the batch size, n the sequence length, d the model width and m the source length."
)


def lecture_cells(row: "LectureRow") -> list[str]:
    """Format the table cells of an operation with the O(·) terms from lecture E."""
    order, io_order = (f"O({order})" if order else "" for order in (row.order, row.io_order))
    return [row.name, order, f"{row.flops:,}", io_order, f"{row.unfused_elements:,}", f"{row.intensity:.3g}"]


def cost_cells(row: "LectureRow", total: "LectureRow") -> list[str]:
    """Format the table cells of an operation with the FLOPs and bytes of the kernels in the workload."""
    from qkv.cost.estimate import format_bytes

    share = f"{row.flops / total.flops:.0%}" if row.flops else ""
    # The lecture's factor of 16 assumes a feed-forward layer four times as wide as the model. The complexity does not
    # depend on this factor.
    order = row.order.lstrip("0123456789")
    return [
        row.name,
        order,
        f"{row.flops:,}",
        share,
        format_bytes(row.kernel_bytes),
        f"{row.kernel_intensity:.3g}",
    ]


def format_lecture_tables(tables: "Sequence[LectureTable]") -> list[str]:
    """Format the cost tables from lecture E, which do not assume any kernel fusion."""
    lines: list[str] = []
    for table in tables:
        rows = [lecture_cells(row) for row in (*table.rows, table.total)]
        lines += [*([f"{table.title}:"] if table.title else []), *format_table(LECTURE_HEADER, rows), ""]
    return lines


def format_cost_tables(tables: "Sequence[LectureTable]", device: "DeviceSpec | None", peak_flops: float) -> list[str]:
    """Format the costs of the workload's kernels and, if a device is given, the resource that limits each operation."""
    lines: list[str] = []
    for table in tables:
        table_rows = (*table.rows, table.total)
        rows = [cost_cells(row, table.total) for row in table_rows]
        header: list[str] = [*COST_HEADER]
        if device is not None:
            header.append("limited by")
            for row, cells in zip(table_rows, rows, strict=True):
                cells.append("compute" if row.kernel_intensity > peak_flops / device.bandwidth else "memory")
        lines += [*([f"{table.title}:"] if table.title else []), *format_table(header, rows), ""]
    return lines


def format_latex_tables(tables: "Sequence[LectureTable]") -> str:
    """Format the tables from lecture E as LaTeX tabulars with booktabs rules."""
    lines = []
    for table in tables:
        lines += [r"\begin{tabular}{llrlrr}", r"\toprule", " & ".join(LECTURE_HEADER) + r" \\", r"\midrule"]
        for row in (*table.rows, table.total):
            cells = lecture_cells(row)
            cells[0] = _unicode_math_to_latex(row.name)
            cells[1], cells[3] = (f"${_latex_math(cell)}$" if cell else "" for cell in (cells[1], cells[3]))
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines)


def _unicode_math_to_latex(text: str) -> str:
    replacements = {
        "_": r"\_",  # must come first because the other replacements contain underscores
        "ᵀ": r"$^\top$",
        "√d": r"$\sqrt{d}$",
        "·": r"$\cdot$",
        "₁": "$_1$",
        "₂": "$_2$",
    }
    for symbol, latex in replacements.items():
        text = text.replace(symbol, latex)
    return text


def _latex_math(text: str) -> str:
    return text.replace("²", "^2")


def format_parameters_flops_and_memory(estimate: "Estimate", *, with_slide_notes: bool) -> list[str]:
    """Format the number of parameters, the FLOPs and the memory of the whole model."""
    from qkv.config import RNNConfig
    from qkv.cost.estimate import format_bytes, format_flops
    from qkv.cost.lecture_tables import count_attention_matrix_parameters

    config, flops, memory = estimate.config, estimate.flops, estimate.memory
    rows = [("parameters", f"{estimate.parameters.total:,}", "")]
    if not isinstance(config, RNNConfig) and config.family != "seq2seq":
        n_layers = config.n_layers
        n_weights = count_attention_matrix_parameters(config, n_layers)
        is_standard = n_weights == 4 * n_layers * config.d_model**2
        formula = f"4·{n_layers}·{config.d_model}²" if is_standard else "W_Q, W_K, W_V, W_O"
        formula += "; slide C omits the 4" if is_standard and with_slide_notes else ""
        rows.append(("attention parameters", f"{n_weights:,}", formula))
    rows += [("FLOPs, forward", f"{flops.forward:,}", format_flops(flops.forward))]
    if flops.useful_forward != flops.forward:
        rows.append(("of which useful", f"{flops.useful_forward:,}", format_flops(flops.useful_forward)))
    if flops.backward:
        rows.append(("FLOPs, training step", f"{flops.total:,}", format_flops(flops.total)))
    for name, n_bytes in memory.as_dict().items():
        if n_bytes:
            rows.append((f"memory, {name.replace('_', ' ')}", f"{n_bytes:,}", format_bytes(n_bytes)))
    return [line.rstrip() for line in format_table(("", "", ""), rows, n_left_aligned=1)[1:]]


def format_training_plan(plan: "TrainingPlan") -> list[str]:
    """Format a training plan with one quantity per line."""
    from qkv.cost.estimate import format_bytes, format_count, format_flops

    config, step, device = plan.config, plan.step, plan.device
    shape = f"{config.family}, width {config.d_model:,}, vocabulary size {config.vocab_size:,}"
    n_layers = config.model_dump().get("n_layers")
    shape += f", {n_layers} layer{'s' if n_layers > 1 else ''}" if n_layers else ""
    n_devices = "" if plan.n_devices == 1 else f"{plan.n_devices} × "
    sharding = "" if plan.n_devices == 1 else f", {plan.sharding.value}"
    rows = [
        ("model", f"{format_count(step.parameters.total)} parameters: {shape}"),
        ("device", f"{n_devices}{device.title}{sharding}"),
    ]
    required = format_bytes(step.memory.peak)
    available = format_bytes(int(device.memory))
    if plan.fits:
        batch = f"{plan.batch_size:,} × {plan.seq_len:,} tokens per device, using {required} of {available}"
        rows.append(("maximum batch", batch))
    else:
        usable = format_bytes(int(device.usable_memory))
        reason = (
            f"one sequence of {plan.seq_len:,} tokens requires {required} per device, but each device has {available} "
            f"({usable} usable)"
        )
        rows = [("does not fit", reason), ("would fit", _suggest_fitting_options(plan)), *rows]
    rows += [
        ("tokens", f"{format_count(plan.tokens)} in {plan.steps:,} steps"),
        ("compute", format_flops(plan.flops)),
        ("time" if plan.fits else "time, if it did fit", _format_plan_time_and_bottleneck(plan)),
    ]
    if plan.cost is not None:
        price = f"{plan.cost:,.2f} at {plan.price:g} per device-hour"
        rows.append(("price" if plan.fits else "price, if it did fit", price))
    width = max(16, *(len(name) + 1 for name, _ in rows))
    return [f"{name:{width}} {value}" for name, value in rows]


def _format_plan_time_and_bottleneck(plan: "TrainingPlan") -> str:
    """Format the training time of a plan and the resource that limits the time."""
    from qkv.cost.estimate import format_duration

    utilization = f"at {plan.utilization:.0%} of the peak"
    if plan.bound_by == "compute":
        return f"{format_duration(plan.seconds)} {utilization}; at least {format_duration(plan.bound_seconds)}"
    bottleneck = {
        "communication": "communication between devices",
        "kernels": "reading and writing each device's memory",
    }[plan.bound_by]
    compute = f"{format_duration(plan.compute_seconds)} {utilization}"
    return f"{format_duration(plan.seconds)}, limited by {bottleneck}; computation would take {compute}"


def _suggest_fitting_options(plan: "TrainingPlan") -> str:
    """Suggest options that would make the model fit into memory."""
    from qkv.cost.estimate import format_bytes

    workload = plan.fewest_fsdp_devices_workload()
    if workload is None:
        options = f"--gpus {plan.device_counts_to_try[-1]} --sharding fsdp --activation-checkpointing"
        cast_bytes = plan.weight_cast_bytes_preventing_fit
        reason = f", because the 16-bit casts of all weights require {format_bytes(cast_bytes)} per device"
        shorter = "" if cast_bytes > plan.device.usable_memory else "a shorter --seq-len or "
        return f"{shorter}a smaller model; {options} is not enough{reason if cast_bytes else ''}"
    options = [f"--gpus {workload.n_devices} --sharding fsdp"] if workload.n_devices > 1 else []
    return " ".join([*options, *(["--activation-checkpointing"] if workload.activation_checkpointing else [])])


def format_predicted_vs_measured_operations(operations: Sequence[dict[str, Any]]) -> list[str]:
    """Format the predicted and measured time of each operation, summed over all layers."""
    rows = []
    for operation in operations:
        predicted, measured = operation["predicted"], operation["measured"]
        ratio = f"{predicted / measured:.2f}"
        rows.append([operation["name"], f"{1e3 * predicted:.3f}", f"{1e3 * measured:.3f}", ratio])
    return format_table(("operation", "predicted ms", "measured ms", "ratio"), rows)


def format_memory_warning(estimate: "Estimate", device: "DeviceSpec | None") -> list[str]:
    """Format a warning if the workload does not fit into the memory of the device."""
    from qkv.cost.estimate import format_bytes

    if device is None or estimate.memory.peak <= device.usable_memory:
        return []
    peak, available, usable = (
        format_bytes(int(n)) for n in (estimate.memory.peak, device.memory, device.usable_memory)
    )
    return [
        (
            f"does not fit      requires {peak}, but {device.name} has {available} ({usable} usable); the times below "
            "ignore this limit"
        )
    ]


def format_times_and_operation_comparison(times: dict[str, Any], *, unit: str) -> list[str]:
    """Format the roofline bound, the predicted and measured times, and a comparison of the measured operations.

    `unit` and the name of the backend follow each predicted or measured time.
    """
    lines = []
    if "bound" in times:
        bound = times["bound"]
        lines.append(
            f"time, bound       {_format_seconds(bound['seconds'])} on {bound['device']} if every kernel runs at peak "
            f"speed (limited by compute for {bound['compute_bound_fraction']:.0%} of the time, otherwise by memory)"
        )
    if "calibrated" in times:
        prediction = times["calibrated"]
        date = "" if prediction["date"] is None else f", {prediction['date']}"
        lines.append(
            f"time, predicted   {_format_seconds(prediction['seconds'])}{unit} ({prediction['backend']} backend, "
            f"calibrated on {prediction['device']}{date})"
        )
    if "measured" in times:
        measurement = times["measured"]
        lines.append(
            f"time, measured    {_format_seconds(measurement['seconds'])}{unit} ({measurement['backend']} backend on "
            f"{measurement['device']}; predicted ÷ measured = {measurement['ratio']:.2f})"
        )
        if measurement["operations"]:
            lines += ["", *format_predicted_vs_measured_operations(measurement["operations"])]
            lines.append(f"mean error of the operations: {measurement['mean_operation_error']:.0%}")
    return lines


def _format_seconds(seconds: float) -> str:
    if seconds < 0.9995:  # larger values would be rounded to 1e+03 ms
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
