"""The `qkv cost` command."""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from qkv.choices import AttentionKernel, BackendName
from qkv.cli.cost_measurement import validated_measurement_device_name
from qkv.cli.cost_plan import COST_DEVICE_NAMES, calibrate, parse_count, plan
from qkv.cli.help import SimplifiedMetavarCommand
from qkv.cli.output import TERMINAL_WIDTH, print_status
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.config import ModelConfig
    from qkv.cost import Estimate, Workload
    from qkv.cost.calibration import Calibration
    from qkv.cost.devices import DeviceSpec

DEFAULT_COMMAND = "estimate"
"""Name of the hidden subcommand that runs if the first argument is not the name of a subcommand."""
DEFAULT_ROOFLINE_DEVICE = "h200"


class _DefaultCommandGroup(TyperGroup):
    """A command group that treats `qkv cost MODEL` as `qkv cost estimate MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - signature of the base class
        if not args or args[0] not in self.commands:
            args = [DEFAULT_COMMAND, *(args or ["--help"])]
        return super().parse_args(ctx, args)


class _CommandWithoutNameInUsage(SimplifiedMetavarCommand):
    """The default subcommand, whose usage line omits its name."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - signature of the base class
        formatter.write_usage(ctx.parent.command_path, " ".join(self.collect_usage_pieces(ctx)))
        for name in ("plan", "calibrate"):
            formatter.write(f"       {ctx.parent.command_path} {name} [OPTIONS]\n")


cost = typer.Typer(
    cls=_DefaultCommandGroup, rich_markup_mode=None, help="Estimate the parameters, FLOPs, memory and time of a model."
)


@cost.command(DEFAULT_COMMAND, cls=_CommandWithoutNameInUsage, hidden=True)
def estimate_cost(
    model: Annotated[
        str,
        typer.Argument(
            help="Name of a preset or shipped model, or path to a config.json, run folder or Hugging Face model folder."
        ),
    ],
    *,
    batch_size: Annotated[str, typer.Option(metavar="N", help="Batch size.")] = "1",
    seq_len: Annotated[
        str | None, typer.Option(metavar="N", help="Sequence length in tokens (default: the context length).")
    ] = None,
    source_len: Annotated[
        str | None,
        typer.Option(metavar="N", help="Length of the source sequence in tokens, for encoder-decoder models."),
    ] = None,
    new_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Number of new tokens, for --mode generate.")
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", metavar="MODE", help="Workload: forward, train, prefill, decode or generate.")
    ] = "forward",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Data type: float32, float16, bfloat16 or mixed. The default depends on the device."
        ),
    ] = None,
    kernel: Annotated[
        AttentionKernel,
        typer.Option(
            help="Attention kernel: the fused kernel of torch, or an eager implementation that computes scores and "
            "softmax separately."
        ),
    ] = AttentionKernel.FUSED,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Device for which to compute a lower bound on the time and, if qkv has a calibration of it, a "
            f"prediction: {COST_DEVICE_NAMES}.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Calibration file created by `qkv cost calibrate`. By default, the newest applicable file is used."
        ),
    ] = None,
    backend: Annotated[
        BackendName,
        typer.Option(help="Backend for which to predict the time (default: the one that would run the workload)."),
    ] = BackendName.AUTO,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run the workload on this machine, and compare the measured time with the prediction."
        ),
    ] = False,
    as_lecture: Annotated[
        bool,
        typer.Option(
            "--lecture", help="Count operations without fusion, as in lecture E, and list the errors on the slides."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print the lecture's table as LaTeX (booktabs).")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save a figure (.png, .svg or .pdf) with the roofline, the cost by sequence length, the KV cache size "
            "and a comparison with an RNN.",
        ),
    ] = None,
) -> None:
    """Estimate the parameters, FLOPs, memory and time of one step, without building the model.

    Prints a lower bound on the time (with --device), a predicted time (if qkv has a calibration of this machine or of
    --device; it contains one of an H200) and a measured time (with --measure). `qkv cost plan` estimates a complete
    training run. `qkv cost calibrate` measures the kernels of this machine.

    \b
    Examples:
      qkv cost gpt2
      qkv cost llama-3-8b --mode decode --batch-size 8 --seq-len 8192 --device h200
      qkv cost run --mode train --batch-size 32 --measure
      qkv cost gpt2 --mode train --batch-size 8 --plot cost.png
      qkv cost plan --params 124M --tokens 2.5B --device h200 --price 3.5
      qkv cost calibrate
    """
    from qkv.cli.options import resolve_model_config
    from qkv.cost.devices import find_device
    from qkv.cost.estimate import estimate_workload

    output_format = _select_format({"lecture": as_lecture, "json": as_json, "latex": as_latex})
    if plot is not None:
        from qkv.inspection.figures import check_figure_path

        check_figure_path(plot)
    config = resolve_model_config(model)
    device_spec = None if device is None else find_device(device)
    settings = {"mode": mode, "dtype": dtype, "kernel": kernel}
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "source_len": source_len, "n_new_tokens": new_tokens}
    sizes = {
        name: parse_count(size, name.removeprefix("n_").replace("_", "-"))
        for name, size in sizes.items()
        if size is not None
    }
    workload = _build_workload(config, settings, sizes, device=device_spec)
    estimate = estimate_workload(config, workload)
    measured_device = validated_measurement_device_name(estimate, device_spec) if measure else None
    device_name = measured_device or (None if device_spec is None else device_spec.name)
    selected_calibration = _load_applicable_calibration(calibration, estimate, device=device_name)
    times = _bound_and_predicted_times(estimate, device_spec, selected_calibration, backend)
    if measured_device is not None:
        times["measured"] = _measure_and_compare_with_prediction(
            estimate, selected_calibration, measured_device, backend
        )
    if plot is not None:
        _plot_cost_to_file(estimate, device_spec, plot)
    _print_estimate(estimate, device_spec, times, output_format=output_format)


