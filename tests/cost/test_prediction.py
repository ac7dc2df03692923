"""Kernels put together to a step: one after another on a CPU, beside the launching on a GPU."""

import pytest

from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Mode, Precision, Workload, parameters
from qkv.cost.calibration import Overhead, Table
from qkv.cost.prediction import NEAR, _overlapped, _phases, predict
from qkv.errors import InputError
from tests.cost.calibrations import FLOOR, RATE, made_up

SHAPE = {"vocab_size": 512, "context_length": 4096, "d_model": 64, "n_heads": 1}
GPT = GPTConfig(**SHAPE, n_layers=3)
FAMILIES = [
    GPT,
    preset("llama-nano"),
    BERTConfig(**SHAPE, n_layers=2, masked_word_head=True),
    Seq2SeqConfig(**SHAPE, n_encoder_layers=2, n_decoder_layers=3),
    RNNConfig(vocab_size=512, d_model=64),
    RNNConfig(vocab_size=512, d_model=64, cell="lstm", attention="additive"),
]
MODES = ("forward", "train", "prefill", "decode")


@pytest.mark.parametrize("config", FAMILIES, ids=["gpt", "llama", "bert", "seq2seq", "gru", "lstm"])
@pytest.mark.parametrize("mode", MODES)
def test_every_family_has_a_time_in_every_mode_that_it_has(config, mode):
    if config.family == "bert" and mode in ("prefill", "decode"):
        pytest.skip("a BERT keeps no cache")
    found = predict(config, Workload(batch=2, length=17, mode=mode), made_up())
    assert found.seconds == pytest.approx(found.launching + found.computing + found.serial)
    assert min(found.launching, found.computing) > 0
    assert (found.serial > 0) == (config.family == "rnn")


def test_a_product_costs_what_the_table_says_without_the_call_itself_on_a_cpu():
    rows, inner, columns = 2 * 16, 64, 256
    work = Workload(batch=2, length=16)
    (expand,) = [one for one in predict(GPT, work, made_up()).spent if one.name == "expand"]
    table = made_up().table("product.infer")
    assert expand.seconds == pytest.approx(3 * (table.at(rows, inner, columns) - table.floor))
    assert table.at(16, 16, 256) == pytest.approx(FLOOR + RATE * 16 * 16 * 256)


def test_a_gpu_takes_the_longer_of_launching_and_computing_and_the_logits_hide_behind_nothing():
    work = Workload(batch=2, length=16, dtype=Precision.BFLOAT16)
    calibration = made_up("cuda", "bfloat16")
    found = predict(GPT, work, calibration)
    (logits,) = [one.seconds for one in found.spent if one.name == "logits"]
    assert found.seconds == pytest.approx(max(found.launching, found.computing - logits) + logits)
    slow = {**calibration.launches, "gpt.forward": Overhead(once=9.0, layer=1.0)}
    launched = predict(GPT, work, calibration.replace(launches=slow))
    assert launched.seconds == pytest.approx(9.0 + 3 * 1.0 + logits)
    assert launched.bound_by == "launching"


@pytest.mark.parametrize("config", FAMILIES, ids=["gpt", "llama", "bert", "seq2seq", "gru", "lstm"])
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_the_phases_of_a_gpu_are_all_of_the_launching_and_all_of_the_computing(config, mode):
    calibration = made_up("cuda", "bfloat16")
    work = Workload(batch=2, length=17, mode=mode, dtype="mixed" if mode == "train" else "bfloat16")
    found = predict(config, work, calibration)
    phases = _phases(config, work, calibration, found.spent)
    assert sum(launch for launch, _ in phases) == pytest.approx(found.launching)
    assert sum(compute for _, compute in phases) == pytest.approx(found.computing)


@pytest.mark.parametrize(("n_words", "times"), [(512, 1.0), (513, 4.0), (514, 3.0), (516, 2.0)])
def test_logits_of_a_vocabulary_that_is_no_multiple_of_8_take_as_many_times_as_was_measured(n_words, times):
    found = predict(GPT.replace(vocab_size=n_words), Workload(batch=2, length=16), made_up())
    (logits,) = [one.seconds for one in found.spent if one.name == "logits"]
    table = made_up().table("product.infer")
    assert logits == pytest.approx(times * (table.at(32, 64, n_words) - table.floor), rel=1e-6)


