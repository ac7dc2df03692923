"""Views as data: attention maps, rollout, logit lens, residual stream, logit attribution, embeddings, JSON."""

import json
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from qkv.choices import AttentionStack, NormPosition
from qkv.errors import InputError
from qkv.inspection import (
    attention_map,
    attention_rollout,
    classify_heads,
    compute_neuron_view,
    embedding_trajectories,
    head_outputs,
    logit_attribution,
    logit_lens,
    merge_subwords,
    nearest_tokens,
    position_similarity,
    prepare_input,
    remove_sink,
    residual_stream_norms,
    run_with_cache,
    sink_mask,
    to_jsonable,
    value_weighted_attention,
)
from qkv.inspection.model_input import ModelInput, TokenizedText
from qkv.inspection.rollout import rollout_from_means
from tests.agreement.model_strategies import (
    assert_close,
    berts,
    build_random_model,
    gpts,
    random_ids,
    random_source_ids,
    seq2seqs,
)
from tests.inspection.examples import FAMILIES, TEXT, example_input, example_task

TRANSFORMERS = ["gpt", "bert", "seq2seq"]


def side(ids):
    n = len(ids)
    return TokenizedText(
        text="", ids=ids, tokens=["x"] * n, word_ids=[None] * n, spans=[None] * n, is_special=[False] * n
    )


def run_random_model(config, seed):
    """Run a randomly drawn model on random ids."""
    model = build_random_model(config, seed)
    sequence = side(random_ids(seed, 1, 7)[0].tolist())
    source = side(random_source_ids(seed, 1, 5)[0].tolist()) if config.family == "seq2seq" else None
    return run_with_cache(model, ModelInput(sequence=sequence, source=source, next_ids=sequence.ids[1:]))


@pytest.mark.parametrize("families", [gpts(), berts(), seq2seqs()], ids=TRANSFORMERS)
def test_contributions_sum_to_the_logit_of_any_model(families):
    @settings(max_examples=12)
    @given(families, st.integers(0, 99))
    def law(config, seed):
        cache = run_random_model(config, seed)
        tokenizer = example_task("gpt").tokenizer
        attribution = logit_attribution(cache, tokenizer, position=4, token_id=3)
        assert float(attribution.values.sum()) == pytest.approx(float(cache.logits[4, 3]), abs=1e-8)
        difference = logit_attribution(cache, tokenizer, position=-1, token_id=3, against=11)
        assert float(difference.values.sum()) == pytest.approx(
            float(cache.logits[-1, 3] - cache.logits[-1, 11]), abs=1e-8
        )
        n = sum(
            len(cache.all_weights(stack)) * cache.all_weights(stack).shape[1]
            for stack in cache.stacks
            if stack is not AttentionStack.ENCODER
        )
        assert len(attribution.names) == len(set(attribution.names)) == n + config_layers(config) + 2

    law()


def config_layers(config):
    return config.n_decoder_layers if config.family == "seq2seq" else config.n_layers


@given(gpts(norm_position=NormPosition.PRE), st.integers(0, 99))
def test_head_outputs_sum_to_the_attention_output_without_its_bias(config, seed):
    cache = run_random_model(config, seed)
    for layer in range(2):
        bias = getattr(cache.model.blocks[layer].attention.out_proj, "bias", None)
        total = head_outputs(cache, AttentionStack.SELF, layer).sum(0) + (0 if bias is None else bias)
        assert_close(total, cache.get_activation(f"blocks.{layer}.attention_out"))


