"""The answers of `qkv cost` as text and as LaTeX."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkv.cli.text_tables import table

if TYPE_CHECKING:
    from qkv.cost import Estimate
    from qkv.cost.devices import DeviceSpec
    from qkv.cost.lecture_tables import LectureRow, LectureTable
    from qkv.cost.training_plan import TrainingPlan

LECTURE = ("operation", "lecture E", "FLOPs", "lecture E: IO", "numbers moved, unfused", "FLOPs a byte")
HEAD = ("operation", "grows as", "FLOPs", "share", "bytes moved", "FLOPs a byte")
LETTERS = "b texts, n tokens each, d the model's width; m: tokens of a source"


def lecture_cells(row: "LectureRow") -> list[str]:
    order, io_order = (f"O({order})" if order else "" for order in (row.order, row.io_order))
    return [row.name, order, f"{row.flops:,}", io_order, f"{row.numbers:,}", f"{row.intensity:.3g}"]


def cells(row: "LectureRow", total: "LectureRow") -> list[str]:
    from qkv.cost.units import format_bytes

    share = f"{row.flops / total.flops:.0%}" if row.flops else ""
    moved = format_bytes(row.kernel_bytes)
    # The lecture's 16 is of a feed-forward four times as wide as the model; how it grows is the same for all.
    order = row.order.lstrip("0123456789")
    return [row.name, order, f"{row.flops:,}", share, moved, f"{row.kernel_intensity:.3g}"]


def lecture_text(made: "Sequence[LectureTable]") -> list[str]:
    """As lecture E counts: nothing is fused."""
    lines: list[str] = []
    for one in made:
        rows = [lecture_cells(row) for row in (*one.rows, one.total)]
        lines += [*([f"{one.title}:"] if one.title else []), *table(LECTURE, rows), ""]
    return lines


def table_text(made: "Sequence[LectureTable]", device: "DeviceSpec | None", peak: float) -> list[str]:
    """As this workload's kernels count; with a device, also what limits each row there."""
    lines: list[str] = []
    for one in made:
        each = (*one.rows, one.total)
        rows = [cells(row, one.total) for row in each]
        head: list[str] = [*HEAD]
        if device is not None:
            head.append("limited by")
            for row, shown in zip(each, rows, strict=True):
                shown.append("compute" if row.kernel_intensity > peak / device.bandwidth else "memory")
        lines += [*([f"{one.title}:"] if one.title else []), *table(head, rows), ""]
    return lines


def latex(made: "Sequence[LectureTable]") -> str:
    """One tabular a table, for booktabs."""
    lines = []
    for one in made:
        lines += [r"\begin{tabular}{llrlrr}", r"\toprule", " & ".join(LECTURE) + r" \\", r"\midrule"]
        for row in (*one.rows, one.total):
            shown = lecture_cells(row)
            shown[0] = _latex_words(row.name)
            shown[1], shown[3] = (f"${_latex_math(cell)}$" if cell else "" for cell in (shown[1], shown[3]))
            lines.append(" & ".join(shown) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines)


def _latex_words(text: str) -> str:
    changed = {
        "ᵀ": r"$^\top$", "√d": r"$\sqrt{d}$", "·": r"$\cdot$", "₁": "$_1$", "₂": "$_2$", "_": r"\_",
    }  # fmt: skip
    # The underscore first: what stands for the others has underscores of its own.
    for plain in ("_", *(key for key in changed if key != "_")):
        text = text.replace(plain, changed[plain])
    return text


def _latex_math(text: str) -> str:
    return text.replace("²", "^2")


def totals(estimate: "Estimate", *, lecture: bool) -> list[str]:
    """The model's numbers, below the table."""
    from qkv.config import RNNConfig
    from qkv.cost.lecture_tables import count_attention_parameters
    from qkv.cost.units import format_bytes, format_flops

    config, flops, memory = estimate.config, estimate.flops, estimate.memory
    said = [("parameters", f"{estimate.parameters.total:,}", "")]
    if not isinstance(config, RNNConfig) and config.family != "seq2seq":
        n_layers = config.n_layers
        weights = count_attention_parameters(config, n_layers)
        is_plain = weights == 4 * n_layers * config.d_model**2
        formula = f"4·{n_layers}·{config.d_model}²" if is_plain else "W_Q, W_K, W_V, W_O"
        formula += "; C's slide lacks the 4" if is_plain and lecture else ""
        said.append(("attention weights", f"{weights:,}", formula))
    said += [("FLOPs, forward", f"{flops.forward:,}", format_flops(flops.forward))]
    if flops.useful_forward != flops.forward:
        said.append(("useful of these", f"{flops.useful_forward:,}", format_flops(flops.useful_forward)))
    if flops.backward:
        said.append(("FLOPs, whole step", f"{flops.total:,}", format_flops(flops.total)))
    for name, n in memory.as_dict().items():
        if n:
            said.append((f"memory, {name}", f"{n:,}", format_bytes(n)))
    return [line.rstrip() for line in table(("", "", ""), said, left=1)[1:]]


