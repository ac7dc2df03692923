"""Models of random weights run as a workload says, and a calibration of next to nothing of this machine."""

import pytest
import torch

from qkv.choices import Kernel
from qkv.config import BERTConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Mode, Precision, Workload
from qkv.cost.prediction import predict
from qkv.training.calibrating import Grid, calibrate
from qkv.training.launching import Launching
from qkv.training.measuring import random_model, step_of
from qkv.training.per_operation import compare_operations
from qkv.training.stopwatch import Stopwatch
from tests.cost.calibrations import made_up

CPU = torch.device("cpu")
SMALL = {"vocabulary_size": 23, "context_length": 32, "d_model": 16, "n_heads": 2}
CONFIGS = [
    preset("gpt-nano", context_length=32),
    preset("llama-nano"),
    BERTConfig(**SMALL, n_layers=1, masked_word_head=True, next_sentence_head=True),
    Seq2SeqConfig(**SMALL, n_encoder_layers=1, n_decoder_layers=1),
    RNNConfig(vocabulary_size=23, d_model=16),
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
    model = random_model(config, CPU, Precision.FLOAT32)
    step = step_of(model, Workload(batch=3, length=11, mode=mode))
    first, again = step(), step()
    if mode == "train":
        assert again < first  # the same batch was learnt a little
    else:
        first, again = (one[0] if isinstance(one, list) else one for one in (first, again))
        assert torch.equal(first, again)
        assert first.shape[:2] == (3, 1 if mode == "decode" else 11)


def test_tied_weights_stay_tied_and_norms_begin_at_one():
    model = random_model(preset("gpt-nano"), CPU, Precision.BFLOAT16)
    assert model.unembedding.weight is model.embedding.token.weight
    assert model.final_norm.weight.eq(1).all()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_asked_kernel_and_the_asked_positions_are_computed():
    model = random_model(CONFIGS[0], CPU, Precision.FLOAT32)
    work = Workload(batch=2, length=7, mode=Mode.PREFILL, kernel=Kernel.PLAIN, predictions=1)
    (logits,) = step_of(model, work)()
    assert logits.shape == (2, 1, 512)
    assert {block.attention.kernel for block in model.blocks} == {Kernel.PLAIN}


def test_operations_are_timed_by_their_modules_once_a_layer():
    model = random_model(preset("gpt-nano"), CPU, Precision.FLOAT32)
    work = Workload(batch=2, length=16)
    prediction = predict(model.config, work, made_up())
    found = compare_operations(model, step_of(model, work), prediction, Stopwatch(CPU))
    names = {one.name for one in found}
    assert {"blocks.attention.query", "blocks.feedforward.activation", "blocks.attention.attention"} <= names
    assert {"blocks.attention_norm", "final_norm", "unembedding"} <= names
    assert all(one.measured > 0 for one in found)


@pytest.fixture
def one_thread():
    """Next to nothing is computed: threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_calibration_of_this_machine_predicts_every_family(monkeypatch):
    look = Launching.look
    monkeypatch.setattr(Launching, "look", lambda self: None if self._least else look(self))  # once is enough here
    calibration = calibrate(CPU, Precision.FLOAT32, grid=GRID, spend=1e-5)
    assert calibration.kind == "cpu"
    for config in CONFIGS:
        for mode in (Mode.FORWARD, Mode.TRAIN):
            found = predict(config, Workload(batch=2, length=7, mode=mode), calibration)
            assert 0 < found.seconds < 1e3
    assert predict(CONFIGS[0], Workload(batch=2, length=7, mode=Mode.DECODE), calibration).seconds > 0


def test_the_longer_work_takes_longer_by_the_stopwatch():
    watch = Stopwatch(CPU, spend=1e-3)
    short, long = (torch.randn(n, n) for n in (8, 512))
    assert watch.kernel(lambda: long @ long) > watch.kernel(lambda: short @ short) > 0
    assert watch.whole(lambda: long @ long) > watch.whole(lambda: short @ short) > 0


def test_the_stopwatch_warms_up_before_it_measures():
    seen = []
    Stopwatch(CPU, spend=1e-6).whole(lambda: seen.append(len(seen)))
    assert len(seen) >= 3 + 3  # three to warm up, three to measure


def test_the_least_of_several_looks_at_launching_counts(monkeypatch):
    launching = Launching(Stopwatch(CPU), dtype=Precision.FLOAT32, training_dtype=Precision.FLOAT32)
    for seconds in (3.0, 1.0, 2.0):
        monkeypatch.setattr(Stopwatch, "whole", lambda *_, seconds=seconds, **__: seconds)
        launching.look()
    assert {one.once for one in launching.overheads().values()} == {1.0}
