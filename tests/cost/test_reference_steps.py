"""Parameters of a fast backend are computed from the differences between measured steps."""

import pytest

from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.cost import Precision, Workload
from qkv.cost.calibration import REFERENCE_LENGTH, REFERENCE_VOCAB_SIZE, ReferenceStep
from qkv.cost.prediction import predict_time
from qkv.cost.reference_steps import fit_reference_model
from tests.cost.synthetic_calibration import make_calibration

BASE, LAUNCH, PER_WEIGHT, PER_KEY = 1e-4, 1e-5, 1e-11, 1e-9
WIDTHS, LARGE_VOCABULARY = (64, 256), 4096


def layer_seconds(tokens, weights):
    return LAUNCH + PER_WEIGHT * tokens * weights


def expected_seconds(config, workload):
    """The time of a backend whose layers take a fixed time and a time per weight and token."""
    d, n = config.d_model, workload.n_tokens
    seconds = BASE
    if config.family == "seq2seq":
        decoder_weights = (14 if workload.mode == "decode" else 16) * d * d
        n_source = workload.batch_size * workload.n_source
        if workload.mode != "decode":
            seconds += config.n_encoder_layers * (LAUNCH + PER_WEIGHT * n_source * (12 * d * d + 9 * d))
        return seconds + config.n_decoder_layers * layer_seconds(n, decoder_weights)
    seconds += config.n_layers * layer_seconds(n, 12 * d * d + 9 * d)
    if workload.mode == "decode":
        n_heads = workload.batch_size * config.n_heads
        seconds += config.n_layers * PER_KEY * n_heads * max(0, workload.seq_len - REFERENCE_LENGTH)
    if config.family == "gpt":
        logit_rows = workload.batch_size if workload.mode == "prefill" else n
        seconds += PER_WEIGHT * logit_rows * (config.vocab_size - REFERENCE_VOCAB_SIZE) * d
    return seconds


def make_steps(family, mode, batches, *, lengths=(REFERENCE_LENGTH,), source_len=None, widths=WIDTHS):
    steps = []
    for d_model in widths:
        for batch_size in batches:
            for seq_len in lengths:
                settings = {"family": family, "mode": mode, "d_model": d_model, "batch_size": batch_size}
                settings |= {"seq_len": seq_len, "source_len": source_len}
                sizes = [(1, 1, REFERENCE_VOCAB_SIZE), (5, 1, REFERENCE_VOCAB_SIZE)]
                if source_len is not None and mode != "decode":
                    sizes.append((1, 5, REFERENCE_VOCAB_SIZE))
                if family == "gpt" and seq_len == REFERENCE_LENGTH:
                    sizes.append((1, 1, LARGE_VOCABULARY))
                for n_layers, n_encoder_layers, vocab_size in sizes:
                    layers = {"n_layers": n_layers, "n_encoder_layers": n_encoder_layers if source_len else 0}
                    step = ReferenceStep(**settings, **layers, vocab_size=vocab_size, seconds=1.0)
                    seconds = expected_seconds(step.config(), step.workload(Precision.FLOAT32))
                    steps.append(step.replace(seconds=seconds))
    return tuple(steps)


def calibrate(steps, backend="cpu"):
    return make_calibration().replace(reference_steps={backend: steps})


@pytest.mark.parametrize("mode", ["prefill", "decode", "train"])
@pytest.mark.parametrize("n_layers", [1, 3, 8])
def test_the_time_of_a_gpt_is_that_of_its_layers_and_logits(mode, n_layers):
    steps = make_steps("gpt", mode, (1, 4))
    config = GPTConfig(vocab_size=2048, context_length=128, d_model=256, n_heads=4, n_layers=n_layers)
    workload = Workload(batch_size=4, seq_len=REFERENCE_LENGTH, mode=mode)
    result = predict_time(config, workload, calibrate(steps))
    assert result.backend == "cpu"
    expected = expected_seconds(config, workload)
    # Below the calibrated vocabulary, the time of the logits is proportional to their weights.
    logits = PER_WEIGHT * (workload.batch_size if mode != "train" else 256) * (2048 - REFERENCE_VOCAB_SIZE) * 256
    assert result.seconds == pytest.approx(expected, rel=0.02, abs=0.3 * logits)


