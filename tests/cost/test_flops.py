"""FLOPs computed from a config equal those that torch counts when the model runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from qkv.choices import AttentionKernel, HeadCombination, RNNAttentionScore
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Mode, Workload, count_flops, estimate, list_operations
from qkv.cost.operations import attended_pairs
from qkv.models import build
from qkv.nn import Mask, use_attention_kernel
from qkv.nn.cache import LayerSourceCache
from tests.cost.config_strategies import FAMILIES, make_source
from tests.cost.unrolled_rnn import unroll

batches, lengths = st.sampled_from([1, 2, 3]), st.sampled_from([1, 5, 7, 11])


def build_on_meta(config):
    with torch.device("meta"):
        model = build(config)
    return unroll(model) if isinstance(config, RNNConfig) else model


def ids(batch, n):
    return torch.zeros(batch, n, dtype=torch.long, device="meta")


def outputs(model, config, batch, n, m):
    """Run every part and head of the model once and return the outputs."""
    if isinstance(config, GPTConfig):
        return [model(ids(batch, n))]
    if not isinstance(config, BERTConfig):
        return [model(make_source(config, batch, m), ids(batch, n))]
    states = model(ids(batch, n))
    result = [states]
    if config.masked_lm_head:
        result.append(model.masked_lm_logits(states))
    if config.pooler:
        pooled = model.pooled_output(states)
        result += [pooled, *(head(pooled) for head in (model.next_sentence, model.classifier) if head is not None)]
    return result


def count_with_torch(config, batch, n, m):
    """Forward and backward FLOPs of the eager implementation, counted by torch."""
    model = build_on_meta(config)
    with use_attention_kernel(model, AttentionKernel.EAGER):
        with FlopCounterMode(display=False) as forward:
            result = outputs(model, config, batch, n, m)
        with FlopCounterMode(display=False) as backward:
            sum(op.sum() for op in result).backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("examples", [4, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_flops_equal_the_count_of_torch_for_random_configs(family, examples):
    @settings(max_examples=examples)
    @given(FAMILIES[family], batches, lengths, lengths)
    def check(config, batch, n, m):
        source = m if isinstance(config, Seq2SeqConfig | RNNConfig) else None
        workload = Workload(batch_size=batch, seq_len=n, source_len=source, mode="train", kernel="eager")
        flops = count_flops(config, workload)
        assert (flops.forward, flops.backward) == count_with_torch(config, batch, n, m)
        assert flops.recomputed == 0

    check()


@pytest.mark.parametrize("family", ["gpt", "seq2seq", "rnn"])
def test_a_cached_step_equals_the_count_of_torch_for_random_configs(family):
    @settings(max_examples=4)
    @given(FAMILIES[family], batches, lengths, lengths)
    def check(config, batch, n, m):
        if isinstance(config, GPTConfig):
            config = config.replace(causal=True)
        source = None if isinstance(config, GPTConfig) else m
        workload = Workload(batch_size=batch, seq_len=n, source_len=source, mode="decode", kernel="eager")
        assert count_flops(config, workload).forward == count_step_with_torch(config, batch, n, m)

    check()


def count_step_with_torch(config, batch, n, m):
    model = build_on_meta(config)
    with use_attention_kernel(model, AttentionKernel.EAGER), torch.no_grad():
        if isinstance(config, RNNConfig):
            start = model.encode(ids(batch, m))
            saved = LayerSourceCache()
            model.decode(ids(batch, 1), start.source, start.state, cache=saved)
            with FlopCounterMode(display=False) as count:
                model.decode(ids(batch, 1), start.source, start.state, cache=saved)
            return count.get_total_flops()
        cache = model.new_cache(batch=batch, capacity=n + 1)
        sources = [] if isinstance(config, GPTConfig) else [model.encode(make_source(config, batch, m))]
        run = model if isinstance(config, GPTConfig) else model.decode
        if n > 1:
            run(ids(batch, n - 1), *sources, cache=cache)
        elif sources:
            # The first step also fills the cache of the source, so the FLOPs of a second one are counted.
            run(ids(batch, 1), *sources, cache=cache)
            cache.n_filled, cache.lengths = 0, torch.zeros_like(cache.lengths)
        with FlopCounterMode(display=False) as count:
            run(ids(batch, 1), *sources, cache=cache)
    return count.get_total_flops()


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_unrolled_cell_equals_the_recurrence_of_torch(cell):
    config = RNNConfig(vocab_size=13, d_model=6, n_encoder_layers=2, n_decoder_layers=3, cell=cell)
    source, target = torch.randint(13, (2, 7)), torch.randint(13, (2, 5))
    expected = build(config, seed=3)(source, target)
    torch.testing.assert_close(unroll(build(config, seed=3))(source, target), expected)


def test_gpt2_with_1024_tokens_equals_the_count_of_torch():
    result = count_flops(preset("gpt2"), Workload(batch_size=1, seq_len=1024, mode="train", kernel="eager"))
    assert (result.forward, result.backward) == count_with_torch(preset("gpt2"), 1, 1024, None)


@given(st.integers(1, 13), st.integers(1, 13), st.none() | st.integers(1, 17), st.booleans())
def test_attended_pairs_equal_the_dense_mask(n_new, n_before, window, causal):
    n = n_before + n_new
    if causal:
        positions = torch.arange(n_before, n)[None]
        mask = Mask(causal=True, sliding_window=window, query_positions=positions)
        assert attended_pairs(n_new, n, causal=True, window=window) == int(
            mask.to_dense(n_new, n, torch.device("cpu")).sum()
        )
    else:
        dense = Mask(sliding_window=window).to_dense(n, n, torch.device("cpu")).expand(1, 1, n, n)
        assert attended_pairs(n, n, causal=False, window=window) == int(dense.sum())


@given(batches, st.integers(1, 17))
def test_causal_attention_has_n_times_n_plus_1_over_2_useful_pairs(b, n):
    d = 6
    config = GPTConfig(vocab_size=5, context_length=17, d_model=d, n_heads=2, n_layers=1)
    result = {op.name: op for op in list_operations(config, Workload(batch_size=b, seq_len=n))}
    assert result["scores"].flops + result["mix"].flops == 4 * b * n * n * d
    assert result["scores"].useful_flops + result["mix"].useful_flops == 2 * b * n * (n + 1) * d


@given(batches, st.integers(1, 17), st.integers(1, 17))
def test_the_formulas_of_each_part_hold(b, n, m):
    d, v = 6, 5
    config = Seq2SeqConfig(
        vocab_size=v, context_length=17, d_model=d, n_heads=3, n_encoder_layers=1, n_decoder_layers=1
    )

    def rows(mode):
        workload = Workload(batch_size=b, seq_len=n, source_len=m, mode=mode)
        result = {}
        for op in list_operations(config, workload):
            result[op.part] = result.get(op.part, 0) + op.flops
        return result

    forward, decode = rows("forward"), rows("decode")
    assert forward["decoder.blocks.attention"] == 8 * b * n * d**2 + 4 * b * n**2 * d
    assert forward["decoder.blocks.feed_forward"] == 16 * b * n * d**2
    assert forward["decoder.blocks.cross_attention"] == 4 * b * n * d**2 + 4 * b * m * d**2 + 4 * b * n * m * d
    assert forward["unembedding"] == 2 * b * n * d * v
    assert decode["decoder.blocks.attention"] == 8 * b * d**2 + 4 * b * n * d
    assert decode["decoder.blocks.cross_attention"] == 4 * b * d**2 + 4 * b * m * d
    assert not [part for part in decode if part.startswith("encoder")]


def test_flops_recomputed_in_the_backward_pass_are_counted():
    config = preset("gpt2")
    eager = estimate(config, batch_size=2, seq_len=64, kernel="eager", mode="train").flops
    by_part = {(op.part, op.name): op.flops for op in list_operations(config, Workload(batch_size=2, seq_len=64))}
    fused = estimate(config, batch_size=2, seq_len=64, mode="train").flops
    assert fused.recomputed == by_part["blocks.attention", "scores"]
    assert fused.forward == eager.forward
    # A chunked loss computes its gradients in the forward pass, so nothing is computed twice.
    assert estimate(config, batch_size=2, seq_len=64, kernel="eager", loss_chunk_size=16, mode="train").flops == eager
    checkpointed = estimate(
        config, batch_size=2, seq_len=64, kernel="eager", activation_checkpointing=True, mode="train"
    ).flops
    assert checkpointed.recomputed == eager.forward - by_part["unembedding", "logits"]


@pytest.mark.parametrize(("combination", "joined"), [("split", 3 * 5), ("pooled", 14), ("pooled-mean", 14)])
def test_head_combinations_and_independent_head_widths_are_counted(combination, joined):
    d_value = 5 if combination == "split" else 14
    config = GPTConfig(
        vocab_size=5,
        context_length=7,
        d_model=14,
        n_heads=3,
        d_head=4,
        d_value=d_value,
        n_layers=1,
        head_combination=HeadCombination(combination),
    )
    result = {op.name: op.flops for op in list_operations(config, Workload(batch_size=1, seq_len=7)) if op.is_block}
    assert result["q_proj"] == 2 * 7 * 14 * 3 * 4
    assert result["v_proj"] == 2 * 7 * 14 * 3 * d_value
    assert result["out_proj"] == 2 * 7 * joined * 14


def test_only_recurrences_have_sequential_steps():
    config = RNNConfig(vocab_size=5, d_model=6, attention=RNNAttentionScore.DOT)
    steps = {
        op.part: op.steps
        for op in list_operations(config, Workload(batch_size=2, seq_len=7, source_len=11))
        if op.steps > 1
    }
    assert steps == {"encoder.recurrence": 11, "decoder.recurrence": 7}
    assert all(op.steps == 1 for op in list_operations(preset("gpt2"), Workload(batch_size=2, seq_len=7)))


def test_training_costs_three_forward_passes_minus_the_gradient_of_the_zero_state_of_an_rnn():
    config = RNNConfig(vocab_size=5, d_model=6, n_encoder_layers=2, cell="lstm")
    result = count_flops(config, Workload(batch_size=3, seq_len=7, source_len=11, mode=Mode.TRAIN))
    assert 3 * result.forward - result.total == 2 * (2 * 2) * 3 * 3 * (4 * 3)
