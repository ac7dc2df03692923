"""Predicted step times: sequential on a CPU, overlapped with launches on a GPU."""

import pytest

from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Mode, Precision, Workload, count_parameters
from qkv.cost.calibration import LaunchOverhead, TimingTable
from qkv.cost.prediction import (
    CALIBRATED_WEIGHT_BYTES,
    _launch_compute_seconds_by_stage,
    _overlapped_launch_and_compute_seconds,
    predict_time,
)
from qkv.errors import InputError
from tests.cost.synthetic_calibration import FIXED_SECONDS, SECONDS_PER_UNIT, make_calibration

SHAPE = {"vocab_size": 512, "context_length": 4096, "d_model": 64, "n_heads": 1}
GPT = GPTConfig(**SHAPE, n_layers=3)
FAMILIES = [
    GPT,
    preset("llama-nano"),
    BERTConfig(**SHAPE, n_layers=2, masked_lm_head=True),
    Seq2SeqConfig(**SHAPE, n_encoder_layers=2, n_decoder_layers=3),
    RNNConfig(vocab_size=512, d_model=64),
    RNNConfig(vocab_size=512, d_model=64, cell="lstm", attention="additive"),
]
MODES = ("forward", "train", "prefill", "decode")


@pytest.mark.parametrize("config", FAMILIES, ids=["gpt", "llama", "bert", "seq2seq", "gru", "lstm"])
@pytest.mark.parametrize("mode", MODES)
def test_every_family_has_a_time_in_every_supported_mode(config, mode):
    if config.family == "bert" and mode in ("prefill", "decode"):
        pytest.skip("BERT has no KV cache")
    result = predict_time(config, Workload(batch_size=2, seq_len=17, mode=mode), make_calibration())
    assert result.seconds == pytest.approx(result.launch_seconds + result.compute_seconds + result.recurrence_seconds)
    assert min(result.launch_seconds, result.compute_seconds) > 0
    assert (result.recurrence_seconds > 0) == (config.family == "rnn")


def test_the_time_of_a_matmul_on_a_cpu_excludes_the_fixed_cost_of_a_call():
    rows, inner, columns = 2 * 16, 64, 256
    workload = Workload(batch_size=2, seq_len=16)
    (up_proj,) = [op for op in predict_time(GPT, workload, make_calibration()).operation_times if op.name == "up_proj"]
    table = make_calibration().get_table("matmul.infer")
    assert up_proj.seconds == pytest.approx(3 * (table.interpolate(rows, inner, columns) - table.min_seconds))
    assert table.interpolate(16, 16, 256) == pytest.approx(FIXED_SECONDS + SECONDS_PER_UNIT * 16 * 16 * 256)


def test_a_gpu_takes_the_larger_of_launch_and_compute_time_plus_the_logits():
    workload = Workload(batch_size=2, seq_len=16, dtype=Precision.BFLOAT16)
    calibration = make_calibration("cuda", "bfloat16")
    result = predict_time(GPT, workload, calibration)
    (logits,) = [op.seconds for op in result.operation_times if op.name == "logits"]
    assert result.seconds == pytest.approx(max(result.launch_seconds, result.compute_seconds - logits) + logits)
    slow = {**calibration.launch_overheads, "gpt.forward": LaunchOverhead(base=9.0, per_layer=1.0)}
    launched = predict_time(GPT, workload, calibration.replace(launch_overheads=slow))
    assert launched.seconds == pytest.approx(9.0 + 3 * 1.0 + logits)
    assert launched.bound_by == "launch"


@pytest.mark.parametrize("config", FAMILIES, ids=["gpt", "llama", "bert", "seq2seq", "gru", "lstm"])
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_the_phases_sum_to_the_launch_and_compute_time(config, mode):
    calibration = make_calibration("cuda", "bfloat16")
    workload = Workload(batch_size=2, seq_len=17, mode=mode, dtype="mixed" if mode == "train" else "bfloat16")
    result = predict_time(config, workload, calibration)
    phases = _launch_compute_seconds_by_stage(config, workload, calibration, result.operation_times)
    assert sum(launch for launch, _ in phases) == pytest.approx(result.launch_seconds)
    assert sum(compute for _, compute in phases) == pytest.approx(result.compute_seconds)


@pytest.mark.parametrize(("vocab_size", "factor"), [(512, 1.0), (513, 4.0), (514, 3.0), (516, 2.0)])
def test_misaligned_vocabulary_sizes_take_longer_by_the_calibrated_factor(vocab_size, factor):
    result = predict_time(GPT.replace(vocab_size=vocab_size), Workload(batch_size=2, seq_len=16), make_calibration())
    (logits,) = [op.seconds for op in result.operation_times if op.name == "logits"]
    table = make_calibration().get_table("matmul.infer")
    assert logits == pytest.approx(factor * (table.interpolate(32, 64, vocab_size) - table.min_seconds), rel=1e-6)


