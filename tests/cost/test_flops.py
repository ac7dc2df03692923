"""FLOPs from a config are the FLOPs that torch counts when the model is run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from qkv.choices import HeadLayout, Kernel, ScoreKind
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Mode, Workload, estimate, flops, operations
from qkv.cost.blocks import seen_pairs
from qkv.models import build
from qkv.nn import Mask, using
from qkv.nn.cache import SourceCache
from tests.cost.drawn import FAMILIES, source_of
from tests.cost.unrolled import unroll

batches, lengths = st.sampled_from([1, 2, 3]), st.sampled_from([1, 5, 7, 11])


def on_meta(config):
    with torch.device("meta"):
        model = build(config)
    return unroll(model) if isinstance(config, RNNConfig) else model


def ids(batch, n):
    return torch.zeros(batch, n, dtype=torch.long, device="meta")


def outputs(model, config, batch, n, m):
    """Everything that the config's model can answer, each part run once."""
    if isinstance(config, GPTConfig):
        return [model(ids(batch, n))]
    if not isinstance(config, BERTConfig):
        return [model(source_of(config, batch, m), ids(batch, n))]
    states = model(ids(batch, n))
    found = [states]
    if config.masked_word_head:
        found.append(model.masked_word_logits(states))
    if config.pooler:
        pooled = model.pooled(states)
        found += [pooled, *(head(pooled) for head in (model.next_sentence, model.classifier) if head is not None)]
    return found


