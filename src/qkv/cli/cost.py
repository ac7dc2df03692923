"""`qkv cost`: parameters, FLOPs, bytes and time of a model, before they are spent."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from qkv.choices import AttentionKernel
from qkv.cli.cost_measurement import place_to_measure
from qkv.cli.cost_plan import KNOWN, AsJSON, Length, calibrate, count, plan
from qkv.cli.help import Command
from qkv.cli.text_tables import WIDTH
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.config import ModelConfig
    from qkv.cost import Estimate, Workload
    from qkv.cost.calibration import Calibration
    from qkv.cost.devices import DeviceSpec

SHOW = "of"
ROOF = "h200"
"""Whose roofline is drawn where no device is named."""
OWN_ROAD = "this timed the model's own step; writing text takes a faster one of the same results where there is one"


class _ModelFirst(TyperGroup):
    """`qkv cost MODEL` without a further word: whatever is no command is a model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - the command library's own
        if not args or args[0] not in self.commands:
            args = [SHOW, *(args or ["--help"])]
        return super().parse_args(ctx, args)


class _Unnamed(Command):
    """Its name is never typed, so it is not shown either."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - the command library's own
        formatter.write_usage(ctx.parent.command_path, " ".join(self.collect_usage_pieces(ctx)))
        for name in ("plan", "calibrate"):
            formatter.write(f"       {ctx.parent.command_path} {name} [OPTIONS]\n")


cost = typer.Typer(cls=_ModelFirst, rich_markup_mode=None, help="What a model costs, before it is spent.")

Model = Annotated[str, typer.Argument(help="A preset, config.json, a run, a Hugging Face folder, or a shipped model.")]
Batch = Annotated[str, typer.Option(metavar="B", help="Texts at once.")]
Source = Annotated[str | None, typer.Option(metavar="M", help="Tokens of the source, where there is one.")]
New = Annotated[str | None, typer.Option(metavar="K", help="Tokens to write, in --mode generate.")]
What = Annotated[str, typer.Option("--mode", help="forward, train, prefill, decode or generate.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16, bfloat16 or mixed; by the device unless said.")]
Road = Annotated[AttentionKernel, typer.Option(help="Attention by torch's fused kernel, or plain.")]
Bounding = Annotated[str | None, typer.Option(help=f"For the least time: {KNOWN}.")]
Calibrated = Annotated[Path | None, typer.Option(help="A file of `qkv cost calibrate`; the newest unless said.")]
Measure = Annotated[bool, typer.Option("--measure", help="Run it here, and compare with the prediction.")]
AsLecture = Annotated[bool, typer.Option("--lecture", help="As lecture E counts, unfused, and where slides slip.")]
AsLatex = Annotated[bool, typer.Option("--latex", help="The lecture's table for LaTeX (booktabs).")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Roofline, length, cache, RNN: PNG, SVG or PDF.")]


@cost.command(SHOW, cls=_Unnamed, hidden=True)
def of(
    model: Model, *, batch: Batch = "1", length: Length = None, source: Source = None, new: New = None,
    mode: What = "forward", dtype: Dtype = None, kernel: Road = AttentionKernel.FUSED, device: Bounding = None,
    calibration: Calibrated = None, measure: Measure = False, as_lecture: AsLecture = False, as_json: AsJSON = False,
    as_latex: AsLatex = False, plot: Plot = None,
) -> None:  # fmt: skip
    """What a model costs, before it is spent: parameters, FLOPs, bytes and time of one step.

    Times come as a bound (--device: no kernel can be faster there), as a prediction where this device was calibrated,
    and measured (--measure), with the error. `plan` is about a whole training run, `calibrate` about this device.

    \b
    Examples:
      qkv cost gpt2
      qkv cost llama-3-8b --mode decode --batch 8 --length 8192 --device h200
      qkv cost run --mode train --batch 32 --measure
      qkv cost gpt2 --mode train --batch 8 --plot cost.png
      qkv cost plan --params 124M --tokens 2.5B --device h200 --price 3.5
      qkv cost calibrate
    """
    from qkv.cli.config_lookup import config_of
    from qkv.cost.devices import find_device
    from qkv.cost.estimate import estimate_workload

    form = _form({"lecture": as_lecture, "json": as_json, "latex": as_latex})
    if plot is not None:
        from qkv.inspection.figures import check_figure_path

        check_figure_path(plot)
    config = config_of(model)
    target = None if device is None else find_device(device)
    settings = {"mode": mode, "dtype": dtype, "kernel": kernel}
    sizes = {"batch": batch, "length": length, "source_length": source, "new": new}
    sizes = {name: count(size, name.removesuffix("_length")) for name, size in sizes.items() if size is not None}
    work = _work(config, settings, sizes, device=target)
    estimate = estimate_workload(config, work)
    here = place_to_measure(estimate, target) if measure else None
    known = _calibration(calibration, work, device=here or (None if target is None else target.name))
    times = _times(estimate, target, known)
    if here is not None:
        times["measured"] = _measured(estimate, known, here)
    if plot is not None:
        _draw(estimate, target, plot)
    _print(estimate, target, times, form=form)


def _form(asked: dict[str, bool]) -> str:
    names = [name for name, is_asked in asked.items() if is_asked]
    if len(names) > 1:
        raise InputError("--lecture, --json and --latex: choose one")
    return names[0] if names else "table"


def _draw(estimate: "Estimate", device: "DeviceSpec | None", plot: Path) -> None:
    from qkv.cli.progress import say
    from qkv.cost.devices import find_device
    from qkv.inspection.cost_figures import plot_cost
    from qkv.inspection.figures import save_figure

    if device is None:
        say(f"--plot: the roofline is that of {ROOF}, as no --device is given")
    save_figure(plot_cost(estimate, device or find_device(ROOF)), plot)


cost.command(cls=Command)(plan)
cost.command(cls=Command)(calibrate)


def _work(
    config: "ModelConfig", settings: dict[str, Any], sizes: dict[str, Any], *, device: "DeviceSpec | None"
) -> "Workload":
    from qkv.cost import Mode, Precision, Workload

    for name, known in (("mode", Mode), ("dtype", Precision)):
        if settings[name] is not None and settings[name] not in tuple(known):
            raise InputError(f"--{name} {settings[name]}: it is one of {', '.join(known)}")
    if "length" not in sizes:
        # A generation needs room for what it writes.
        sizes = {**sizes, "length": max(1, config.context_length - sizes.get("new", 1) + 1)}
    if device is not None:
        settings = {**settings, "backend": device.backend}
    if settings["dtype"] is None:
        settings["dtype"] = Precision.FLOAT32 if device is None else device.default_dtype(Mode(settings["mode"]))
    return Workload(**settings, **sizes)


def _calibration(path: Path | None, work: "Workload", *, device: str | None) -> "Calibration | None":
    """The file that was named, which must fit; else the newest that does."""
    from qkv.cost.calibration import find_calibration, load_calibration

    if path is None:
        return find_calibration(work.mode, work.dtype, device=device)
    found = load_calibration(path)
    found.check(work.mode, work.dtype)
    if device is not None and not found.is_of(device):
        raise InputError(f"{path}: is a calibration of {found.device}, not of {device}: qkv cost calibrate")
    return found


def _times(estimate: "Estimate", device: "DeviceSpec | None", calibration: "Calibration | None") -> dict[str, Any]:
    from qkv.cost.prediction import predict_time
    from qkv.cost.roofline import roofline_bound

    times: dict[str, Any] = {}
    if device is not None:
        fits = estimate.memory.peak <= device.usable
        times["bound"] = {**roofline_bound(estimate, device).as_dict(), "fits": fits, "source": device.source}
    if calibration is not None:
        prediction = predict_time(estimate.config, estimate.work, calibration)
        times["calibrated"] = {"device": calibration.device, **prediction.as_dict(), "bound_by": prediction.bound_by}
    return times


def _measured(estimate: "Estimate", calibration: "Calibration | None", device: str) -> dict[str, Any]:
    from qkv.cli.device_options import chosen_device
    from qkv.cost import Mode
    from qkv.cost.prediction import predict_time
    from qkv.training.benchmark_steps import build_random_model, build_step
    from qkv.training.operation_comparison import compare_operations
    from qkv.training.timer import Timer, retain_freed_memory

    if estimate.work.mode is Mode.GENERATE:
        raise InputError("--measure times one step; --mode prefill and --mode decode are a generation's")
    if calibration is None:
        raise InputError(_how_to_calibrate(estimate.work, device))
    retain_freed_memory()  # as the calibration did
    timer = Timer(chosen_device(calibration.kind))
    model = build_random_model(estimate.config, timer.device, estimate.work.dtype)
    step = build_step(model, estimate.work)
    seconds = timer.measure_latency(step, seconds=0.5)
    prediction = predict_time(estimate.config, estimate.work, calibration)
    parts = [] if estimate.work.mode is Mode.TRAIN else compare_operations(model, step, prediction, timer)
    has_faster = estimate.work.mode is Mode.DECODE and estimate.config.family != "rnn"
    errors = [abs(one.predicted / one.measured - 1) for one in parts]
    return {
        "device": calibration.device, "seconds": seconds, "ratio": prediction.seconds / seconds,
        "operations": [one.__dict__ for one in parts],
        "mean_error_of_operations": sum(errors) / len(errors) if errors else None,
        "remark": OWN_ROAD if has_faster else None,
    }  # fmt: skip


def _how_to_calibrate(work: "Workload", device: str) -> str:
    from qkv.cost import Mode, Precision

    is_training = work.mode is Mode.TRAIN
    serves = {one.training_precision if is_training else one: one for one in (Precision.FLOAT32, Precision.BFLOAT16)}
    what = f"{work.mode.value} at {work.dtype.value}"
    if work.dtype not in serves:
        known = " or ".join(f"--dtype {one.value}" for one in serves)
        return f"--measure: no calibration is for {what}: take {known}"
    kind = "cpu" if device.startswith("cpu") else "cuda"
    command = f"qkv cost calibrate --device {kind} --dtype {serves[work.dtype].value}"
    lacking = f"there is no calibration of {device} for {what} to compare with"
    return f"--measure: {lacking}; make it, in about a minute: {command}"


def _print(estimate: "Estimate", device: "DeviceSpec | None", times: dict[str, Any], *, form: str) -> None:
    from qkv.cli import cost_report
    from qkv.cost.estimate import CONVENTIONS
    from qkv.cost.explanation import explain_costs
    from qkv.cost.lecture_tables import lecture_errata, lecture_tables

    made = lecture_tables(estimate)
    if form == "latex":
        print(cost_text.latex(made))
        return
    if form == "json":
        rows = [{"pass": one.title, **row.as_dict()} for one in made for row in (*one.rows, one.total)]
        print(json.dumps({**estimate.as_dict(), "lecture": rows, "slips": lecture_errata(estimate.config), "time": times}))
        return
    by_lecture = form == "lecture"
    peak = 0.0 if device is None else device.peak(estimate.work.dtype)
    rows = cost_text.lecture_text(made) if by_lecture else cost_text.table_text(made, device, peak)
    slipped = [f"Slip: {one}" for one in lecture_errata(estimate.config)] if by_lecture else []
    said = [*explain_costs(estimate.config, estimate.work), *slipped]
    said += [*([] if by_lecture else [f"Grows as: {cost_text.LETTERS}."]), CONVENTIONS]
    totals = [*cost_text.totals(estimate, lecture=by_lecture), *cost_text.room_text(estimate, device)]
    totals += cost_text.time_text(times)
    wrapped = [textwrap.fill(one, WIDTH) for one in said]
    print("\n".join([estimate.title, "", *totals, "", *rows, *wrapped]))