def test_the_fixed_cost_of_a_recurrence_is_not_counted_twice():
    config = RNNConfig(vocab_size=512, d_model=64)
    result = predict_time(config, Workload(batch_size=2, seq_len=1, source_len=9, mode=Mode.DECODE), make_calibration())
    table = make_calibration().get_table("unidirectional.infer")
    assert result.recurrence_seconds == pytest.approx(table.interpolate(1, 2, 64) - table.min_seconds)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([(3.0, 1.0), (1.0, 5.0)], 8.0),  # a slow launch, then a slow computation
        ([(1.0, 5.0), (3.0, 1.0)], 6.0),  # the second launch overlaps with the first computation
        ([(2.0, 2.0)], 2.0),
    ],
)
def test_launches_overlap_with_earlier_computation(phases, expected):
    assert _overlapped_launch_and_compute_seconds(phases) == expected


def test_the_time_grows_linearly_with_the_layers():
    workload = Workload(batch_size=2, seq_len=16)
    two, three, four = (predict_time(GPT.replace(n_layers=n), workload, make_calibration()).seconds for n in (2, 3, 4))
    assert three - two == pytest.approx(four - three)


def test_training_includes_the_update_of_every_parameter():
    result = predict_time(GPT, Workload(batch_size=2, seq_len=16, mode=Mode.TRAIN), make_calibration())
    (update,) = [op.seconds for op in result.operation_times if op.part == "optimizer"]
    table = make_calibration().get_table("update.train")
    assert update == pytest.approx(table.interpolate(count_parameters(GPT).total) - table.min_seconds)


def test_a_generation_is_the_sum_of_prefill_and_steps():
    workload = Workload(batch_size=2, seq_len=100, mode=Mode.GENERATE, n_new_tokens=21)
    prefill = predict_time(
        GPT, workload.replace(mode=Mode.PREFILL, n_new_tokens=None, logits_to_keep=1), make_calibration()
    ).seconds
    steps = [
        predict_time(GPT, workload.replace(mode=Mode.DECODE, n_new_tokens=None, seq_len=n), make_calibration()).seconds
        for n in range(101, 121)
    ]
    assert predict_time(GPT, workload, make_calibration()).seconds == pytest.approx(prefill + sum(steps), rel=1e-3)


def test_weights_larger_than_the_hardware_cache_are_read_at_memory_bandwidth():
    calibration = make_calibration()
    slow = TimingTable(
        axes=((CALIBRATED_WEIGHT_BYTES["cpu"], 2.0 * CALIBRATED_WEIGHT_BYTES["cpu"]),),
        exponents=(0,),
        seconds=(1.0, 3.0),
    )
    workload = Workload(batch_size=1, seq_len=2, mode=Mode.DECODE)
    large = GPT.replace(vocab_size=2**18)
    cached, uncached = (
        predict_time(large, workload, calibration.replace(tables={**calibration.tables, "stream": stream}))
        for stream in (slow.replace(seconds=(1.0, 1.0)), slow)
    )
    (cached_logits,), (uncached_logits,) = (
        [op.seconds for op in result.operation_times if op.name == "logits"] for result in (cached, uncached)
    )
    assert uncached_logits - cached_logits == pytest.approx(64 * 2**18 * 4 * (3.0 - 1.0), rel=1e-6)


def test_an_uncalibrated_precision_is_an_error():
    with pytest.raises(InputError, match=r"synthetic .*train .*mixed.*float32"):
        predict_time(GPT, Workload(batch_size=1, seq_len=2, mode=Mode.TRAIN), make_calibration("cuda", "bfloat16"))


def test_a_missing_table_is_named_in_the_error():
    calibration = make_calibration()
    tables = {name: table for name, table in calibration.tables.items() if name != "matmul.infer"}
    with pytest.raises(InputError, match=r"'matmul.infer'.*qkv cost calibrate"):
        predict_time(GPT, Workload(batch_size=1, seq_len=2), calibration.replace(tables=tables))


def test_a_mixed_precision_step_includes_casts_of_inputs_and_gradients_of_biases():
    calibration = make_calibration("cuda", "bfloat16")
    workload = Workload(batch_size=2, seq_len=16, mode=Mode.TRAIN, dtype="mixed")

    def seconds(name, config=GPT):
        (op,) = [op for op in predict_time(config, workload, calibration).operation_times if op.name == name]
        return op.seconds / op.runs

    cast, bias = (calibration.get_table(f"{name}.train") for name in ("cast", "bias"))
    unbiased = GPT.replace(feed_forward_bias=False)
    assert seconds("up_proj") - seconds("up_proj", unbiased) == pytest.approx(bias.interpolate(32 * 256))
    assert seconds("down_proj") - seconds("down_proj", unbiased) == pytest.approx(bias.interpolate(32 * 64))
    up, down = (calibration.get_table("matmul.train").interpolate(32, *sides) for sides in ((64, 256), (256, 64)))
    assert seconds("up_proj", unbiased) == pytest.approx(up + cast.interpolate(32 * 64))
    assert seconds("down_proj", unbiased) == pytest.approx(down)