def _select_format(flags: dict[str, bool]) -> str:
    names = [name for name, is_set in flags.items() if is_set]
    if len(names) > 1:
        raise InputError("--lecture, --json and --latex cannot be combined")
    return names[0] if names else "table"


def _plot_cost_to_file(estimate: "Estimate", device: "DeviceSpec | None", path: Path) -> None:
    from qkv.cost.devices import find_device
    from qkv.inspection.cost_figures import plot_cost_overview
    from qkv.inspection.figures import save_figure

    if device is None:
        print_status(f"--plot: using the roofline of {DEFAULT_ROOFLINE_DEVICE} because --device was not given")
    save_figure(plot_cost_overview(estimate, device or find_device(DEFAULT_ROOFLINE_DEVICE)), path)


cost.command(cls=SimplifiedMetavarCommand)(plan)
cost.command(cls=SimplifiedMetavarCommand)(calibrate)


def _build_workload(
    config: "ModelConfig", settings: dict[str, Any], sizes: dict[str, Any], *, device: "DeviceSpec | None"
) -> "Workload":
    from qkv.cost import Mode, Precision, Workload

    for name, choices in (("mode", Mode), ("dtype", Precision)):
        if settings[name] is not None and settings[name] not in tuple(choices):
            raise InputError(f"--{name} {settings[name]}: must be one of {', '.join(choices)}")
    if "seq_len" not in sizes:
        # The prompt must leave room for the new tokens in the context.
        sizes = {**sizes, "seq_len": max(1, config.context_length - sizes.get("n_new_tokens", 1) + 1)}
    if device is not None:
        settings = {**settings, "device_type": device.device_type}
    if settings["dtype"] is None:
        settings["dtype"] = Precision.FLOAT32 if device is None else device.default_dtype(Mode(settings["mode"]))
    return Workload(**settings, **sizes)


def _load_applicable_calibration(
    path: Path | None, estimate: "Estimate", *, device: str | None
) -> "Calibration | None":
    """Load the given calibration, or the newest calibration that applies to the workload.

    A given calibration must also apply to the workload.
    """
    from qkv.cost.calibration import find_newest_calibration, load_calibration

    workload = estimate.workload
    if path is None:
        return find_newest_calibration(estimate.config, workload.mode, workload.dtype, device=device, log=print_status)
    calibration = load_calibration(path)
    calibration.check_precision(workload.mode, workload.dtype)
    if device is not None and not calibration.is_for_device(device):
        raise InputError(
            f"{path}: must be a calibration of {device}, got a calibration of {calibration.device}; create one with: "
            "qkv cost calibrate"
        )
    return calibration


def _bound_and_predicted_times(
    estimate: "Estimate", device: "DeviceSpec | None", calibration: "Calibration | None", backend: BackendName
) -> dict[str, Any]:
    """Compute the roofline bound if a device is given, and the predicted time if there is a calibration."""
    from qkv.cost.devices import roofline_bound
    from qkv.cost.prediction import predict_time

    times: dict[str, Any] = {}
    if device is not None:
        fits = estimate.memory.peak <= device.usable_memory
        times["bound"] = {**roofline_bound(estimate, device).as_dict(), "fits": fits, "source": device.source}
    if calibration is not None:
        prediction = predict_time(estimate.config, estimate.workload, calibration, backend=backend)
        source = {"device": calibration.device, "date": calibration.date}
        times["calibrated"] = {**source, **prediction.as_dict(), "bound_by": prediction.bound_by}
    return times


