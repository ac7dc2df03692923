"""Predict the time of a step on a calibrated device, for the backend that runs it.

The time of a fast backend is predicted from reference steps (see `reference_steps`), and the time of the eager backend
from measured kernels. With kernels, launching and computing are sequential on a CPU, so their times are added. A GPU
computes while the CPU launches, so the slower of the two determines the time of each phase. The logits come last and
overlap with nothing. A recurrence is sequential, so its time is added as well.

A fast backend on a GPU combines both unless it replays the step as a CUDA graph: the launches come from its reference
steps, and the computation from the kernels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from qkv.choices import AttentionKernel, BackendName, CellKind, PositionKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig, TransformerConfig
from qkv.cost.backends import is_captured, select_backend
from qkv.cost.calibration import REFERENCE_LENGTH, Calibration, ReferenceStep
from qkv.cost.memory import cache_bytes
from qkv.cost.operation import LOGITS, LOSS, Operation
from qkv.cost.operations import count_parameters, list_operations
from qkv.cost.reference_steps import fit_reference_launches, fit_reference_model
from qkv.cost.workload import Mode, Precision, Workload

EAGER_FAMILY = "eager"
"""Name under which the calibration stores the launch overhead of a GPT with eager attention."""
ALIGNMENT = 8
"""Row lengths that are not a multiple of this number make GPU matrix reads slower, by up to a factor of 8."""
CALIBRATED_WEIGHT_BYTES = {"cpu": 2**24, "cuda": 2**27}
"""Number of weight bytes used to calibrate matmuls: more than fits in the cache of a CPU core or a GPU."""
HALF_INPUT_OPERATIONS = ("out_proj", "down_proj")
"""Matmuls whose input is already in 16 bits under autocast. Other matmuls read the float32 residual stream."""
FORWARD_FRACTION = 1 / 3
"""Fraction of the matmuls in a training step that belong to the forward pass."""


@dataclass(frozen=True, kw_only=True)
class PredictedOperationTime:
    """The predicted time of one operation in seconds, summed over all its runs.

    In training, the time includes the backward pass.
    """

    part: str
    name: str
    runs: int
    seconds: float


class StepStages(NamedTuple):
    """Launch and compute time of each stage in seconds. A model without an encoder has only a decoder stage."""

    encoder: tuple[float, float]
    decoder: tuple[float, float]
    head_with_loss: tuple[float, float]
    backward: tuple[float, float]
    update: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class TimePrediction:
    """The predicted time of a step on one backend.

    The time is split into CPU launches, device computation and sequential recurrences. For a fast backend, launches
    are the time outside the layers.
    """

    backend: str
    seconds: float
    launch_seconds: float
    compute_seconds: float
    recurrence_seconds: float
    operation_times: tuple[PredictedOperationTime, ...]

    @property
    def bound_by(self) -> str:
        """The part that takes longer: `launch`, or `compute` (which includes recurrences)."""
        return "launch" if self.launch_seconds > self.compute_seconds + self.recurrence_seconds else "compute"

    def as_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "seconds": self.seconds,
            "launch_seconds": self.launch_seconds,
            "compute_seconds": self.compute_seconds,
            "recurrence_seconds": self.recurrence_seconds,
        }


def predict_time(
    config: ModelConfig, workload: Workload, calibration: Calibration, *, backend: str = BackendName.AUTO
) -> TimePrediction:
    """Predict the time of a step or of a generation on the given backend (default: the one that would run it).

    The calibration must support the precision of the workload.
    """
    calibration.check_precision(workload.mode, workload.dtype)
    if workload.mode is Mode.GENERATE:
        return _predict_generation(config, workload, calibration, backend)
    selected = select_backend(config, workload, calibration.kind, backend)
    steps = calibration.get_reference_steps(selected, config.family, workload.mode)
    if calibration.is_asynchronous and not is_captured(config, workload, selected):
        if steps or (isinstance(config, RNNConfig) and selected != BackendName.EAGER):
            return _predict_from_launches_and_kernels(config, workload, calibration, steps, selected)
    elif steps:
        return _predict_from_reference_steps(config, workload, calibration, steps, selected)
    # A backend without reference steps runs the kernels of the eager backend.
    return _predict_from_kernels(config, workload, calibration, selected)


def _predict_generation(
    config: ModelConfig, workload: Workload, calibration: Calibration, backend: str
) -> TimePrediction:
    """Predict the time of a generation by adding the times of the prefill and the decode steps.

    All decode steps are predicted at the mean length because the time grows linearly with the length.
    """
    step_workload = workload.replace(n_new_tokens=None, mode=Mode.DECODE)
    prefill = predict_time(
        config, step_workload.replace(mode=Mode.PREFILL, logits_to_keep=1), calibration, backend=backend
    )
    mean_len = (workload.seq_len + 1 + workload.final_seq_len) // 2
    step = predict_time(config, step_workload.replace(seq_len=max(1, mean_len)), calibration, backend=backend)
    n = workload.final_seq_len - workload.seq_len
    names = ("seconds", "launch_seconds", "compute_seconds", "recurrence_seconds")
    sums = {name: getattr(prefill, name) + n * getattr(step, name) for name in names}
    decode = [replace(time, runs=n * time.runs, seconds=n * time.seconds) for time in step.operation_times]
    return TimePrediction(backend=step.backend, **sums, operation_times=(*prefill.operation_times, *decode))


def _predict_from_kernels(
    config: ModelConfig, workload: Workload, calibration: Calibration, backend: str
) -> TimePrediction:
    times = tuple(_OperationTimePredictor(config, workload, calibration).operation_and_update_times())
    recurrence = sum((time.seconds for time in times if time.name == "recurrence"), 0.0)
    compute = sum(time.seconds for time in times) - recurrence
    launch = _launch_seconds(config, workload, calibration)
    if calibration.is_asynchronous:
        # The host reads the loss and the gradient norm before the update, so the device is idle when the update's first
        # kernel is launched.
        *passes, update = _launch_compute_seconds_by_stage(config, workload, calibration, times)
        seconds = _overlapped_launch_and_compute_seconds(passes) + max(update) + recurrence
    else:
        seconds = launch + compute + recurrence
    return TimePrediction(
        backend=backend,
        seconds=seconds,
        launch_seconds=launch,
        compute_seconds=compute,
        recurrence_seconds=recurrence,
        operation_times=times,
    )


def _predict_from_launches_and_kernels(
    config: ModelConfig,
    workload: Workload,
    calibration: Calibration,
    steps: tuple[ReferenceStep, ...],
    backend: str,
) -> TimePrediction:
    """Predict a step of a fast backend that launches every kernel on a GPU.

    The GPU computes the layers while the CPU launches them. Training steps read their metrics one step late, so there
    the complete step overlaps.
    """
    if workload.mode is Mode.PREFILL and workload.logits_to_keep is None:
        workload = workload.replace(logits_to_keep=1)  # engines compute only the logits of the last token
    times = tuple(_OperationTimePredictor(config, workload, calibration).operation_and_update_times())
    recurrence = sum((time.seconds for time in times if time.name == "recurrence"), 0.0)
    compute = sum(time.seconds for time in times) - recurrence
    if steps:
        launches = fit_reference_launches(steps)
        base = launches.base_seconds(config, workload)
        layers = launches.layer_seconds(config, workload) * _relative_layer_launches(config, workload, calibration)
    else:
        base = calibration.get_launch_overhead(f"{launch_overhead_family(config)}.{workload.mode.value}").base
        layers = _launch_seconds(config, workload, calibration) - base
        base += _token_choice_seconds(config, workload, calibration, backend)
    if workload.mode is Mode.TRAIN:
        seconds = max(base + layers, compute + recurrence)
    else:
        seconds = base + max(layers, compute) + recurrence
    return TimePrediction(
        backend=backend,
        seconds=seconds,
        launch_seconds=base + layers,
        compute_seconds=compute,
        recurrence_seconds=recurrence,
        operation_times=times,
    )


def _relative_layer_launches(config: ModelConfig, workload: Workload, calibration: Calibration) -> float:
    """Return the launch overhead of a layer relative to that of the reference models, which have no rotary positions.

    It is measured for the eager backend.
    """
    family, reference_family = launch_overhead_family(config), config.family
    if family == reference_family:
        return 1.0
    overhead, reference = (
        calibration.get_launch_overhead(f"{name}.{workload.mode.value}").per_layer
        for name in (family, reference_family)
    )
    return overhead / reference if reference else 1.0


def _token_choice_seconds(config: ModelConfig, workload: Workload, calibration: Calibration, backend: str) -> float:
    """Return the time to choose the next tokens of an RNN, for which there are no reference steps.

    The launch overhead includes only the model. A Transformer is decoded by the same search, so the difference between
    its reference steps and its launch overhead is used.
    """
    steps = calibration.get_reference_steps(backend, "seq2seq", Mode.DECODE)
    if workload.mode is not Mode.DECODE or not steps:
        return 0.0
    overhead = calibration.get_launch_overhead(f"seq2seq.{Mode.DECODE.value}")
    return max(0.0, fit_reference_launches(steps).base_seconds(config, workload) - overhead.base)


def _predict_from_reference_steps(
    config: ModelConfig,
    workload: Workload,
    calibration: Calibration,
    steps: tuple[ReferenceStep, ...],
    backend: str,
) -> TimePrediction:
    parts = fit_reference_model(steps).predict(config, workload)
    times = [("encoder.blocks", parts.encoder_layers), ("blocks", parts.layers), (LOGITS, parts.logits)]
    if workload.mode is Mode.DECODE:
        times.append(("attention", parts.attention))
    else:
        times.append(("attention", _additional_attention_seconds(config, workload, calibration)))
        times.append(("heads", _unmeasured_head_seconds(config, workload, calibration)))
    compute = sum(seconds for _, seconds in times)
    return TimePrediction(
        backend=backend,
        seconds=parts.base + compute,
        launch_seconds=parts.base,
        compute_seconds=compute,
        recurrence_seconds=0.0,
        operation_times=tuple(
            PredictedOperationTime(part=part, name=part, runs=1, seconds=seconds) for part, seconds in times if seconds
        ),
    )


def _additional_attention_seconds(config: ModelConfig, workload: Workload, calibration: Calibration) -> float:
    """Return the time by which attention exceeds that over as many tokens in sequences of the reference length.

    All backends run the same attention kernels of torch in these modes, so the difference is that of the eager backend.
    """
    source_len = workload.n_source if isinstance(config, Seq2SeqConfig) else None
    reference = workload.replace(
        batch_size=max(1, round(workload.n_tokens / REFERENCE_LENGTH)),
        seq_len=min(REFERENCE_LENGTH, workload.n_tokens, config.context_length),
        logits_to_keep=None,
    )
    if source_len is not None:
        # The reference steps have as many source tokens per sequence as target tokens, or one target token.
        reference = reference.replace(
            batch_size=max(1, round(workload.batch_size * source_len / REFERENCE_LENGTH)),
            seq_len=min(REFERENCE_LENGTH, workload.seq_len),
            source_len=min(REFERENCE_LENGTH, source_len, config.context_length),
        )
    attention, reference_attention = (
        sum(
            time.seconds
            for time in _OperationTimePredictor(config, work, calibration).operation_and_update_times()
            if time.name == "attention"
        )
        for work in (workload, reference)
    )
    return max(0.0, attention - reference_attention)


def _unmeasured_head_seconds(config: ModelConfig, workload: Workload, calibration: Calibration) -> float:
    """Return the time of the heads of a BERT and of the update of an untied output matrix, which no step includes."""
    predictor = _OperationTimePredictor(config, workload, calibration)
    seconds = 0.0
    if isinstance(config, BERTConfig):
        heads = ("pooler", "next_sentence", "classifier", *(() if workload.mode is Mode.TRAIN else ("masked_lm",)))
        seconds += sum(time.seconds for time in predictor.operation_and_update_times() if time.part in heads)
    if workload.mode is Mode.TRAIN and isinstance(config, GPTConfig) and not config.tie_embeddings:
        seconds += calibration.get_table("update.train").interpolate(config.vocab_size * config.d_model)
    return seconds


def launch_overhead_family(config: ModelConfig) -> str:
    """Return the name under which the calibration stores the launch overhead of this type of model."""
    match config:
        case RNNConfig():
            return "rnn"
        case BERTConfig():
            return "bert"
        case Seq2SeqConfig():
            return "seq2seq"
        case GPTConfig():
            return "rotary" if config.positions is PositionKind.ROTARY else "gpt"


def _launch_seconds(
    config: ModelConfig,
    workload: Workload,
    calibration: Calibration,
    *,
    pass_suffix: Literal["", "_forward", "_gradients"] = "",
) -> float:
    """Return the kernel-launch overhead of a step, or of one part of a training step, in seconds.

    The `pass_suffix` is `_forward` for the forward pass or `_gradients` for everything except the update.
    """
    mode = f"{workload.mode.value}{pass_suffix}"
    overhead = calibration.get_launch_overhead(f"{launch_overhead_family(config)}.{mode}")
    match config:
        case RNNConfig() | Seq2SeqConfig():
            layers = config.n_encoder_layers * overhead.per_layer
            layers += config.n_decoder_layers * overhead.per_decoder_layer
        case BERTConfig() | GPTConfig():
            layers = config.n_layers * overhead.per_layer
    if workload.kernel is AttentionKernel.EAGER:
        eager, fused = (calibration.get_launch_overhead(f"{name}.{mode}").per_layer for name in (EAGER_FAMILY, "gpt"))
        layers += max(0.0, eager - fused) * _n_attention_layers(config, workload)
    return overhead.base + layers


def _n_attention_layers(config: ModelConfig, workload: Workload) -> int:
    """Return the number of attention layers that run in a step, counting self-attention and cross-attention."""
    match config:
        case RNNConfig():
            return 0
        case Seq2SeqConfig():
            return 2 * config.n_decoder_layers + (0 if workload.mode is Mode.DECODE else config.n_encoder_layers)
        case BERTConfig() | GPTConfig():
            return config.n_layers


def _launch_compute_seconds_by_stage(
    config: ModelConfig, workload: Workload, calibration: Calibration, times: tuple[PredictedOperationTime, ...]
) -> StepStages:
    """Split the launch and compute time of a step among its stages."""
    total_launch = gradients_launch = forward_launch = _launch_seconds(config, workload, calibration)
    launch = f"{launch_overhead_family(config)}.{workload.mode.value}"
    timed = [time for time in times if time.name != "recurrence"]
    update = sum((time.seconds for time in timed if time.part == "optimizer"), 0.0)
    head = sum(time.seconds for time in timed if time.name == LOGITS or time.part == LOSS)
    encoder = sum(time.seconds for time in timed if time.part.startswith("encoder."))
    rest = sum(time.seconds for time in timed) - update - head - encoder
    forward_fraction = 1.0
    if workload.mode is Mode.TRAIN:
        gradients_launch = min(total_launch, _launch_seconds(config, workload, calibration, pass_suffix="_gradients"))
        forward_launch = min(gradients_launch, _launch_seconds(config, workload, calibration, pass_suffix="_forward"))
        launch, forward_fraction = f"{launch}_forward", FORWARD_FRACTION
    encoder_launch = 0.0
    if isinstance(config, Seq2SeqConfig | RNNConfig) and workload.mode is not Mode.DECODE:
        per_layer = calibration.get_launch_overhead(launch).per_layer
        encoder_launch = min(forward_launch, config.n_encoder_layers * per_layer)
    return StepStages(
        encoder=(encoder_launch, forward_fraction * encoder),
        decoder=(forward_launch - encoder_launch, forward_fraction * rest),
        head_with_loss=(0.0, head),
        backward=(gradients_launch - forward_launch, (1 - forward_fraction) * (encoder + rest)),
        update=(total_launch - gradients_launch, update),
    )


def _overlapped_launch_and_compute_seconds(phases: list[tuple[float, float]]) -> float:
    """Return the time at which the last kernel ends if the device computes while the CPU launches kernels.

    Each phase is a pair of launch and compute seconds.
    """
    cpu = device = 0.0
    for launch, compute in phases:
        device = max(device + compute, cpu + max(launch, compute))
        cpu += launch
    return device


class _OperationTimePredictor:
    """A predictor that looks up the time of each operation in the tables of a calibration."""

    def __init__(self, config: ModelConfig, workload: Workload, calibration: Calibration) -> None:
        self.config = config
        self.workload = workload
        self.calibration = calibration
        self.pass_name = workload.mode.pass_name
        n_parameters = count_parameters(config).total
        n_cache_bytes = 0
        if workload.mode is Mode.DECODE:
            n_cache_bytes = cache_bytes(
                config,
                batch_size=workload.batch_size,
                seq_len=workload.seq_len,
                source_len=workload.n_source,
                dtype=workload.dtype,
            )
        # Weights that fit into a hardware cache are still there from the previous step. Other weights are read from
        # memory, which takes longer than during the calibration of matmuls.
        stream = calibration.get_table("stream")
        self.seconds_per_byte = stream.interpolate(n_parameters * workload.dtype.matmul_itemsize + n_cache_bytes)
        calibrated = stream.interpolate(CALIBRATED_WEIGHT_BYTES[calibration.kind])
        self.extra_seconds_per_byte = max(0.0, self.seconds_per_byte - calibrated)

    def operation_and_update_times(self) -> Iterator[PredictedOperationTime]:
        """Yield the time of every operation with a nonzero time and of the optimizer update."""
        for op in list_operations(self.config, self.workload):
            seconds, name = self._seconds_and_reported_name(op)
            if self.workload.activation_checkpointing and op.is_block:
                seconds *= 1 + FORWARD_FRACTION
            if seconds:
                yield PredictedOperationTime(part=op.part, name=name, runs=op.runs, seconds=seconds)
        if self.workload.mode is Mode.TRAIN:
            n = count_parameters(self.config).total
            yield PredictedOperationTime(
                part="optimizer", name="update", runs=1, seconds=self._kernel_seconds_without_cpu_launch("update", n)
            )

    def _seconds_and_reported_name(self, op: Operation) -> tuple[float, str]:
        """Return the time in seconds over all runs, and the name under which that time is reported."""
        if op.is_attention_core:
            # The tables contain one time for the scores, softmax and mix together, which is assigned to the scores.
            return (
                (op.copies * self._attention_layer_seconds(op), "attention") if op.name == "scores" else (0.0, op.name)
            )
        if op.name in ("input", "recurrent", "gates"):
            is_reported = op.name == "recurrent"
            return (
                (op.copies * self._recurrent_layer_seconds_without_launch(op), "recurrence")
                if is_reported
                else (0.0, op.name)
            )
        if op.part == LOSS:
            return self._kernel_seconds_without_cpu_launch("loss", op.reads), op.name
        if op.matmul is not None:
            return op.runs * self._matmul_seconds_per_run(op), op.name
        return op.runs * self._non_matmul_seconds_per_run(op), op.name

    def _kernel_seconds_without_cpu_launch(self, name: str, *sizes: int | float) -> float:
        """Return the time of a kernel in seconds without its CPU launch.

        On a CPU, the fixed cost of a call is subtracted because the launch overhead already includes it.
        """
        table = self.calibration.get_table(f"{name}.{self.pass_name}")
        seconds = table.interpolate(*sizes)
        return seconds if self.calibration.is_asynchronous else max(0.0, seconds - table.min_seconds)

    def _matmul_seconds_per_run(self, op: Operation) -> float:
        assert op.matmul is not None
        matmul = op.matmul
        seconds = self._kernel_seconds_without_cpu_launch(
            "matmul", matmul.batch * matmul.rows, matmul.inner, matmul.columns
        )
        if matmul.columns % ALIGNMENT and matmul.columns > ALIGNMENT:
            rows, alignment = matmul.batch * matmul.rows, math.gcd(matmul.columns, ALIGNMENT)
            seconds *= self.calibration.get_table(f"misaligned.{self.pass_name}").interpolate(rows, alignment)
        if self.pass_name == "train":
            if op.elementwise:
                seconds += self._kernel_seconds_without_cpu_launch("bias", matmul.rows * matmul.columns)
            if self.workload.dtype is Precision.MIXED and op.name not in HALF_INPUT_OPERATIONS:
                seconds += self._kernel_seconds_without_cpu_launch("cast", matmul.rows * matmul.inner)
        else:
            n_bytes = op.weights * self.workload.dtype.matmul_itemsize
            seconds = max(seconds + n_bytes * self.extra_seconds_per_byte, n_bytes * self.seconds_per_byte)
        return seconds

    def _attention_layer_seconds(self, op: Operation) -> float:
        assert op.matmul is not None
        assert isinstance(self.config, TransformerConfig)
        matmul, config, kernel = op.matmul, self.config, self.workload.kernel
        width = (config.d_head + config.d_value) / 2
        if matmul.rows == 1 and self.workload.mode is Mode.DECODE:
            # On a GPU, the fused kernel reads keys and values once for all heads that share them.
            reads_once = self.calibration.is_asynchronous and kernel is AttentionKernel.FUSED
            n_heads = self.workload.batch_size * config.n_kv_heads if reads_once else matmul.batch
            seconds = self._kernel_seconds_without_cpu_launch(f"decode-{kernel.value}", n_heads, matmul.columns, width)
            # `op.cache` holds the keys. The values, which belong to the mix, are about as many.
            return seconds + 2 * op.cache * self.workload.dtype.matmul_itemsize * self.extra_seconds_per_byte
        is_causal = op.unmasked_fraction < 1 and kernel is AttentionKernel.FUSED
        name = f"{'causal' if is_causal else 'full'}-{kernel.value}"
        return self._extrapolate_attention_seconds(name, matmul.batch, (matmul.rows * matmul.columns) ** 0.5, width)

    def _extrapolate_attention_seconds(self, name: str, n_heads: int, n_tokens: float, width: float) -> float:
        """Estimate the time in seconds of attention over `n_tokens` tokens, which may exceed the calibrated lengths.

        A sequence that is r times as long as the longest calibrated one occupies the device like r of those sequences.
        Extrapolating only by n² would assume that a half-idle device stays half idle. In addition, each query takes
        longer because it attends to more keys. That time is extrapolated linearly from the last two calibrated lengths,
        at the largest calibrated number of heads.
        """
        table = self.calibration.get_table(f"{name}.{self.pass_name}")
        calibrated_heads, lengths, _ = table.axes
        max_heads, (*_, second_longest, longest) = calibrated_heads[-1], (lengths[0] / 2, *lengths)
        ratio = max(1.0, n_tokens / longest)
        per_query = table.interpolate(max_heads, second_longest, width) / second_longest
        slope = 1 - per_query * longest / table.interpolate(max_heads, longest, width)
        # A slope from two measurements is uncertain, so at least half the slope of a time proportional to the keys is
        # used.
        growth = min(1.0, max(0.5, slope / (1 - second_longest / longest)))
        return (1 + growth * (ratio - 1)) * self._kernel_seconds_without_cpu_launch(
            name, ratio * n_heads, n_tokens / ratio, width
        )

    def _recurrent_layer_seconds_without_launch(self, op: Operation) -> float:
        """Return the time in seconds of a full recurrent layer in one direction, excluding launches.

        Two directions are timed together, so half of that time is assigned to each one.
        """
        assert op.matmul is not None
        assert isinstance(self.config, RNNConfig)
        is_encoder = op.part.startswith("encoder")
        direction = "bidirectional" if is_encoder else "unidirectional"
        table = self.calibration.get_table(f"{direction}.{self.pass_name}")
        # The launch overhead was measured with a few steps of a small RNN and already includes the minimum.
        sizes = (op.steps, op.matmul.rows, op.matmul.inner)
        # On a GPU, the time of a recurrence is mostly latency until the state is wide.
        is_linear = self.calibration.is_asynchronous
        seconds = table.interpolate_linearly(*sizes) if is_linear else table.interpolate(*sizes)
        seconds = max(0.0, seconds - table.min_seconds)
        seconds /= 2 if is_encoder else 1
        if self.config.cell is CellKind.LSTM:
            seconds *= self.calibration.get_table(f"lstm.{self.pass_name}").interpolate(1)
        return seconds

    def _non_matmul_seconds_per_run(self, op: Operation) -> float:
        match op.name:
            case "norm":
                assert isinstance(self.config, TransformerConfig)
                return self._kernel_seconds_without_cpu_launch(self.config.norm.value, op.writes)
            case "activation":
                assert isinstance(self.config, TransformerConfig)
                gate = self._kernel_seconds_without_cpu_launch("gate", op.writes) if op.reads > op.writes else 0.0
                return self._kernel_seconds_without_cpu_launch(self.config.activation.value, op.writes) + gate
            case "lookup":
                # The gradient of an embedding has the same size as its table.
                has_gradient = self.pass_name == "train" and op.parameters
                gradient = self._kernel_seconds_without_cpu_launch("fill", op.parameters) if has_gradient else 0.0
                return self._kernel_seconds_without_cpu_launch("lookup", op.writes) + gradient
            case "softmax":
                return self._kernel_seconds_without_cpu_launch("softmax", op.writes)
            case "rotary":
                return self._kernel_seconds_without_cpu_launch("rotary", op.writes)
            case _:
                return self._kernel_seconds_without_cpu_launch("add", op.writes) if op.writes else 0.0
