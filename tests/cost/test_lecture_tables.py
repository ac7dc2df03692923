"""The tables of lecture E have exact numbers, and their rows sum to the full pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import GPTConfig, preset
from qkv.cost import estimate
from qkv.cost.lecture_tables import count_attention_matrix_parameters, lecture_errata, lecture_tables
from tests.cost.config_strategies import FAMILIES

B, N, D, H, L = 3, 37, 30, 5, 2
CONFIG = GPTConfig(vocab_size=41, context_length=64, d_model=D, n_heads=H, n_layers=L)


def table_rows(config, **workload):
    (table,) = lecture_tables(estimate(config, **workload))
    return {row.name: row for row in table.rows}


def test_the_rows_of_a_full_sequence_have_exact_numbers():
    result = table_rows(CONFIG, batch_size=B, seq_len=N, mode="forward")
    flops = {
        "xW_Q, xW_K, xW_V": 6 * B * N * D**2,
        "softmax(QKᵀ/√d)": 2 * B * N**2 * D,
        "P·V": 2 * B * N**2 * D,
        "concat(heads)·W_O": 2 * B * N * D**2,
        "GELU(YW₁)W₂": 16 * B * N * D**2,
        "sum of the above": 24 * B * N * D**2 + 4 * B * N**2 * D,
    }
    assert {name: result[name].flops for name in flops} == {name: L * n for name, n in flops.items()}
    assert result["sum of the above"].order == "bnd² + bn²d"
    # Reads the concatenated heads and the weights with their bias, and writes the output.
    assert result["concat(heads)·W_O"].unfused_elements == L * (2 * B * N * D + D**2 + D)
    assert result["P·V"].unfused_elements == L * (2 * B * N * D + B * H * N**2)


def test_a_decode_step_has_one_factor_of_n_less():
    result = table_rows(CONFIG, batch_size=B, seq_len=N, mode="decode")
    assert result["sum of the above"].flops == L * (24 * B * D**2 + 4 * B * N * D)
    assert result["sum of the above"].order == "bd² + bnd"
    assert result["softmax(QKᵀ/√d)"].order == "bnd"


@given(
    st.one_of(*FAMILIES.values()),
    st.sampled_from(["forward", "train"]),
)
def test_the_rows_sum_to_the_full_pass(config, mode):
    cost = estimate(config, batch_size=2, seq_len=5, mode=mode)
    (table,) = lecture_tables(cost)
    rows = [row for row in table.rows if row.name != "sum of the above"]
    assert sum(row.flops for row in rows) == table.total.flops == cost.flops.forward
    assert sum(row.unfused_elements for row in rows) == table.total.unfused_elements
    if mode == "forward":
        assert sum(row.kernel_bytes for row in rows) == table.total.kernel_bytes == cost.traffic.forward_fused


def test_a_generation_has_one_table_for_the_prefill_and_one_for_the_decode_steps():
    cost = estimate(CONFIG, batch_size=2, seq_len=11, n_new_tokens=7, mode="generate")
    prefill, decode = lecture_tables(cost)
    assert prefill.total.flops + decode.total.flops == cost.flops.forward


def test_an_encoder_is_counted_with_the_source_length():
    result = table_rows(preset("transformer-nano"), batch_size=1, seq_len=7, source_len=11, mode="forward")
    assert result["encoder: softmax(QKᵀ/√d)"].order == "bm²d"
    assert result["encoder: softmax(QKᵀ/√d)"].flops == 2 * 2 * 11**2 * 64
    assert result["decoder: cross: P·V"].flops == 2 * 2 * 7 * 11 * 64


def test_gpt3_attention_has_4_d_squared_parameters_per_layer():
    assert count_attention_matrix_parameters(preset("gpt3"), 96) == 57_982_058_496


def test_errata_are_listed_and_one_is_specific_to_encoder_decoders():
    assert any("nm + mk + nk" in erratum for erratum in lecture_errata(CONFIG))
    assert any("m²" in erratum for erratum in lecture_errata(preset("transformer-nano")))
    assert not any("encoder" in erratum for erratum in lecture_errata(CONFIG))
    assert lecture_errata(preset("rnn-nano")) == []


@pytest.mark.parametrize(("name", "seq_len", "total"), [("gpt2", 1024, 291_648_307_200), ("bert-base", 512, None)])
def test_the_totals_of_published_models(name, seq_len, total):
    result = table_rows(preset(name), batch_size=1, seq_len=seq_len, mode="forward")
    d, n_layers = 768, 12
    assert result["sum of the above"].flops == n_layers * (24 * seq_len * d**2 + 4 * seq_len**2 * d)
    if total:
        (table,) = lecture_tables(estimate(preset(name), batch_size=1, seq_len=seq_len, mode="forward"))
        assert table.total.flops == total