def test_every_reference_step_is_predicted_exactly():
    steps = (
        *make_steps("gpt", "decode", (1, 4), lengths=(REFERENCE_LENGTH, 256, 1024)),
        *make_steps("seq2seq", "decode", (1, 4), source_len=REFERENCE_LENGTH),
        *make_steps("seq2seq", "prefill", (1, 4), lengths=(1,), source_len=REFERENCE_LENGTH),
        *make_steps("bert", "forward", (1, 4)),
    )
    for step in steps:
        workload = step.workload(Precision.FLOAT32)
        predicted = predict_time(step.config(), workload, calibrate(steps)).seconds
        assert predicted == pytest.approx(step.seconds, rel=1e-3), step


def test_a_decode_step_takes_longer_with_more_cached_keys():
    steps = make_steps("gpt", "decode", (1, 4), lengths=(REFERENCE_LENGTH, 256, 1024))
    config = GPTConfig(vocab_size=512, context_length=8192, d_model=256, n_heads=4, n_layers=3)
    for n in (64, 300, 1024, 4096):
        workload = Workload(batch_size=4, seq_len=n, mode="decode")
        predicted = predict_time(config, workload, calibrate(steps)).seconds
        assert predicted == pytest.approx(expected_seconds(config, workload), rel=0.02)


def test_measurement_noise_does_not_make_a_time_negative():
    steps = tuple(
        step.replace(seconds=1e-3 if step.n_layers == 1 else 5e-4) for step in make_steps("gpt", "decode", (1, 4))
    )
    parts = fit_reference_model(steps).predict(steps[0].config(), steps[0].workload(Precision.FLOAT32))
    assert min(parts.base, parts.layers, parts.logits + 1e-9) > 0


def test_the_eager_backend_and_other_families_use_the_kernel_times():
    calibration = calibrate(make_steps("gpt", "decode", (1, 4)))
    gpt = GPTConfig(vocab_size=512, context_length=64, d_model=64, n_heads=1, n_layers=1)
    workload = Workload(batch_size=1, seq_len=8, mode="decode")
    fast, eager = (predict_time(gpt, workload, calibration, backend=name) for name in ("auto", "eager"))
    assert (fast.backend, eager.backend) == ("cpu", "eager")
    assert eager.seconds == predict_time(gpt, workload, make_calibration(), backend="eager").seconds != fast.seconds
    bert = BERTConfig(vocab_size=512, context_length=64, d_model=64, n_heads=1, n_layers=1)
    forward = Workload(batch_size=1, seq_len=8)
    without = predict_time(bert, forward, make_calibration())
    assert predict_time(bert, forward, calibration).seconds == without.seconds


def test_the_encoder_of_a_translation_is_predicted_separately():
    steps = make_steps("seq2seq", "prefill", (1, 4), lengths=(1,), source_len=REFERENCE_LENGTH)
    shape = {"vocab_size": 512, "context_length": 128, "d_model": 256, "n_heads": 4}
    workload = Workload(batch_size=4, seq_len=1, source_len=REFERENCE_LENGTH, mode="prefill")
    shallow, deep = (Seq2SeqConfig(**shape, n_encoder_layers=n, n_decoder_layers=2) for n in (2, 6))
    calibration = calibrate(steps)
    difference = (
        predict_time(deep, workload, calibration).seconds - predict_time(shallow, workload, calibration).seconds
    )
    assert difference == pytest.approx(expected_seconds(deep, workload) - expected_seconds(shallow, workload), rel=0.02)


def make_launch_bound_steps(family, mode, **sizes):
    """Steps of a GPU whose time depends only on the number of layers."""
    return tuple(
        step.replace(seconds=BASE + LAUNCH * (step.n_layers + 2 * step.n_encoder_layers))
        for step in make_steps(family, mode, (1, 4), **sizes)
    )


def calibrate_gpu(steps):
    return make_calibration("cuda", "bfloat16").replace(reference_steps={"cuda": steps})


SMALL_GPT = GPTConfig(vocab_size=64, context_length=128, d_model=16, n_heads=1, n_layers=6)