def counted(config, batch, n, m):
    """torch's count, forward and backward, of the plain road."""
    model = on_meta(config)
    with using(model, Kernel.PLAIN):
        with FlopCounterMode(display=False) as forward:
            found = outputs(model, config, batch, n, m)
        with FlopCounterMode(display=False) as backward:
            sum(one.sum() for one in found).backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("examples", [4, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_equal_torch_s_count_for_random_configs(family, examples):
    @settings(max_examples=examples)
    @given(FAMILIES[family], batches, lengths, lengths)
    def check(config, batch, n, m):
        source = m if isinstance(config, Seq2SeqConfig | RNNConfig) else None
        work = Workload(batch=batch, length=n, source_length=source, mode="train", kernel="plain")
        ours = flops(config, work)
        assert (ours.forward, ours.backward) == counted(config, batch, n, m)
        assert ours.recomputed == 0

    check()


@pytest.mark.parametrize("family", ["gpt", "seq2seq", "rnn"])
def test_a_cached_step_equals_torch_s_count_for_random_configs(family):
    @settings(max_examples=4)
    @given(FAMILIES[family], batches, lengths, lengths)
    def check(config, batch, n, m):
        if isinstance(config, GPTConfig):
            config = config.replace(causal=True)
        source = None if isinstance(config, GPTConfig) else m
        work = Workload(batch=batch, length=n, source_length=source, mode="decode", kernel="plain")
        assert flops(config, work).forward == counted_step(config, batch, n, m)

    check()


def counted_step(config, batch, n, m):
    model = on_meta(config)
    with using(model, Kernel.PLAIN), torch.no_grad():
        if isinstance(config, RNNConfig):
            start = model.encode(ids(batch, m))
            kept = SourceCache()
            model.decode(ids(batch, 1), start.source, start.state, cache=kept)
            with FlopCounterMode(display=False) as count:
                model.decode(ids(batch, 1), start.source, start.state, cache=kept)
            return count.get_total_flops()
        cache = model.new_cache(batch=batch, capacity=n + 1)
        sources = [] if isinstance(config, GPTConfig) else [model.encode(source_of(config, batch, m))]
        run = model if isinstance(config, GPTConfig) else model.decode
        if n > 1:
            run(ids(batch, n - 1), *sources, cache=cache)
        elif sources:
            # The first step fills the source's part; a second cache's worth is what a later step costs.
            run(ids(batch, 1), *sources, cache=cache)
            cache.n_filled, cache.lengths = 0, torch.zeros_like(cache.lengths)
        with FlopCounterMode(display=False) as count:
            run(ids(batch, 1), *sources, cache=cache)
    return count.get_total_flops()


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_unrolled_cell_answers_as_torch_s_own(cell):
    config = RNNConfig(vocab_size=13, d_model=6, n_encoder_layers=2, n_decoder_layers=3, cell=cell)
    source, target = torch.randint(13, (2, 7)), torch.randint(13, (2, 5))
    expected = build(config, seed=3)(source, target)
    torch.testing.assert_close(unroll(build(config, seed=3))(source, target), expected)


def test_gpt2_at_1024_tokens_is_what_torch_counts():
    found = flops(preset("gpt2"), Workload(batch=1, length=1024, mode="train", kernel="plain"))
    assert (found.forward, found.backward) == counted(preset("gpt2"), 1, 1024, None)


@given(st.integers(1, 13), st.integers(1, 13), st.none() | st.integers(1, 17), st.booleans())
def test_seen_pairs_are_the_mask_s_own(n_new, n_before, window, causal):
    n = n_before + n_new
    if causal:
        positions = torch.arange(n_before, n)[None]
        mask = Mask(causal=True, window=window, query_positions=positions)
        assert seen_pairs(n_new, n, causal=True, window=window) == int(
            mask.visible(n_new, n, torch.device("cpu")).sum()
        )
    else:
        seen = Mask(window=window).visible(n, n, torch.device("cpu")).expand(1, 1, n, n)
        assert seen_pairs(n, n, causal=False, window=window) == int(seen.sum())


@given(batches, st.integers(1, 17))
def test_causal_attention_is_useful_in_n_n_plus_1_halves(b, n):
    d = 6
    config = GPTConfig(vocab_size=5, context_length=17, d_model=d, n_heads=2, n_layers=1)
    found = {one.name: one for one in operations(config, Workload(batch=b, length=n))}
    assert found["scores"].flops + found["mix"].flops == 4 * b * n * n * d
    assert found["scores"].useful_flops + found["mix"].useful_flops == 2 * b * n * (n + 1) * d


@given(batches, st.integers(1, 17), st.integers(1, 17))
def test_the_table_of_formulas_holds_row_by_row(b, n, m):
    d, v = 6, 5
    config = Seq2SeqConfig(
        vocab_size=v, context_length=17, d_model=d, n_heads=3, n_encoder_layers=1, n_decoder_layers=1
    )

    def rows(mode):
        work = Workload(batch=b, length=n, source_length=m, mode=mode)
        found = {}
        for one in operations(config, work):
            found[one.part] = found.get(one.part, 0) + one.flops
        return found

    forward, decode = rows("forward"), rows("decode")
    assert forward["decoder.blocks.attention"] == 8 * b * n * d**2 + 4 * b * n**2 * d
    assert forward["decoder.blocks.feedforward"] == 16 * b * n * d**2
    assert forward["decoder.blocks.cross"] == 4 * b * n * d**2 + 4 * b * m * d**2 + 4 * b * n * m * d
    assert forward["unembedding"] == 2 * b * n * d * v
    assert decode["decoder.blocks.attention"] == 8 * b * d**2 + 4 * b * n * d
    assert decode["decoder.blocks.cross"] == 4 * b * d**2 + 4 * b * m * d
    assert not [part for part in decode if part.startswith("encoder")]


def test_what_is_computed_again_in_backward_is_counted():
    config = preset("gpt2")
    plain = estimate(config, batch=2, length=64, kernel="plain", mode="train").flops
    by_part = {(one.part, one.name): one.flops for one in operations(config, Workload(batch=2, length=64))}
    fused = estimate(config, batch=2, length=64, mode="train").flops
    assert fused.recomputed == by_part["blocks.attention", "scores"]
    assert fused.forward == plain.forward
    # A chunked loss makes its gradients in the forward pass: nothing is done twice.
    assert estimate(config, batch=2, length=64, kernel="plain", loss_chunk=16, mode="train").flops == plain
    again = estimate(config, batch=2, length=64, kernel="plain", checkpointing=True, mode="train").flops
    assert again.recomputed == plain.forward - by_part["unembedding", "logits"]


@pytest.mark.parametrize(("layout", "joined"), [("split", 3 * 5), ("pooled", 14), ("pooled-mean", 14)])
def test_head_layouts_and_free_widths_are_counted(layout, joined):
    d_value = 5 if layout == "split" else 14
    config = GPTConfig(
        vocab_size=5, context_length=7, d_model=14, n_heads=3, d_head=4, d_value=d_value, n_layers=1,
        head_layout=HeadLayout(layout),
    )  # fmt: skip
    found = {one.name: one.flops for one in operations(config, Workload(batch=1, length=7)) if one.is_block}
    assert found["query"] == 2 * 7 * 14 * 3 * 4
    assert found["value"] == 2 * 7 * 14 * 3 * d_value
    assert found["output"] == 2 * 7 * joined * 14


def test_only_a_recurrence_has_steps_that_wait():
    config = RNNConfig(vocab_size=5, d_model=6, attention=ScoreKind.DOT)
    waits = {
        one.part: one.steps
        for one in operations(config, Workload(batch=2, length=7, source_length=11))
        if one.steps > 1
    }
    assert waits == {"encoder.recurrence": 11, "decoder.recurrence": 7}
    assert all(one.steps == 1 for one in operations(preset("gpt2"), Workload(batch=2, length=7)))


def test_training_is_three_forwards_less_the_gradient_to_an_rnn_s_zero_state():
    config = RNNConfig(vocab_size=5, d_model=6, n_encoder_layers=2, cell="lstm")
    found = flops(config, Workload(batch=3, length=7, source_length=11, mode=Mode.TRAIN))
    assert 3 * found.forward - found.total == 2 * (2 * 2) * 3 * 3 * (4 * 3)