def _measure_and_compare_with_prediction(
    estimate: "Estimate", calibration: "Calibration | None", device: str, backend: BackendName
) -> dict[str, Any]:
    """Time one step with random weights and compare it with the prediction.

    A forward pass of the eager backend is also compared operation by operation.
    """
    from qkv.cli.options import select_device
    from qkv.cli.process import retain_freed_memory
    from qkv.cost import Mode
    from qkv.cost.prediction import predict_time
    from qkv.training.benchmark_steps import (
        build_random_model,
        configure_model_and_build_step,
        measure_backend_step,
    )
    from qkv.training.operation_comparison import compare_operations
    from qkv.training.timer import Timer

    if estimate.workload.mode is Mode.GENERATE:
        raise InputError("--measure does not support --mode generate; use --mode prefill or --mode decode")
    if calibration is None:
        raise InputError(_missing_calibration_message(estimate.workload, device))
    retain_freed_memory()  # the calibration does the same
    timer = Timer(select_device(calibration.kind))
    model = build_random_model(estimate.config, timer.device, estimate.workload.dtype)
    prediction = predict_time(estimate.config, estimate.workload, calibration, backend=backend)
    seconds = measure_backend_step(model, estimate.workload, prediction.backend, timer, seconds=0.5)
    operations = []
    if prediction.backend == BackendName.EAGER and estimate.workload.mode is not Mode.TRAIN:
        step = configure_model_and_build_step(model, estimate.workload)
        operations = compare_operations(model, step, prediction, timer)
    errors = [abs(operation.predicted / operation.measured - 1) for operation in operations]
    return {
        "device": calibration.device,
        "backend": prediction.backend,
        "seconds": seconds,
        "ratio": prediction.seconds / seconds,
        "operations": [operation.__dict__ for operation in operations],
        "mean_operation_error": sum(errors) / len(errors) if errors else None,
    }


def _missing_calibration_message(workload: "Workload", device: str) -> str:
    from qkv.cost import Mode, Precision

    is_training = workload.mode is Mode.TRAIN
    # Maps each workload data type to the data type that must be calibrated for it.
    calibrated_dtypes = {
        dtype.training_precision if is_training else dtype: dtype for dtype in (Precision.FLOAT32, Precision.BFLOAT16)
    }
    description = f"{workload.mode.value} at {workload.dtype.value}"
    if workload.dtype not in calibrated_dtypes:
        supported = " or ".join(f"--dtype {dtype.value}" for dtype in calibrated_dtypes)
        return f"--measure: calibration is not supported for {description}; use {supported}"
    kind = "cpu" if device.startswith("cpu") else "cuda"
    command = f"qkv cost calibrate --device {kind} --dtype {calibrated_dtypes[workload.dtype].value}"
    return f"--measure: no calibration of {device} for {description}; create one in a few minutes with: {command}"


def _time_unit(workload: "Workload") -> str:
    from qkv.cost import Mode

    if workload.mode is not Mode.DECODE:
        return ""
    return " per token" if workload.batch_size == 1 else f" per step of {workload.batch_size:,} tokens"


def _print_estimate(
    estimate: "Estimate", device: "DeviceSpec | None", times: dict[str, Any], *, output_format: str
) -> None:
    from qkv.cli import cost_report
    from qkv.cost.estimate import CONVENTIONS
    from qkv.cost.explanation import explain_crossover_intensity_or_recurrence
    from qkv.cost.lecture_tables import lecture_errata, lecture_tables

    tables = lecture_tables(estimate)
    if output_format == "latex":
        print(cost_report.format_latex_tables(tables))
        return
    if output_format == "json":
        rows = [{"pass": table.title, **row.as_dict()} for table in tables for row in (*table.rows, table.total)]
        errata = lecture_errata(estimate.config)
        print(json.dumps({**estimate.as_dict(), "lecture": rows, "errata": errata, "time": times}))
        return
    is_lecture = output_format == "lecture"
    if is_lecture:
        rows = cost_report.format_lecture_tables(tables)
        notes = [f"Error on the slides: {erratum}" for erratum in lecture_errata(estimate.config)]
    else:
        peak_flops = 0.0 if device is None else device.peak_flops(estimate.workload.dtype)
        rows = cost_report.format_cost_tables(tables, device, peak_flops)
        notes = [cost_report.COMPLEXITY_LEGEND]
    notes = [*explain_crossover_intensity_or_recurrence(estimate.config, estimate.workload), *notes, CONVENTIONS]
    totals = [
        *cost_report.format_parameters_flops_and_memory(estimate, with_slide_notes=is_lecture),
        *cost_report.format_memory_warning(estimate, device),
        *cost_report.format_times_and_operation_comparison(times, unit=_time_unit(estimate.workload)),
    ]
    wrapped = [textwrap.fill(note, TERMINAL_WIDTH) for note in notes]
    print("\n".join([estimate.title, "", *totals, "", *rows, *wrapped]))