@given(gpts(), st.integers(0, 99))
def test_value_weighted_attention_is_the_norm_of_each_keys_contribution(config, seed):
    cache = run_random_model(config, seed)
    attention = cache.model.blocks[1].attention
    (record,) = cache.attention_records(AttentionStack.SELF, 1)
    result = value_weighted_attention(cache, AttentionStack.SELF, layer=1)
    # The direct computation: all heads and keys except one are zeroed, and the layer projects the rest.
    for head, query, key in ((0, 6, 2), (5, 3, 3)):
        values = record.inputs.values[0, head // (6 // attention.head_config.n_kv_heads), key]
        single_head = torch.zeros_like(record.head_outputs)[:, :, :1]
        single_head[0, head, 0] = values * record.weights()[0, head, query, key]
        output = attention.out_proj(attention.combine_heads(single_head)) - attention.out_proj(
            attention.combine_heads(torch.zeros_like(single_head))
        )
        assert float(result[head, query, key]) == pytest.approx(float(output.norm().detach()), abs=1e-9)


def test_rollout_multiplies_half_attention_half_identity():
    weights = torch.rand(2, 3, 5, 5).softmax(-1).double()
    mixed = [weights[layer].mean(0) / 2 + torch.eye(5) / 2 for layer in range(2)]
    assert_close(rollout_from_means(weights.mean(1)), torch.stack([mixed[0], mixed[1] @ mixed[0]]))


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_shares_of_a_rollout_sum_to_one(family):
    cache = run_with_cache(example_task(family).model, example_input(family))
    for stack in cache.stacks:
        result = attention_rollout(cache, stack)
        total = result.sequence.sum(-1) + (0 if result.source is None else result.source.sum(-1))
        assert_close(total, torch.ones_like(total))
        assert (result.source is None) == (stack not in (AttentionStack.DECODER, AttentionStack.CROSS))


def test_the_title_of_a_map_names_the_attention_and_what_is_averaged():
    cache = run_with_cache(example_task("seq2seq").model, example_input("seq2seq"))
    assert attention_map(cache, AttentionStack.CROSS).title == "cross-attention, mean of all layers and heads"
    assert attention_map(cache, AttentionStack.CROSS, layer=0).title == "cross-attention, layer 0, mean of all heads"
    assert attention_map(cache, AttentionStack.DECODER, layer=0, head=1).title == (
        "decoder self-attention, layer 0, head 1"
    )


def test_merging_subwords_sums_columns_and_averages_rows():
    sequence = TokenizedText(
        text="",
        ids=[1, 2, 3, 4],
        tokens=["[CLS]", " un", "do", " it"],
        word_ids=[None, 0, 0, 1],
        spans=[None] * 4,
        is_special=[True, False, False, False],
    )
    cache = run_with_cache(example_task("gpt").model, example_input("gpt"))
    view = attention_map(cache, layer=0, head=0)
    weights = torch.rand(4, 4).softmax(-1)
    merged = merge_subwords(
        type(view)(weights=weights, queries=sequence.labels, keys=sequence.labels, title="t"), sequence, sequence
    )
    assert merged.keys == merged.queries == ["[CLS]", "undo", "it"]
    expected = torch.stack([weights[0], weights[1:3].mean(0), weights[3]])
    expected = torch.stack([expected[:, 0], expected[:, 1:3].sum(1), expected[:, 3]], dim=1)
    torch.testing.assert_close(merged.weights, expected)
    rest = remove_sink(weights, sink_mask(sequence))
    assert (rest[:, 0] == 0).all()
    torch.testing.assert_close(rest.sum(-1), torch.ones(4))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_depth_of_the_logit_lens_is_the_models_output(family):
    cache = run_with_cache(example_task(family).model, example_input(family))
    view = logit_lens(cache, example_task(family).tokenizer, n=3)
    expected = cache.logits.float().softmax(-1)[:, : example_task(family).tokenizer.vocab_size].topk(3)
    torch.testing.assert_close(view.probabilities[-1], expected.values)
    assert torch.equal(view.ids[-1], expected.indices)
    n_layers = 0 if family == "rnn" else config_layers(example_task(family).model.config)
    assert len(view.depths) == n_layers + 1
    targets = cache.model_input.sequence.ids if family == "bert" else cache.model_input.next_ids
    position = len(targets) - 1
    probability = cache.logits.float().softmax(-1)[position, targets[position]]
    torch.testing.assert_close(view.target_probabilities[-1, position], probability)
    assert bool(view.target_probabilities[-1, -1].isnan()) == (family == "gpt")


def test_the_logit_lens_of_a_middle_layer_equals_a_truncated_model():
    from qkv.inspection import intervene

    model, text = example_task("gpt").model, example_input("gpt")
    view = logit_lens(run_with_cache(model, text), example_task("gpt").tokenizer, n=3)
    with intervene(model, {"blocks.1.attention_out": 0.0, "blocks.1.feed_forward_out": 0.0}):
        short = model(torch.tensor([text.sequence.ids]))[0].float().softmax(-1)
    torch.testing.assert_close(
        view.probabilities[1], short[:, : example_task("gpt").tokenizer.vocab_size].topk(3).values
    )


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_residual_stream_norms_equal_the_norms_of_recorded_activations(family):
    cache = run_with_cache(example_task(family).model, example_input(family))
    view = residual_stream_norms(cache, cache.stacks[-1])
    prefix = "decoder." if family == "seq2seq" else ""
    assert_close(view.residual_norms[1], cache.get_activation(f"{prefix}blocks.0.resid_post").norm(dim=-1))
    assert_close(view.sublayer_norms[-1, 1], cache.get_activation(f"{prefix}blocks.1.feed_forward_out").norm(dim=-1))
    assert view.sublayers == (
        ["attention", "cross_attention", "feed_forward"] if prefix else ["attention", "feed_forward"]
    )


@given(st.one_of(gpts(), berts(), seq2seqs()), st.integers(0, 99))
def test_the_steps_from_q_and_k_to_weights_are_consistent(config, seed):
    cache = run_random_model(config, seed)
    for stack in cache.stacks:
        view = compute_neuron_view(cache, stack, layer=1, head=5, query=4)
        assert_close(view.products.sum(-1), view.dots)
        assert_close(view.scores.softmax(-1), view.weights)
        visible_keys = view.scores.isfinite()
        assert_close(view.scaled[visible_keys], view.scores[visible_keys])
        # A rotation preserves norms.
        torch.testing.assert_close(view.q_unrotated.norm().double(), view.q.norm().double(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            view.k_unrotated.norm(dim=-1).double(), view.k.norm(dim=-1).double(), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_trajectories_have_a_point_for_each_token_and_depth(family):
    cache = run_with_cache(example_task(family).model, example_input(family))
    view = embedding_trajectories(cache, example_task(family).tokenizer, n=2)
    assert view.points.shape == (len(view.depths), len(view.tokens), 2)
    assert view.similarity[0].tolist() == pytest.approx([1.0] * len(view.tokens))
    assert {len(near) for near in view.neighbors} == {2}


def test_nearest_tokens_have_the_largest_cosine():
    model, tokenizer = example_task("gpt").model, example_task("gpt").tokenizer
    cosines = F.cosine_similarity(model.embedding.token.weight[29], model.embedding.token.weight, dim=-1)
    cosines[29] = -2
    (first, similarity), *_ = nearest_tokens(model, tokenizer, 29)
    assert similarity == pytest.approx(float(cosines.detach().max()), abs=1e-6)
    assert first.replace("▁", " ") == tokenizer.decode([29, int(cosines.argmax())])[len(tokenizer.decode([29])) :]


def test_position_similarity_has_a_unit_diagonal_and_requires_position_embeddings():
    result = position_similarity(example_task("gpt").model, 7)
    assert_close(result.diagonal(), torch.ones(7).double())
    assert_close(result, result.T)
    with pytest.raises(InputError, match="position"):
        position_similarity(example_task("rnn").model, 7)
    with pytest.raises(InputError, match=r"context_length=41\b.*\b99\b"):
        position_similarity(example_task("gpt").model, 99)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_view_is_json_compatible(family):
    cache = run_with_cache(example_task(family).model, example_input(family))
    views = [
        classify_heads(cache),
        attention_map(cache),
        logit_lens(cache, example_task(family).tokenizer),
        embedding_trajectories(cache, example_task(family).tokenizer),
    ]
    if family != "rnn":
        views += [
            compute_neuron_view(cache),
            residual_stream_norms(cache),
            logit_attribution(cache, example_task(family).tokenizer, position=1, token_id=2),
        ]
    for view in views:
        data = json.loads(json.dumps(to_jsonable(view), allow_nan=False))
        assert data.keys() >= {"weights"} or len(data) > 3


def test_views_that_require_a_transformer_raise_for_an_rnn():
    cache = run_with_cache(example_task("rnn").model, example_input("rnn"))
    tokenizer = example_task("rnn").tokenizer
    for call in [
        lambda: attention_rollout(cache),
        lambda: compute_neuron_view(cache),
        lambda: residual_stream_norms(cache),
        lambda: value_weighted_attention(cache, AttentionStack.CROSS, layer=0),
        lambda: logit_attribution(cache, tokenizer, position=0, token_id=0),
    ]:
        with pytest.raises(InputError, match="RNN"):
            call()


def test_an_index_out_of_range_raises_with_the_limit():
    cache = run_with_cache(example_task("gpt").model, example_input("gpt"))
    tokenizer, n = example_task("gpt").tokenizer, len(prepare_input(example_task("gpt"), TEXT).sequence.ids)
    with pytest.raises(InputError, match=rf"position {n}\b.*\b{n} tokens"):
        logit_attribution(cache, tokenizer, position=n, token_id=0)
    with pytest.raises(InputError, match=rf"query {n}\b.*\b{n} positions"):
        compute_neuron_view(cache, query=n)
    with pytest.raises(InputError, match=r"head 3.*\b3 heads \(0 … 2\)"):
        attention_map(cache, layer=0, head=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logit_lens_does_not_depend_on_the_chunk_size(family, monkeypatch):
    cache, tokenizer = run_with_cache(example_task(family).model, example_input(family)), example_task(family).tokenizer
    full = logit_lens(cache, tokenizer, n=3)
    monkeypatch.setattr(import_module("qkv.inspection.logit_lens"), "CHUNK_POSITIONS", 3)
    parts = logit_lens(cache, tokenizer, n=3)
    assert parts.tokens == full.tokens
    assert_close(parts.probabilities, full.probabilities)
    assert_close(parts.target_probabilities.nan_to_num(), full.target_probabilities.nan_to_num())