def test_the_launches_of_an_update_do_not_overlap():
    calibration = make_calibration("cuda", "bfloat16")
    overheads = {**calibration.launch_overheads, "gpt.train_forward": LaunchOverhead(base=1.0, per_layer=0.0)}
    overheads |= {
        "gpt.train_gradients": LaunchOverhead(base=3.0, per_layer=0.0),
        "gpt.train": LaunchOverhead(base=10.0, per_layer=0.0),
    }
    slow = {**calibration.tables, "loss.train": TimingTable(axes=((1,),), exponents=(0,), seconds=(50.0,))}
    workload = Workload(batch_size=2, seq_len=16, mode=Mode.TRAIN, dtype="mixed")
    result = predict_time(GPT, workload, calibration.replace(launch_overheads=overheads, tables=slow))
    assert result.seconds == pytest.approx(1 + 50 + (10 - 3), abs=0.1)


def test_heads_that_share_keys_read_them_once_in_a_decode_step_on_a_gpu():
    config = GPT.replace(n_heads=8, n_kv_heads=2, d_head=64)
    workload = Workload(batch_size=2, seq_len=512, mode=Mode.DECODE)
    for kind, dtype, n_heads in (("cuda", "bfloat16", 2 * 2), ("cpu", "float32", 2 * 8)):
        calibration = make_calibration(kind, dtype)
        result = predict_time(config, workload.replace(dtype=dtype), calibration)
        (op,) = [op for op in result.operation_times if op.name == "attention"]
        table = calibration.get_table("decode-fused.infer")
        fixed = 0.0 if kind == "cuda" else table.min_seconds
        assert op.seconds == pytest.approx(3 * (table.interpolate(n_heads, 512, 64) - fixed), rel=1e-6)


@pytest.mark.parametrize(
    ("config", "mode", "n"),
    [(FAMILIES[0], "forward", 3), (FAMILIES[3], "forward", 2 + 2 * 3), (FAMILIES[3], "decode", 2 * 3)],
    ids=["gpt", "seq2seq", "seq2seq decode"],
)
def test_every_eager_attention_layer_adds_launch_overhead(config, mode, n):
    calibration = make_calibration()
    overheads = {**calibration.launch_overheads, f"eager.{mode}": LaunchOverhead(base=1e-4, per_layer=1e-5 + 1.0)}
    workload = Workload(batch_size=2, seq_len=16, mode=mode)
    fused, eager = (
        predict_time(
            config, workload.replace(kernel=kernel), calibration.replace(launch_overheads=overheads)
        ).launch_seconds
        for kernel in ("fused", "eager")
    )
    assert eager - fused == pytest.approx(n)


def gpu_attention_seconds(n_heads, n, width):
    """128 processors with 32 queries each, so one short sequence leaves most of them idle."""
    return max(1, n_heads * n / 32 / 128) * n * width * 1e-9


def cpu_attention_seconds(n_heads, n, width):
    """On average, half of the last block of keys of a causal query is masked."""
    return n_heads * n * (n + 300) * width * 1e-9


@pytest.mark.parametrize("seconds", [gpu_attention_seconds, cpu_attention_seconds])
@pytest.mark.parametrize("n", [256, 1024, 4096, 16384, 65536])
@pytest.mark.parametrize(("mode", "dtype"), [("forward", "bfloat16"), ("train", "mixed")])
def test_attention_is_extrapolated_beyond_the_calibrated_lengths(seconds, n, mode, dtype):
    axes = ((1, 4, 16), (256, 1024), (64,))
    points = [(n_heads, length, 64) for n_heads in axes[0] for length in axes[1]]
    table = TimingTable(axes=axes, exponents=(1, 2, 1), seconds=tuple(seconds(*point) for point in points))
    names = [f"causal-fused.{pass_name}" for pass_name in ("infer", "train")]
    calibration = make_calibration("cuda", "bfloat16")
    calibration = calibration.replace(tables={**calibration.tables, **dict.fromkeys(names, table)})
    workload = Workload(batch_size=1, seq_len=n, mode=mode, dtype=dtype)
    result = predict_time(GPT.replace(context_length=n), workload, calibration)
    (attention,) = [op.seconds for op in result.operation_times if op.name == "attention"]
    assert attention == pytest.approx(3 * seconds(1, n, 64))


def test_attention_calibrated_with_a_single_length_is_extrapolated():
    table = TimingTable(axes=((1, 4), (1,), (64,)), exponents=(1, 2, 1), seconds=(1e-6, 4e-6))
    calibration = make_calibration("cuda", "bfloat16")
    calibration = calibration.replace(tables={**calibration.tables, "causal-fused.infer": table})
    result = predict_time(GPT, Workload(batch_size=1, seq_len=5, dtype="bfloat16"), calibration)
    (attention,) = [op.seconds for op in result.operation_times if op.name == "attention"]
    # Five queries per layer. Each additional key adds half the time of the first one.
    assert attention == pytest.approx(3 * 5e-6 * (1 + 0.5 * 4))
