"""Lecture E's tables: each row's exact number, and all rows together the whole pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import GPTConfig, preset
from qkv.cost import estimate
from qkv.cost.lecture import attention_weights, lecture_tables, slips
from tests.cost.drawn import FAMILIES

B, N, D, H, L = 3, 37, 30, 5, 2
CONFIG = GPTConfig(vocab_size=41, context_length=64, d_model=D, n_heads=H, n_layers=L)


def rows(config, **work):
    (table,) = lecture_tables(estimate(config, **work))
    return {row.name: row for row in table.rows}


def test_the_rows_of_a_whole_sequence_are_the_lectures_with_exact_numbers():
    found = rows(CONFIG, batch=B, length=N, mode="forward")
    flops = {
        "xW_Q, xW_K, xW_V": 6 * B * N * D**2, "softmax(QKᵀ/√d)": 2 * B * N**2 * D, "P·V": 2 * B * N**2 * D,
        "concat(heads)·W_O": 2 * B * N * D**2, "GELU(YW₁)W₂": 16 * B * N * D**2,
        "all of these": 24 * B * N * D**2 + 4 * B * N**2 * D,
    }  # fmt: skip
    assert {name: found[name].flops for name in flops} == {name: L * n for name, n in flops.items()}
    assert found["all of these"].order == "bnd² + bn²d"
    # Reads the heads' results and the weights with their bias, writes the sum.
    assert found["concat(heads)·W_O"].numbers == L * (2 * B * N * D + D**2 + D)
    assert found["P·V"].numbers == L * (2 * B * N * D + B * H * N**2)


def test_a_decoding_step_has_one_n_less():
    found = rows(CONFIG, batch=B, length=N, mode="decode")
    assert found["all of these"].flops == L * (24 * B * D**2 + 4 * B * N * D)
    assert found["all of these"].order == "bd² + bnd"
    assert found["softmax(QKᵀ/√d)"].order == "bnd"


@given(
    st.one_of(*FAMILIES.values()),
    st.sampled_from(["forward", "train"]),
)
def test_all_rows_together_are_the_whole_pass(config, mode):
    one = estimate(config, batch=2, length=5, mode=mode)
    (table,) = lecture_tables(one)
    own = [row for row in table.rows if row.name != "all of these"]
    assert sum(row.flops for row in own) == table.total.flops == one.flops.forward
    assert sum(row.numbers for row in own) == table.total.numbers
    if mode == "forward":
        assert sum(row.kernel_bytes for row in own) == table.total.kernel_bytes == one.traffic.fused


def test_a_generation_has_a_table_for_the_prompt_and_one_for_the_steps():
    one = estimate(CONFIG, batch=2, length=11, new=7, mode="generate")
    prompt, steps = lecture_tables(one)
    assert prompt.total.flops + steps.total.flops == one.flops.forward


def test_an_encoder_is_counted_by_the_sources_length():
    found = rows(preset("transformer-nano"), batch=1, length=7, source_length=11, mode="forward")
    assert found["encoder: softmax(QKᵀ/√d)"].order == "bm²d"
    assert found["encoder: softmax(QKᵀ/√d)"].flops == 2 * 2 * 11**2 * 64
    assert found["decoder: cross: P·V"].flops == 2 * 2 * 7 * 11 * 64


def test_gpt3s_attention_weights_are_four_squares_a_layer():
    assert attention_weights(preset("gpt3"), 96) == 57_982_058_496


def test_the_slips_are_said_and_the_encoder_decoders_only_there():
    assert any("nm + mk + nk" in one for one in slips(CONFIG))
    assert any("m² is the encoder's" in one for one in slips(preset("transformer-nano")))
    assert not any("encoder" in one for one in slips(CONFIG))
    assert slips(preset("rnn-nano")) == []


@pytest.mark.parametrize(("name", "length", "total"), [("gpt2", 1024, 291_648_307_200), ("bert-base", 512, None)])
def test_the_lectures_total_of_known_models(name, length, total):
    found = rows(preset(name), batch=1, length=length, mode="forward")
    d, n_layers = 768, 12
    assert found["all of these"].flops == n_layers * (24 * length * d**2 + 4 * length**2 * d)
    if total:
        (table,) = lecture_tables(estimate(preset(name), batch=1, length=length, mode="forward"))
        assert table.total.flops == total