def plan_text(plan: "TrainingPlan") -> list[str]:
    from qkv.cost.units import format_bytes, format_count, format_flops

    config, step, device = plan.config, plan.step, plan.device
    shape = f"{config.family}, width {config.d_model:,}, vocabulary {config.vocab_size:,}"
    n_layers = config.model_dump().get("n_layers")
    shape += f", {n_layers} layer{'s' if n_layers > 1 else ''}" if n_layers else ""
    many = "" if plan.n_devices == 1 else f"{plan.n_devices} × "
    shared = "" if plan.n_devices == 1 else f", {plan.sharding.value}"
    said = [
        ("model", f"{format_count(step.parameters.total)} parameters: {shape}"),
        ("device", f"{many}{device.title}{shared}"),
    ]
    held = format_bytes(step.memory.peak)
    room = format_bytes(int(device.memory))
    if plan.fits:
        said.append(("batch that fits", f"{plan.batch:,} × {plan.length:,} tokens a device: {held} of {room}"))
    else:
        usable = format_bytes(int(device.usable))
        one = f"one text of {plan.length:,} tokens takes {held} on each device, which has {room}, {usable} of it usable"
        said = [("does not fit", one), ("what would", _way_to_fit(plan)), *said]
    said += [
        ("tokens", f"{format_count(plan.tokens)} in {plan.steps:,} steps"),
        ("work", format_flops(plan.flops)),
        ("time" if plan.fits else "time, if it fitted", _plan_time(plan)),
    ]
    if plan.money is not None:
        money = f"{plan.money:,.2f} at {plan.price:g} a device and hour"
        said.append(("money" if plan.fits else "money, likewise", money))
    width = max(16, *(len(name) + 1 for name, _ in said))
    return [f"{name:{width}} {what}" for name, what in said]


def _plan_time(plan: "TrainingPlan") -> str:
    """What the time is of: a bound that is longer than the work is named."""
    from qkv.cost.units import format_duration

    at_share = f"at {plan.share:.0%} of the peak"
    if plan.bound_by == "computing":
        return f"{format_duration(plan.seconds)} {at_share}; at least {format_duration(plan.at_least)}"
    what = {"sending": "sending between devices", "kernels": "reading and writing each device's memory"}[plan.bound_by]
    return f"{format_duration(plan.seconds)}, bound by {what}; the work alone {format_duration(plan.computing)} {at_share}"


def _way_to_fit(plan: "TrainingPlan") -> str:
    from qkv.cost.units import format_bytes

    found = plan.smallest_fitting_workload()
    if found is None:
        most = f"not even --gpus {plan.device_counts_to_try[-1]} --sharding fsdp --checkpointing"
        casts = plan.blocking_cast_bytes
        why = f": the casts of all weights to 16 bits take {format_bytes(casts)} on every device" if casts else ""
        shorter = "" if casts > plan.device.usable else "a shorter --length or "
        return f"{shorter}a smaller model; {most}{why}"
    options = [f"--gpus {found.n_devices} --sharding fsdp"] if found.n_devices > 1 else []
    return " ".join([*options, *(["--checkpointing"] if found.activation_checkpointing else [])])


def compared_text(compared: Sequence[dict[str, Any]]) -> list[str]:
    """Predicted and measured, operation by operation, in all layers together."""
    rows = []
    for one in compared:
        predicted, measured = one["predicted"], one["measured"]
        rows.append([one["name"], f"{1e3 * predicted:.3f}", f"{1e3 * measured:.3f}", f"{predicted / measured:.2f}"])
    return table(("operation", "predicted ms", "measured ms", "ratio"), rows)


def room_text(estimate: "Estimate", device: "DeviceSpec | None") -> list[str]:
    """Said before any time: nothing, where it fits."""
    from qkv.cost.units import format_bytes

    if device is None or estimate.memory.peak <= device.usable:
        return []
    held, room, usable = (format_bytes(int(n)) for n in (estimate.memory.peak, device.memory, device.usable))
    has = f"{device.name} has {room}, {usable} of it usable"
    return [f"does not fit      it takes {held}, {has}: the times are as if it did"]


def time_text(times: dict[str, Any]) -> list[str]:
    """Bound, calibrated, measured: one line each, and the operations that were timed."""
    said = []
    if "bound" in times:
        one = times["bound"]
        said.append(
            f"time, at least    {_milliseconds(one['seconds'])} on {one['device']} if every kernel ran at its peak "
            f"(computing {one['compute_bound_fraction']:.0%}, the rest moving bytes)"
        )
    if "calibrated" in times:
        one = times["calibrated"]
        said.append(
            f"time, predicted   {_milliseconds(one['seconds'])} on {one['device']}: launching "
            f"{_milliseconds(one['launching'])}, computing {_milliseconds(one['computing'] + one['serial'])}"
        )
    if "measured" in times:
        one = times["measured"]
        said.append(
            f"time, measured    {_milliseconds(one['seconds'])} on {one['device']}: predicted ÷ measured = "
            f"{one['ratio']:.2f}"
        )
        said += [f"{'':17} {one['remark']}"] if one["remark"] else []
        if one["operations"]:
            said += ["", *compared_text(one["operations"])]
            said.append(f"mean error of the operations: {one['mean_error_of_operations']:.0%}")
    return said


def _milliseconds(seconds: float) -> str:
    if seconds < 0.9995:  # what would be written as 1e+03 ms is not
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
