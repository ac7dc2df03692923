"""Models of random weights run as a workload says, and a calibration of next to nothing of this machine."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from qkv.choices import Kernel
from qkv.config import BERTConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Mode, Precision, Workload
from qkv.cost.prediction import predict_time
from qkv.training import timer
from qkv.training.benchmark_steps import build_random_model, build_step
from qkv.training.device_calibration import Grid, calibrate
from qkv.training.launch_overhead import LaunchOverheads
from qkv.training.operation_comparison import compare_operations
from qkv.training.timer import Timer
from tests.cost.synthetic_calibration import made_up

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
    rows=(1, 3), widths=(8, 16), numbers=(2**9, 2**10), groups=(2, 16), lengths=(2, 5), contexts=(3, 7),
    most_flops=10_000, most_square=100, stream=(2**10, 2**12), recurrence=((1, 3), (1, 2), (4, 6)), odd=((1, 2), 8, 16),
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=["gpt", "llama", "bert", "seq2seq", "rnn"])
@pytest.mark.parametrize("mode", ["forward", "train", "prefill", "decode"])
def test_every_family_takes_a_step_again_and_again(config, mode):
    if config.family == "bert" and mode in ("prefill", "decode"):
        pytest.skip("a BERT keeps no cache")
    model = build_random_model(config, CPU, Precision.FLOAT32)
    step = build_step(model, Workload(batch_size=3, seq_len=11, mode=mode))
    first, again = step(), step()
    if mode == "train":
        assert again < first  # the same batch was learnt a little
    else:
        first, again = (one[0] if isinstance(one, list) else one for one in (first, again))
        assert torch.equal(first, again)
        assert first.shape[:2] == (3, 1 if mode == "decode" else 11)


def test_tied_weights_stay_tied_and_norms_begin_at_one():
    model = build_random_model(preset("gpt-nano"), CPU, Precision.BFLOAT16)
    assert model.unembedding.weight is model.embedding.token.weight
    assert model.final_norm.weight.eq(1).all()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_asked_kernel_and_the_asked_positions_are_computed():
    model = build_random_model(CONFIGS[0], CPU, Precision.FLOAT32)
    work = Workload(batch_size=2, seq_len=7, mode=Mode.PREFILL, kernel=Kernel.EAGER, logits_to_keep=1)
    (logits,) = build_step(model, work)()
    assert logits.shape == (2, 1, 512)
    assert {block.attention.kernel for block in model.blocks} == {Kernel.EAGER}


def test_operations_are_timed_by_their_modules_once_a_layer():
    model = build_random_model(preset("gpt-nano"), CPU, Precision.FLOAT32)
    work = Workload(batch_size=2, seq_len=16)
    prediction = predict_time(model.config, work, made_up())
    timer, ticks = Timer(CPU), itertools.count()
    timer.now = lambda: float(next(ticks))
    measured = {one.name: one.measured for one in compare_operations(model, build_step(model, work), prediction, timer)}
    n_layers = model.config.n_layers
    # The clock ticks at every reading: a module without parts takes one tick, another one more than it has parts.
    leaves = {"blocks.attention.q_proj", "blocks.attention_norm"}
    assert {name: measured[name] for name in leaves} == dict.fromkeys(leaves, n_layers)
    assert measured["final_norm"] == measured["unembedding"] == 1
    assert measured["blocks.feed_forward.activation"] == (1 + 2) * n_layers
    assert measured["blocks.attention.attention"] == (1 + 4) * n_layers


@pytest.fixture
def one_thread():
    """Next to nothing is computed: threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ticking(monkeypatch):
    """A stopwatch whose clock advances by a microsecond at every reading."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-6 * next(ticks), process_time=lambda: 1e-6 * next(ticks))
    monkeypatch.setattr(timer, "time", clock)
    monkeypatch.setattr(timer, "_interruptions", lambda: 0)


@pytest.mark.usefixtures("one_thread", "ticking")
def test_a_calibration_predicts_every_family(monkeypatch):
    look = LaunchOverheads.look
    monkeypatch.setattr(LaunchOverheads, "look", lambda self: None if self._least else look(self))  # once is enough here
    calibration = calibrate(CPU, Precision.FLOAT32, grid=GRID, seconds=1e-5)
    assert calibration.kind == "cpu"
    for config in CONFIGS:
        for mode in (Mode.FORWARD, Mode.TRAIN):
            found = predict_time(config, Workload(batch_size=2, seq_len=7, mode=mode), calibration)
            assert 0 < found.seconds < 1e3
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
def test_the_stopwatch_measures_the_time_of_one_call(seconds):
    clock, timer = Clock(), Timer(CPU, seconds_per_measurement=1e-3)
    timer.now = lambda: clock.now
    assert timer.measure_kernel(clock.work(seconds)) == pytest.approx(seconds)
    assert timer.measure_latency(clock.work(seconds)) == pytest.approx(seconds)


def test_the_stopwatch_warms_up_before_it_measures():
    clock, timer = Clock(), Timer(CPU, seconds_per_measurement=1e-6)
    timer.now = lambda: clock.now
    timer.measure_latency(clock.work(1e-3))
    assert clock.n_calls == 3 + 3  # three to warm up, three to measure


def test_the_least_of_several_looks_at_launching_counts(monkeypatch):
    launching = LaunchOverheads(Timer(CPU), dtype=Precision.FLOAT32, training_dtype=Precision.FLOAT32)
    for seconds in (3.0, 1.0, 2.0):
        monkeypatch.setattr(Timer, "whole", lambda *_, seconds=seconds, **__: seconds)
        launching.look()
    assert {one.once for one in launching.overheads().values()} == {1.0}
