"""What a model costs, as the page draws it: table, roofline, memory, and curves against the context."""

from typing import Any

from qkv.choices import AttentionKernel
from qkv.config import PRESETS, BERTConfig, GPTConfig, ModelConfig, preset
from qkv.cost import DeviceType, Estimate, Mode, Precision, Workload, cache_bytes
from qkv.cost.calibration import Calibration, find_calibration
from qkv.cost.devices import DEVICES, DeviceSpec, find_device
from qkv.cost.estimate import estimate_workload
from qkv.cost.lecture_tables import lecture_errata, lecture_tables
from qkv.cost.prediction import predict_time
from qkv.cost.roofline import roofline_bound
from qkv.serving.schemas import AskCost


def choices() -> dict[str, Any]:
    devices = [
        {name: getattr(one, name) for name in ("name", "title", "source", "float32", "half", "bandwidth", "memory")}
        for one in DEVICES.values()
    ]
    return {
        "modes": list(Mode), "dtypes": list(Precision), "kernels": list(AttentionKernel), "devices": devices,
        "presets": list(PRESETS),
    }  # fmt: skip


def cost(asked: AskCost, config: ModelConfig | None) -> dict[str, Any]:
    """`config`: of the model that was asked for; None: a preset was."""
    shape = preset(asked.preset) if config is None and asked.preset is not None else config
    assert shape is not None
    device = find_device(asked.device)
    work = workload(asked, shape, device)
    estimate = estimate_workload(shape, work)
    roof = roofline_bound(estimate, device)
    tables = lecture_tables(estimate)
    calibration = find_calibration(work.mode, work.dtype, device=device.name)
    return {
        "title": estimate.title,
        **estimate.as_dict(),
        "lecture": [{"pass": one.title, **row.as_dict()} for one in tables for row in (*one.rows, one.total)],
        "slips": list(lecture_errata(shape)),
        "rows": estimate.rows(peak=device.peak(work.dtype), bandwidth=device.bandwidth),
        "roofline": {
            "device": device.title, "source": device.source, "peak": device.peak(work.dtype),
            "bandwidth": device.bandwidth, "memory": device.memory,
            "dots": [
                {"part": one.part, "operation": one.name, "flops": one.flops + one.elementwise_flops,
                 "bytes": one.n_bytes, "intensity": one.intensity, "seconds": roof.of(one),
                 "bound_by": roof.bound_by(one)}
                for one in roof.launches
            ],
        },
        "time": {"bound": roof.as_dict(), "calibrated": _calibrated(estimate, calibration)},
        "curve": curve(shape, work, device),
    }  # fmt: skip


def workload(asked: AskCost, config: ModelConfig, device: DeviceSpec) -> Workload:
    room = max(1, config.context_length - (asked.new or 1) + 1)
    return Workload(
        mode=asked.mode, batch=asked.batch, seq_len=room if asked.length is None else asked.length,
        source_len=asked.source_length, n_new_tokens=asked.new, dtype=asked.dtype, kernel=asked.kernel,
        device_type=DeviceType.CPU if device.name == "cpu" else DeviceType.CUDA,
    )  # fmt: skip


def curve(config: ModelConfig, work: Workload, device: DeviceSpec) -> list[dict[str, Any]]:
    """Of a step that decodes one token, the context growing to the model's own."""
    if isinstance(config, BERTConfig) or (isinstance(config, GPTConfig) and not config.causal):
        return []
    dtype = work.dtype if work.dtype is not Precision.MIXED else Precision.BFLOAT16
    lengths = sorted({*(2**i for i in range(4, 24) if 2**i < config.context_length), config.context_length})
    calibration = find_calibration(Mode.DECODE, dtype, device=device.name)
    points = []
    for n in lengths:
        step = Workload(mode=Mode.DECODE, batch=work.batch, seq_len=n, dtype=dtype, kernel=work.kernel,
                        device_type=work.device_type)  # fmt: skip
        made = estimate_workload(config, step)
        known = _calibrated(made, calibration)
        points.append({
            "length": n, "cache_bytes": cache_bytes(config, batch=work.batch, length=n, dtype=dtype),
            "decode_bound_ms": 1000 * roofline_bound(made, device).seconds,
            "decode_predicted_ms": None if known is None else 1000 * known["seconds"],
        })  # fmt: skip
    return points


def _calibrated(estimate: Estimate, calibration: Calibration | None) -> dict[str, Any] | None:
    if calibration is None:
        return None
    made = predict_time(estimate.config, estimate.work, calibration)
    return {"device": calibration.device, **made.as_dict(), "bound_by": made.bound_by}