@pytest.mark.parametrize("mode", ["forward", "prefill", "train"])
def test_a_small_step_on_a_gpu_takes_as_long_as_its_launches(mode):
    calibration = calibrate_gpu(make_launch_bound_steps("gpt", mode))
    # Kernels without a fixed cost leave only the launches.
    tables = {
        name: table.replace(seconds=tuple(1e-12 for _ in table.seconds)) for name, table in calibration.tables.items()
    }
    workload = Workload(batch_size=1, seq_len=8, mode=mode, dtype="mixed" if mode == "train" else "bfloat16")
    result = predict_time(SMALL_GPT, workload, calibration.replace(tables=tables))
    assert (result.backend, result.bound_by) == ("cuda", "launch")
    assert result.seconds == pytest.approx(BASE + 6 * LAUNCH, rel=1e-3)


@pytest.mark.parametrize("mode", ["forward", "prefill", "train"])
def test_a_large_step_on_a_gpu_takes_as_long_as_its_kernels(mode):
    calibration = calibrate_gpu(make_launch_bound_steps("gpt", mode))
    config = SMALL_GPT.replace(d_model=256, vocab_size=4096)
    workload = Workload(batch_size=64, seq_len=100, mode=mode, dtype="mixed" if mode == "train" else "bfloat16")
    result = predict_time(config, workload, calibration)
    assert result.bound_by == "compute"
    assert result.seconds == pytest.approx(result.compute_seconds + (BASE if mode != "train" else 0), rel=1e-3)


def test_a_temporarily_slow_cpu_does_not_change_the_launches():
    steps = make_launch_bound_steps("bert", "forward", widths=(64, 128, 256, 512))
    disturbed = tuple(step.replace(seconds=3 * step.seconds) if step.d_model == 128 else step for step in steps)
    config = BERTConfig(vocab_size=512, context_length=64, d_model=64, n_heads=1, n_layers=4)
    workload = Workload(batch_size=1, seq_len=16, dtype="bfloat16")
    expected, actual = (
        predict_time(config, workload, calibrate_gpu(data)).launch_seconds for data in (steps, disturbed)
    )
    assert actual == pytest.approx(expected, rel=0.01)


def test_only_steps_outside_cuda_graphs_are_predicted_from_launches():
    steps = make_steps("gpt", "decode", (1, 4), lengths=(REFERENCE_LENGTH, 256, 1024))
    for step in steps:
        predicted = predict_time(step.config(), step.workload(Precision.BFLOAT16), calibrate_gpu(steps)).seconds
        assert predicted == pytest.approx(step.seconds, rel=1e-3), step


def test_the_encoder_of_a_translation_is_launched_only_once():
    steps = {
        mode: make_launch_bound_steps("seq2seq", mode, lengths=(1,), source_len=REFERENCE_LENGTH)
        for mode in ("prefill", "decode")
    }
    config = Seq2SeqConfig(
        vocab_size=64, context_length=64, d_model=16, n_heads=1, n_encoder_layers=5, n_decoder_layers=3
    )
    workload = Workload(batch_size=1, seq_len=1, source_len=8, dtype="bfloat16")
    prefill, decode = (
        predict_time(config, workload.replace(mode=mode), calibrate_gpu(steps[mode])).launch_seconds for mode in steps
    )
    assert prefill == pytest.approx(BASE + (2 * 5 + 3) * LAUNCH, rel=1e-3)
    # The base of a decode step includes the encoder layer of the reference model, which is not run again.
    assert decode == pytest.approx(BASE + (2 + 3) * LAUNCH, rel=1e-3)


def test_a_decode_step_of_an_rnn_includes_the_choice_of_the_token():
    steps = make_launch_bound_steps("seq2seq", "decode", source_len=REFERENCE_LENGTH)
    config = RNNConfig(vocab_size=64, d_model=16)
    workload = Workload(batch_size=1, seq_len=4, source_len=8, mode="decode", dtype="bfloat16")
    calibration = calibrate_gpu(tuple(step.replace(seconds=step.seconds + 5e-4) for step in steps))
    without = calibration.replace(reference_steps={})
    expected = 5e-4 + 2 * LAUNCH + BASE - calibration.get_launch_overhead("seq2seq.decode").base
    with_choice, without_choice = (predict_time(config, workload, data).seconds for data in (calibration, without))
    assert with_choice - without_choice == pytest.approx(expected, rel=1e-3)
