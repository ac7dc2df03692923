"""Activation patches, head ablation and attention masking, with the fused kernel."""

import pytest
import torch

from qkv.choices import PositionKind
from qkv.config import GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.errors import TapError
from qkv.inspection import ablate_head, intervene, mask_attention, record
from tests.agreement.model_strategies import assert_close, build_random_model, random_ids, random_source_ids
from tests.agreement.operator_counter import Operators

SMALL = {"vocab_size": 23, "context_length": 29, "d_model": 10, "n_heads": 5}


def gpt(**changes):
    return build_random_model(GPTConfig(**{**SMALL, "n_layers": 2, **changes}))


def seq2seq():
    layers = {"n_encoder_layers": 1, "n_decoder_layers": 2, "source_vocab_size": 19, "share_embeddings": False}
    return build_random_model(Seq2SeqConfig(**SMALL, **layers))


def test_a_number_replaces_all_values():
    model, ids = gpt(), random_ids(1, 3, 7)
    with (
        intervene(model, {"blocks.*.attention_out": 0.0, "blocks.*.feed_forward_out": 0.0}),
        record(model, "*") as activations,
    ):
        model(ids)
    assert torch.equal(activations["blocks.1.resid_post"], activations["embedding.sum"])


def test_a_function_receives_the_activation():
    model, ids = gpt(), random_ids(1, 3, 7)
    with intervene(model, {"last_hidden_state": lambda states: 2 * states}):
        doubled = model(ids)
    assert_close(doubled, 2 * model(ids))


def test_a_tensor_patches_in_the_activations_of_another_text():
    model, ids, others = gpt(), random_ids(1, 3, 7), random_ids(2, 3, 7)
    with record(model, "blocks.1.resid_pre") as activations:
        expected = model(others)
    with intervene(model, {"blocks.1.resid_pre": activations["blocks.1.resid_pre"]}):
        assert torch.equal(model(ids), expected)
    assert not torch.equal(model(ids), expected)


def test_a_tensor_of_another_dtype_is_converted():
    model, ids = gpt(), random_ids(1, 3, 7)
    with intervene(model, {"last_hidden_state": torch.zeros(3, 7, 10)}):
        assert (model(ids) == 0).all()


def test_interventions_compose_and_end_with_the_with_block():
    model, ids = gpt(), random_ids(1, 3, 7)
    before = model(ids)
    add, multiply = (
        intervene(model, {"last_hidden_state": lambda x: x + 1}),
        intervene(model, {"last_hidden_state": lambda x: x * 3}),
    )
    with add, multiply, record(model, "last_hidden_state") as activations:
        model(ids)
    assert_close(activations["last_hidden_state"], 3 * (model.hidden_states(ids) + 1))
    assert torch.equal(model(ids), before)