def test_the_few_steps_of_a_recurrence_that_launching_holds_are_not_counted_twice():
    config = RNNConfig(vocab_size=512, d_model=64)
    found = predict(config, Workload(batch=2, length=1, source_length=9, mode=Mode.DECODE), made_up())
    table = made_up().table("one-way.infer")
    assert found.serial == pytest.approx(table.at(1, 2, 64) - table.floor)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([(3.0, 1.0), (1.0, 5.0)], 8.0),  # launched slowly first, then computed slowly
        ([(1.0, 5.0), (3.0, 1.0)], 6.0),  # the launching of the second hides behind the first
        ([(2.0, 2.0)], 2.0),
    ],
)
def test_a_phase_hides_its_launching_behind_what_is_still_computed(phases, expected):
    assert _overlapped(phases) == expected


def test_a_layer_more_costs_a_layers_launching_and_computing_more():
    work = Workload(batch=2, length=16)
    few, more, most = (predict(GPT.replace(n_layers=n), work, made_up()).seconds for n in (2, 3, 4))
    assert more - few == pytest.approx(most - more)


def test_training_also_updates_every_parameter():
    found = predict(GPT, Workload(batch=2, length=16, mode=Mode.TRAIN), made_up())
    (update,) = [one.seconds for one in found.spent if one.part == "optimizer"]
    table = made_up().table("update.train")
    assert update == pytest.approx(table.at(parameters(GPT).total) - table.floor)


def test_a_generation_is_its_prompt_and_its_steps():
    work = Workload(batch=2, length=100, mode=Mode.GENERATE, new=21)
    prompt = predict(GPT, work.replace(mode=Mode.PREFILL, new=None, predictions=1), made_up()).seconds
    steps = [
        predict(GPT, work.replace(mode=Mode.DECODE, new=None, length=n), made_up()).seconds for n in range(101, 121)
    ]
    assert predict(GPT, work, made_up()).seconds == pytest.approx(prompt + sum(steps), rel=1e-3)


def test_weights_that_no_cache_holds_are_read_at_the_speed_of_memory():
    calibration = made_up()
    slow = Table(axes=((NEAR["cpu"], 2.0 * NEAR["cpu"]),), growth=(0,), seconds=(1.0, 3.0))
    work = Workload(batch=1, length=2, mode=Mode.DECODE)
    large = GPT.replace(vocab_size=2**18)
    near, far = (
        predict(large, work, calibration.replace(tables={**calibration.tables, "stream": stream}))
        for stream in (slow.replace(seconds=(1.0, 1.0)), slow)
    )
    (near_logits,), (far_logits,) = (
        [one.seconds for one in found.spent if one.name == "logits"] for found in (near, far)
    )
    assert far_logits - near_logits == pytest.approx(64 * 2**18 * 4 * (3.0 - 1.0), rel=1e-6)


def test_another_precision_than_the_calibrated_one_is_refused():
    with pytest.raises(InputError, match="made up is for train at mixed, not float32"):
        predict(GPT, Workload(batch=1, length=2, mode=Mode.TRAIN), made_up("cuda", "bfloat16"))


def test_a_table_that_is_missing_says_to_calibrate_again():
    calibration = made_up()
    tables = {name: table for name, table in calibration.tables.items() if name != "product.infer"}
    with pytest.raises(InputError, match=r"no table 'product.infer': calibrate again"):
        predict(GPT, Workload(batch=1, length=2), calibration.replace(tables=tables))


def test_a_mixed_step_casts_what_a_product_reads_from_the_stream_and_adds_up_the_gradients_of_biases():
    calibration = made_up("cuda", "bfloat16")
    work = Workload(batch=2, length=16, mode=Mode.TRAIN, dtype="mixed")

    def seconds(name, config=GPT):
        (one,) = [one for one in predict(config, work, calibration).spent if one.name == name]
        return one.seconds / one.runs

    cast, bias = (calibration.table(f"{name}.train") for name in ("cast", "bias"))
    without = GPT.replace(feed_forward_bias=False)
    assert seconds("expand") - seconds("expand", without) == pytest.approx(bias.at(32 * 256))
    assert seconds("contract") - seconds("contract", without) == pytest.approx(bias.at(32 * 64))
    inward, back = (calibration.table("product.train").at(32, *sides) for sides in ((64, 256), (256, 64)))
    assert seconds("expand", without) == pytest.approx(inward + cast.at(32 * 64))
    assert seconds("contract", without) == pytest.approx(back)


