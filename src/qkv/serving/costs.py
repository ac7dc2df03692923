"""Build the cost responses: estimates, roofline, memory use, and decoding cost as a function of the context length."""

from typing import Any

from qkv.choices import AttentionKernel
from qkv.config import PRESETS, BERTConfig, GPTConfig, ModelConfig, preset
from qkv.cost import DeviceType, Estimate, Mode, Precision, Workload, cache_bytes
from qkv.cost.calibration import Calibration, find_newest_calibration
from qkv.cost.devices import DEVICES, DeviceSpec, find_device, roofline_bound
from qkv.cost.estimate import estimate_workload
from qkv.cost.lecture_tables import lecture_errata, lecture_tables
from qkv.cost.prediction import predict_time
from qkv.serving.schemas import CostRequest


def cost_request_choices() -> dict[str, Any]:
    """Return the valid values for each field of a cost request."""
    names = ("name", "title", "source", "float32", "half", "bandwidth", "memory")
    return {
        "modes": list(Mode),
        "dtypes": list(Precision),
        "kernels": list(AttentionKernel),
        "devices": [{name: getattr(device, name) for name in names} for device in DEVICES.values()],
        "presets": list(PRESETS),
    }


def cost_response(request: CostRequest, config: ModelConfig | None) -> dict[str, Any]:
    """Return the response of `/api/cost`.

    `config` is the config of the requested model, or `None` if the request names a preset.
    """
    model_config = preset(request.preset) if config is None and request.preset is not None else config
    assert model_config is not None
    device = find_device(request.device)
    work = _workload_of_request(request, model_config, device)
    estimate = estimate_workload(model_config, work)
    roof = roofline_bound(estimate, device)
    tables = lecture_tables(estimate)
    calibration = find_newest_calibration(model_config, work.mode, work.dtype, device=device.name)
    return {
        "title": estimate.title,
        **estimate.as_dict(),
        "lecture": [{"pass": table.title, **row.as_dict()} for table in tables for row in (*table.rows, table.total)],
        "errata": list(lecture_errata(model_config)),
        "rows": estimate.operation_rows(peak=device.peak_flops(work.dtype), bandwidth=device.bandwidth),
        "roofline": {
            "device": device.title,
            "source": device.source,
            "peak": device.peak_flops(work.dtype),
            "bandwidth": device.bandwidth,
            "memory": device.memory,
            "operations": [
                {
                    "part": launch.part,
                    "operation": launch.name,
                    "flops": launch.flops + launch.elementwise_flops,
                    "bytes": launch.n_bytes,
                    "intensity": launch.intensity,
                    "seconds": roof.kernel_seconds(launch),
                    "bound_by": roof.bound_by(launch),
                }
                for launch in roof.launches
            ],
        },
        "time": {"bound": roof.as_dict(), "calibrated": _predict_calibrated_time(estimate, calibration)},
        "context_curve": _decode_cost_by_context(model_config, work, device),
    }


def _workload_of_request(request: CostRequest, config: ModelConfig, device: DeviceSpec) -> Workload:
    longest = max(1, config.context_length - (request.n_new_tokens or 1) + 1)
    return Workload(
        mode=request.mode,
        batch_size=request.batch_size,
        seq_len=longest if request.seq_len is None else request.seq_len,
        source_len=request.source_len,
        n_new_tokens=request.n_new_tokens,
        dtype=request.dtype,
        kernel=request.kernel,
        device_type=DeviceType.CPU if device.name == "cpu" else DeviceType.CUDA,
    )


def _decode_cost_by_context(config: ModelConfig, work: Workload, device: DeviceSpec) -> list[dict[str, Any]]:
    """Return the cache size and the time of one decode step for several context lengths up to the model's maximum."""
    if isinstance(config, BERTConfig) or (isinstance(config, GPTConfig) and not config.causal):
        return []
    dtype = work.dtype if work.dtype is not Precision.MIXED else Precision.BFLOAT16
    lengths = sorted({*(2**i for i in range(4, 24) if 2**i < config.context_length), config.context_length})
    calibration = find_newest_calibration(config, Mode.DECODE, dtype, device=device.name)
    points = []
    for n in lengths:
        step = Workload(
            mode=Mode.DECODE,
            batch_size=work.batch_size,
            seq_len=n,
            dtype=dtype,
            kernel=work.kernel,
            device_type=work.device_type,
        )
        estimate = estimate_workload(config, step)
        prediction = _predict_calibrated_time(estimate, calibration)
        points.append(
            {
                "seq_len": n,
                "cache_bytes": cache_bytes(config, batch_size=work.batch_size, seq_len=n, dtype=dtype),
                "decode_bound_ms": 1000 * roofline_bound(estimate, device).seconds,
                "decode_predicted_ms": None if prediction is None else 1000 * prediction["seconds"],
            }
        )
    return points


def _predict_calibrated_time(estimate: Estimate, calibration: Calibration | None) -> dict[str, Any] | None:
    if calibration is None:
        return None
    prediction = predict_time(estimate.config, estimate.workload, calibration)
    return {"device": calibration.device, **prediction.as_dict(), "bound_by": prediction.bound_by}