def test_interventions_end_when_the_forward_pass_fails():
    model, ids = gpt(), random_ids(1, 3, 7)
    before = model(ids)
    with pytest.raises(ZeroDivisionError), intervene(model, {"last_hidden_state": lambda x: x / (1 // 0)}):
        model(ids)
    assert torch.equal(model(ids), before)


def test_a_replacement_of_another_shape_raises_with_both_shapes():
    model = gpt()
    message = r"'last_hidden_state'.*\(3, 7, 10\).*\(3, 6, 10\)"
    with pytest.raises(TapError, match=message), intervene(model, {"last_hidden_state": lambda x: x[:, 1:]}):
        model(random_ids(1, 3, 7))


def test_the_inputs_tap_cannot_be_replaced():
    model = gpt()
    with (
        pytest.raises(TapError, match=r"'blocks\.0\.attention\.inputs'.*mask_attention"),
        intervene(model, {"blocks.0.attention.inputs": 0.0}),
    ):
        pass


def test_an_invalid_intervention_leaves_no_hooks():
    model = gpt()
    with pytest.raises(TapError), intervene(model, {"last_hidden_state": 0.0, "finale": 0.0}):
        pass
    assert not model.last_hidden_state.interventions


@pytest.mark.parametrize("head", [0, 4])
def test_an_ablated_head_equals_zero_output_weights(head):
    model, ids = gpt(), random_ids(1, 3, 7)
    attention = model.blocks[0].attention
    with ablate_head(model, "blocks.0.attention", head), torch.no_grad(), Operators() as operators:
        off = model(ids)
    assert operators.n_fused == 2
    with torch.no_grad():
        attention.out_proj.weight[:, 2 * head : 2 * head + 2] = 0.0
    assert_close(off, model(ids))


def test_a_head_can_be_ablated_in_several_layers():
    model, ids = gpt(), random_ids(1, 3, 7)
    with ablate_head(model, "blocks.*.attention", 3), record(model, "*.head_outputs") as activations:
        model(ids)
    for i in range(2):
        heads = activations[f"blocks.{i}.attention.head_outputs"]
        assert (heads[:, 3] == 0).all()
        assert (heads[:, [0, 1, 2, 4]] != 0).all()


@pytest.mark.parametrize("head", [5, -1])
def test_an_invalid_head_raises(head):
    model = gpt()
    message = rf"'blocks\.0\.attention' has 5 heads \(0 … 4\).*head {head}$"
    with pytest.raises(TapError, match=message), ablate_head(model, "blocks.0.attention", head):
        pass
    with pytest.raises(TapError, match=message), mask_attention(model, "blocks.0.attention", query=1, key=0, head=head):
        pass


def test_an_unknown_attention_raises():
    message = r"'block\.0\.attention\.inputs'.*'blocks\.0\.attention\.inputs'"
    with pytest.raises(TapError, match=message), ablate_head(gpt(), "block.0.attention", 0):
        pass
    rnn = build_random_model(RNNConfig(vocab_size=23, d_model=10))
    message = r"'decoder\.attention\.inputs'"
    with pytest.raises(TapError, match=message), mask_attention(rnn, "decoder.attention", query=0, key=0):
        pass


def recorded_weights(model, run):
    with record(model, "*.weights") as activations:
        run()
    return activations


def test_a_masked_edge_has_weight_zero_and_the_row_is_renormalized():
    model, ids = gpt(), random_ids(1, 3, 7)
    before = recorded_weights(model, lambda: model(ids))["blocks.0.attention.weights"]
    with mask_attention(model, "blocks.0.attention", query=4, key=1):
        after = recorded_weights(model, lambda: model(ids))["blocks.0.attention.weights"]
    expected = before.clone()
    expected[:, :, 4, 1] = 0.0
    assert_close(after, expected / expected.sum(-1, keepdim=True))
    assert (after[:, :, 4, 1] == 0).all()


@pytest.mark.parametrize("head", [None, 2])
@pytest.mark.parametrize("positions", [PositionKind.LEARNED, PositionKind.ALIBI])
def test_masking_equals_a_score_of_minus_infinity_and_stays_fused(head, positions):
    model, ids = gpt(positions=positions), random_ids(1, 3, 7)

    def forbid(scores):
        scores = scores.clone()
        scores[:, slice(None) if head is None else head, 4, 1] = float("-inf")
        return scores

    with intervene(model, {"blocks.0.attention.scores": forbid}):
        expected = model(ids)
    with (
        mask_attention(model, "blocks.0.attention", query=4, key=1, head=head),
        torch.no_grad(),
        Operators() as operators,
    ):
        got = model(ids)
    assert_close(got, expected)
    assert not torch.allclose(got, model(ids))
    assert (operators.n_fused, operators.n_softmax) == (2, 0)


def test_masking_the_only_key_leaves_a_row_of_zeros():
    model, ids = gpt(), random_ids(1, 3, 7)
    with mask_attention(model, "blocks.0.attention", query=0, key=0), record(model, "blocks.0.*") as activations:
        logits = model(ids)
    assert (activations["blocks.0.attention.weights"][:, :, 0] == 0).all()
    assert (activations["blocks.0.attention.head_outputs"][:, :, 0] == 0).all()
    assert logits.isfinite().all()


def test_masking_all_heads_blocks_the_information_flow_between_two_tokens():
    """In a one-layer model, information only moves along that edge."""
    model, ids = gpt(n_layers=1), random_ids(1, 3, 7, 19)
    changed = ids.clone()
    changed[:, 1] = (changed[:, 1] + 1) % 19
    with mask_attention(model, "blocks.0.attention", query=4, key=1):
        masked, masked_changed = model(ids), model(changed)
    assert torch.equal(masked[:, 4], masked_changed[:, 4])
    assert not torch.allclose(model(ids)[:, 4], model(changed)[:, 4])
    assert not torch.allclose(masked[:, 5], masked_changed[:, 5])


def test_an_edge_that_no_pass_reaches_raises_at_the_end():
    model = gpt()
    message = r"9 to key 1 of 'blocks\.0\.attention'"
    with pytest.raises(TapError, match=message), mask_attention(model, "blocks.0.attention", query=9, key=1):
        model(random_ids(1, 3, 7))
    with pytest.raises(TapError, match="query 1 to key 7"), mask_attention(model, "blocks.0.attention", query=1, key=7):
        model(random_ids(1, 3, 7))
    assert not model.blocks[0].attention.inputs.interventions


def run_in_chunks(ids, split_points, run):
    return torch.cat([run(chunk) for chunk in torch.tensor_split(ids, split_points, dim=1)], dim=1)


@pytest.mark.parametrize("split_points", [[], [4], [2, 3, 4, 5, 6], [1, 6]])
@pytest.mark.parametrize(("query", "key"), [(4, 1), (0, 0), (6, 6)])
def test_masking_with_a_kv_cache_equals_a_full_pass(split_points, query, key):
    model, ids = gpt(), random_ids(1, 3, 7)
    with mask_attention(model, "blocks.0.attention", query=query, key=key):
        full = model(ids)
        cache = model.new_cache(batch=3)
        assert_close(run_in_chunks(ids, split_points, lambda chunk: model(chunk, cache=cache)), full)


@pytest.mark.parametrize("split_points", [[4], [2, 3, 4, 5, 6], [1, 6]])
@pytest.mark.parametrize("query", [0, 4])
def test_masking_a_source_key_only_affects_its_target_position(split_points, query):
    model, ids = seq2seq(), random_ids(1, 3, 7)
    source = model.encode(random_source_ids(1, 3, 5))
    with mask_attention(model, "decoder.blocks.0.cross_attention", query=query, key=3):
        full = model.decode(ids, source)
        cache = model.new_cache(batch=3)
        assert_close(run_in_chunks(ids, split_points, lambda chunk: model.decode(chunk, source, cache=cache)), full)
    differs = (full - model.decode(ids, source)).abs().amax((0, 2)) > 1e-9
    assert differs.tolist() == [position >= query for position in range(7)]


def test_masking_applies_to_every_row_of_a_ragged_cache():
    model, ids, more = gpt(), random_ids(1, 2, 5), random_ids(2, 2, 3)
    attention_mask = torch.tensor([[True] * 5, [False, False, False, True, True]])
    with mask_attention(model, "blocks.0.attention", query=3, key=1):
        cache = model.new_cache(batch=2)
        first = model(ids, attention_mask=attention_mask, cache=cache)
        second = model(more, cache=cache)
        full = [model(torch.cat((ids[0], more[0]))[None])[0], model(torch.cat((ids[1, 3:], more[1]))[None])[0]]
    assert_close(torch.cat((first[0], second[0])), full[0])
    assert_close(torch.cat((first[1, 3:], second[1])), full[1])


def test_masking_applies_to_every_beam_that_shares_a_source():
    model, ids = seq2seq(), random_ids(1, 6, 7)
    source = model.encode(random_source_ids(1, 2, 5))
    repeated_source = type(source)(states=source.states.repeat_interleave(3, dim=0))
    with mask_attention(model, "decoder.blocks.*.cross_attention", query=2, key=3, head=1):
        assert_close(model.decode(ids, source), model.decode(ids, repeated_source))