def test_the_launching_of_an_update_hides_behind_nothing():
    calibration = made_up("cuda", "bfloat16")
    launches = {**calibration.launches, "gpt.train_forward": Overhead(once=1.0, layer=0.0)}
    launches |= {"gpt.train_gradients": Overhead(once=3.0, layer=0.0), "gpt.train": Overhead(once=10.0, layer=0.0)}
    slow = {**calibration.tables, "loss.train": Table(axes=((1,),), growth=(0,), seconds=(50.0,))}
    work = Workload(batch=2, length=16, mode=Mode.TRAIN, dtype="mixed")
    found = predict(GPT, work, calibration.replace(launches=launches, tables=slow))
    assert found.seconds == pytest.approx(1 + 50 + (10 - 3), abs=0.1)


def test_heads_that_share_keys_read_them_once_in_a_gpus_decoding():
    config = GPT.replace(n_heads=8, n_kv_heads=2, d_head=64)
    work = Workload(batch=2, length=512, mode=Mode.DECODE)
    for kind, dtype, groups in (("cuda", "bfloat16", 2 * 2), ("cpu", "float32", 2 * 8)):
        calibration = made_up(kind, dtype)
        found = predict(config, work.replace(dtype=dtype), calibration)
        (one,) = [one for one in found.spent if one.name == "attention"]
        table = calibration.table("step-fused.infer")
        own = 0.0 if kind == "cuda" else table.floor
        assert one.seconds == pytest.approx(3 * (table.at(groups, 512, 64) - own), rel=1e-6)


@pytest.mark.parametrize(
    ("config", "mode", "n"),
    [(FAMILIES[0], "forward", 3), (FAMILIES[3], "forward", 2 + 2 * 3), (FAMILIES[3], "decode", 2 * 3)],
    ids=["gpt", "seq2seq", "seq2seq decode"],
)
def test_each_plain_attention_has_more_to_launch(config, mode, n):
    calibration = made_up()
    launches = {**calibration.launches, f"plain.{mode}": Overhead(once=1e-4, layer=1e-5 + 1.0)}
    work = Workload(batch=2, length=16, mode=mode)
    fused, plain = (
        predict(config, work.replace(kernel=kernel), calibration.replace(launches=launches)).launching
        for kernel in ("fused", "plain")
    )
    assert plain - fused == pytest.approx(n)


def a_gpu(groups, n, width):
    """128 places, each of which takes 32 queries of a text at a time: one short text leaves most idle."""
    return max(1, groups * n / 32 / 128) * n * width * 1e-9


def a_cpu(groups, n, width):
    """Of the last block of keys that a causal query sees, half is in vain."""
    return groups * n * (n + 300) * width * 1e-9


@pytest.mark.parametrize("seconds", [a_gpu, a_cpu])
@pytest.mark.parametrize("n", [256, 1024, 4096, 16384, 65536])
@pytest.mark.parametrize(("mode", "dtype"), [("forward", "bfloat16"), ("train", "mixed")])
def test_attention_beyond_the_calibrated_lengths_goes_on_by_work_and_by_how_busy_the_device_is(seconds, n, mode, dtype):
    axes = ((1, 4, 16), (256, 1024), (64,))
    points = [(groups, length, 64) for groups in axes[0] for length in axes[1]]
    table = Table(axes=axes, growth=(1, 2, 1), seconds=tuple(seconds(*point) for point in points))
    names = [f"causal-fused.{road}" for road in ("infer", "train")]
    calibration = made_up("cuda", "bfloat16")
    calibration = calibration.replace(tables={**calibration.tables, **dict.fromkeys(names, table)})
    work = Workload(batch=1, length=n, mode=mode, dtype=dtype)
    found = predict(GPT.replace(context_length=n), work, calibration)
    (attention,) = [one.seconds for one in found.spent if one.name == "attention"]
    assert attention == pytest.approx(3 * seconds(1, n, 64))


def test_attention_that_was_timed_with_one_token_alone_goes_on_all_the_same():
    table = Table(axes=((1, 4), (1,), (64,)), growth=(1, 2, 1), seconds=(1e-6, 4e-6))
    calibration = made_up("cuda", "bfloat16")
    calibration = calibration.replace(tables={**calibration.tables, "causal-fused.infer": table})
    found = predict(GPT, Workload(batch=1, length=5, dtype="bfloat16"), calibration)
    (attention,) = [one.seconds for one in found.spent if one.name == "attention"]
    # Of each layer: five queries, each of which takes half as much again for each further key.
    assert attention == pytest.approx(3 * 5e-6 * (1 + 0.5 * 4))
