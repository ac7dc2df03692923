"""Tests for benchmark steps, timing and calibration with tiny sizes."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qkv.choices import AttentionKernel
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Mode, Precision, Workload
from qkv.cost.backends import select_backend
from qkv.cost.prediction import predict_time
from qkv.training import reference_steps, timer
from qkv.training.benchmark_steps import build_random_model, configure_model_and_build_step, measure_backend_step
from qkv.training.device_calibration import Grid, calibrate
from qkv.training.launch_overhead import LaunchOverheadBenchmark
from qkv.training.operation_comparison import compare_operations
from qkv.training.timer import Timer
from tests.cost.synthetic_calibration import make_calibration

CPU = torch.device("cpu")
SMALL = {"vocab_size": 23, "context_length": 32, "d_model": 16, "n_heads": 2}
CONFIGS = [
    preset("gpt-nano", context_length=32),
    preset("llama-nano"),
    BERTConfig(**SMALL, n_layers=1, masked_lm_head=True, next_sentence_head=True),
    Seq2SeqConfig(**SMALL, n_encoder_layers=1, n_decoder_layers=1),
    RNNConfig(vocab_size=23, d_model=16),
]
GRID = Grid(
    rows=(1, 3),
    widths=(8, 16),
    n_elements=(2**9, 2**10),
    batch_times_heads=(2, 16),
    sequence_lengths=(2, 5),
    n_cached_keys=(3, 7),
    max_flops=10_000,
    max_attention_scores=100,
    streamed_weight_bytes=(2**10, 2**12),
    recurrence_axes=((1, 3), (1, 2), (4, 6)),
    unaligned_matmul=((1, 2), 8, 16),
)


@pytest.mark.parametrize("config", CONFIGS, ids=["gpt", "llama", "bert", "seq2seq", "rnn"])
@pytest.mark.parametrize("mode", ["forward", "train", "prefill", "decode"])
def test_every_family_can_repeat_a_step(config, mode):
    if config.family == "bert" and mode in ("prefill", "decode"):
        pytest.skip("BERT has no cache")
    model = build_random_model(config, CPU, Precision.FLOAT32)
    step = configure_model_and_build_step(model, Workload(batch_size=3, seq_len=11, mode=mode))
    first, second = step(), step()
    if mode == "train":
        assert second < first  # the model has been trained on the same batch
    else:
        first, second = (output[0] if isinstance(output, list) else output for output in (first, second))
        assert torch.equal(first, second)
        assert first.shape[:2] == (3, 1 if mode == "decode" else 11)


def test_tied_weights_stay_tied_and_norm_weights_are_one():
    model = build_random_model(preset("gpt-nano"), CPU, Precision.BFLOAT16)
    assert model.unembedding.weight is model.embedding.token.weight
    assert model.final_norm.weight.eq(1).all()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_workload_selects_the_kernel_and_the_logits():
    model = build_random_model(CONFIGS[0], CPU, Precision.FLOAT32)
    work = Workload(batch_size=2, seq_len=7, mode=Mode.PREFILL, kernel=AttentionKernel.EAGER, logits_to_keep=1)
    (logits,) = configure_model_and_build_step(model, work)()
    assert logits.shape == (2, 1, 512)
    assert {block.attention.kernel for block in model.blocks} == {AttentionKernel.EAGER}


def test_operations_are_timed_once_per_layer():
    model = build_random_model(preset("gpt-nano"), CPU, Precision.FLOAT32)
    work = Workload(batch_size=2, seq_len=16)
    prediction = predict_time(model.config, work, make_calibration())
    timer, ticks = Timer(CPU), itertools.count()
    timer.now = lambda: float(next(ticks))
    measured = {
        operation.name: operation.measured
        for operation in compare_operations(model, configure_model_and_build_step(model, work), prediction, timer)
    }
    n_layers = model.config.n_layers
    # The clock advances at every reading: a module with n submodules takes 1 + n ticks of its own.
    leaves = {"blocks.attention.q_proj", "blocks.attention_norm"}
    assert {name: measured[name] for name in leaves} == dict.fromkeys(leaves, n_layers)
    assert measured["final_norm"] == measured["unembedding"] == 1
    assert measured["blocks.feed_forward.activation"] == (1 + 2) * n_layers
    assert measured["blocks.attention.attention"] == (1 + 4) * n_layers


@pytest.fixture
def one_thread():
    """Use one thread, because synchronization of threads would dominate such small work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ticking(monkeypatch):
    """Replace the clock of the timer by one that advances by a microsecond at every reading."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-6 * next(ticks), process_time=lambda: 1e-6 * next(ticks))
    monkeypatch.setattr(timer, "time", clock)
    monkeypatch.setattr(timer, "_n_preemptions", lambda: 0)


@pytest.mark.usefixtures("one_thread", "ticking")
def test_a_calibration_can_predict_every_family(monkeypatch):
    measure = LaunchOverheadBenchmark.measure_and_keep_fastest
    monkeypatch.setattr(
        LaunchOverheadBenchmark, "measure_and_keep_fastest", lambda self: None if self._fastest else measure(self)
    )  # once is enough
    calibration = calibrate(CPU, Precision.FLOAT32, grid=GRID, with_fast_backend=False, seconds_per_measurement=1e-5)
    assert calibration.kind == "cpu"
    for config in CONFIGS:
        for mode in (Mode.FORWARD, Mode.TRAIN):
            prediction = predict_time(config, Workload(batch_size=2, seq_len=7, mode=mode), calibration)
            assert 0 < prediction.seconds < 1e3
    assert predict_time(CONFIGS[0], Workload(batch_size=2, seq_len=7, mode=Mode.DECODE), calibration).seconds > 0


class Clock:
    """A clock that only advances while work is done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.n_calls = 0

    def work(self, seconds):
        def run():
            self.now += seconds
            self.n_calls += 1

        return run


@pytest.mark.parametrize("seconds", [1e-6, 1e-3, 2.0])
def test_the_timer_measures_the_time_of_one_call(seconds):
    clock, timer = Clock(), Timer(CPU, seconds_per_measurement=1e-3)
    timer.now = lambda: clock.now
    assert timer.measure_kernel(clock.work(seconds)) == pytest.approx(seconds)
    assert timer.measure_lower_quartile_latency(clock.work(seconds)) == pytest.approx(seconds)


def test_the_timer_warms_up_before_it_measures():
    clock, timer = Clock(), Timer(CPU, seconds_per_measurement=1e-6)
    timer.now = lambda: clock.now
    timer.measure_lower_quartile_latency(clock.work(1e-3))
    assert clock.n_calls == 3 + 3  # three for the warm-up and three for the measurement


def test_the_minimum_of_several_launch_measurements_counts(monkeypatch):
    overheads = LaunchOverheadBenchmark(Timer(CPU), dtype=Precision.FLOAT32, training_dtype=Precision.FLOAT32)
    for latency in (3.0, 1.0, 2.0):
        monkeypatch.setattr(Timer, "measure_lower_quartile_latency", lambda *_, latency=latency, **__: latency)
        overheads.measure_and_keep_fastest()
    assert {overhead.base for overhead in overheads.overheads().values()} == {1.0}


@pytest.mark.parametrize(
    ("config", "mode", "backend"),
    [
        *((CONFIGS[0], mode, backend) for mode in ("prefill", "decode") for backend in ("cpu", "eager")),
        (CONFIGS[0], "train", "eager"),
        (GPTConfig(**{**SMALL, "d_model": 256}, n_layers=1), "train", "cpu"),
        (BERTConfig(**SMALL, n_layers=1, masked_lm_head=True), "forward", "cpu"),
        (BERTConfig(**SMALL, n_layers=1, n_classes=3), "forward", "eager"),
        *(
            (Seq2SeqConfig(**SMALL, n_encoder_layers=1, n_decoder_layers=1), mode, "cpu")
            for mode in ("prefill", "decode")
        ),
        *((CONFIGS[4], mode, "cpu") for mode in ("prefill", "decode")),
    ],
    ids=lambda value: getattr(value, "family", value),
)
def test_a_step_is_measured_on_each_backend(config, mode, backend):
    model = build_random_model(config, CPU, Precision.FLOAT32)
    work = Workload(batch_size=2, seq_len=9, mode=mode)
    assert select_backend(config, work, "cpu", backend) == backend
    assert measure_backend_step(model, work, backend, Timer(CPU, seconds_per_measurement=1e-3), seconds=0.0) > 0
    assert not torch.is_inference_mode_enabled()


def test_the_reference_steps_of_a_cpu_are_measured_with_its_fast_backend(monkeypatch):
    monkeypatch.setattr(reference_steps, "measure_backend_step", lambda *_, **__: 2.0)
    grid = replace(reference_steps.CPU, many_layers={64: 2, 256: 2}, decode_batches=(1,), n_tokens=(16,))
    grid = replace(grid, long_contexts=(128,), long_context_batches=(1,))
    log = []
    measured = reference_steps.measure_reference_steps(Timer(CPU), Precision.FLOAT32, log.append, grid=grid)
    assert list(measured) == ["cpu"]
    families_and_modes = {(step.family, step.mode.value) for step in measured["cpu"]}
    assert families_and_modes == {
        ("gpt", "decode"),
        ("gpt", "prefill"),
        ("gpt", "train"),
        ("bert", "forward"),
        ("seq2seq", "decode"),
        ("seq2seq", "prefill"),
    }
    assert {step.seconds for step in measured["cpu"]} == {2.0}
    assert not any("not measured" in line for line in log)


def test_a_reference_step_that_fails_is_left_out(monkeypatch):
    def measure(model, *_, **__):
        if model.config.n_layers > 1:
            raise RuntimeError("out of memory")
        return 1.0

    monkeypatch.setattr(reference_steps, "measure_backend_step", measure)
    step = reference_steps._unmeasured("gpt", Mode.DECODE, 1, 8, 64, 1)
    monkeypatch.setattr(reference_steps, "reference_steps", lambda _grid: [step, step.replace(n_layers=2)])
    log = []
    measured = reference_steps.measure_reference_steps(Timer(CPU), Precision.FLOAT32, log.append)
    assert measured == {"cpu": (step,)}
    assert any("out of memory" in line for line in log)
