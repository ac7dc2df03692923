"""Changing what passes: patches, heads switched off, edges cut; the fused kernel stays on."""

import pytest
import torch

from qkv.choices import PositionKind
from qkv.config import GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.errors import TapError
from qkv.inspection import ablate_head, intervene, mask_attention, record
from tests.agreement.families import close, shaken, some_ids, some_source
from tests.agreement.operators import Operators

SMALL = {"vocab_size": 23, "context_length": 29, "d_model": 10, "n_heads": 5}


def gpt(**changes):
    return shaken(GPTConfig(**{**SMALL, "n_layers": 2, **changes}))


def seq2seq():
    both = {"n_encoder_layers": 1, "n_decoder_layers": 2, "source_vocab_size": 19, "share_embeddings": False}
    return shaken(Seq2SeqConfig(**SMALL, **both))


def test_a_number_fills_the_place():
    model, ids = gpt(), some_ids(1, 3, 7)
    with (
        intervene(model, {"blocks.*.attention_out": 0.0, "blocks.*.feed_forward_out": 0.0}),
        record(model, "*") as trace,
    ):
        model(ids)
    assert torch.equal(trace["blocks.1.resid_post"], trace["embedding.sum"])


def test_a_function_is_given_what_passes():
    model, ids = gpt(), some_ids(1, 3, 7)
    with intervene(model, {"final": lambda states: 2 * states}):
        doubled = model(ids)
    close(doubled, 2 * model(ids))


def test_a_tensor_patches_in_what_another_text_had_there():
    model, ids, others = gpt(), some_ids(1, 3, 7), some_ids(2, 3, 7)
    with record(model, "blocks.1.resid_pre") as trace:
        expected = model(others)
    with intervene(model, {"blocks.1.resid_pre": trace["blocks.1.resid_pre"]}):
        assert torch.equal(model(ids), expected)
    assert not torch.equal(model(ids), expected)


def test_a_tensor_of_another_dtype_is_taken():
    model, ids = gpt(), some_ids(1, 3, 7)
    with intervene(model, {"final": torch.zeros(3, 7, 10)}):
        assert (model(ids) == 0).all()


def test_changes_follow_each_other_and_end_with_the_with():
    model, ids = gpt(), some_ids(1, 3, 7)
    before = model(ids)
    add, multiply = intervene(model, {"final": lambda x: x + 1}), intervene(model, {"final": lambda x: x * 3})
    with add, multiply, record(model, "final") as trace:
        model(ids)
    close(trace["final"], 3 * (model.states(ids) + 1))
    assert torch.equal(model(ids), before)


def test_changes_end_when_the_pass_fails_too():
    model, ids = gpt(), some_ids(1, 3, 7)
    before = model(ids)
    with pytest.raises(ZeroDivisionError), intervene(model, {"final": lambda x: x / (1 // 0)}):
        model(ids)
    assert torch.equal(model(ids), before)


def test_a_change_of_shape_is_refused_with_both():
    model = gpt()
    message = r"'final' passes shape \(3, 7, 10\), the change gave \(3, 6, 10\)"
    with pytest.raises(TapError, match=message), intervene(model, {"final": lambda x: x[:, 1:]}):
        model(some_ids(1, 3, 7))


def test_a_whole_lookup_cannot_be_changed():
    model = gpt()
    with (
        pytest.raises(TapError, match=r"'blocks\.0\.attention\.inputs' carries a whole look-up"),
        intervene(model, {"blocks.0.attention.inputs": 0.0}),
    ):
        pass


def test_a_refused_change_leaves_nothing_behind():
    model = gpt()
    with pytest.raises(TapError), intervene(model, {"final": 0.0, "finale": 0.0}):
        pass
    assert not model.final.has_interventions


@pytest.mark.parametrize("head", [0, 4])
def test_a_head_that_is_off_writes_nothing(head):
    model, ids = gpt(), some_ids(1, 3, 7)
    attention = model.blocks[0].attention
    with ablate_head(model, "blocks.0.attention", head), torch.no_grad(), Operators() as operators:
        off = model(ids)
    assert operators.n_fused == 2
    with torch.no_grad():
        attention.out_proj.weight[:, 2 * head : 2 * head + 2] = 0.0
    close(off, model(ids))


def test_a_head_may_be_off_in_several_places():
    model, ids = gpt(), some_ids(1, 3, 7)
    with ablate_head(model, "blocks.*.attention", 3), record(model, "*.head_outputs") as trace:
        model(ids)
    for i in range(2):
        heads = trace[f"blocks.{i}.attention.head_outputs"]
        assert (heads[:, 3] == 0).all()
        assert (heads[:, [0, 1, 2, 4]] != 0).all()


@pytest.mark.parametrize("head", [5, -1])
def test_a_head_that_is_not_there_is_refused(head):
    model = gpt()
    message = rf"'blocks\.0\.attention' has 5 heads \(0 … 4\), head {head} was asked for"
    with pytest.raises(TapError, match=message), ablate_head(model, "blocks.0.attention", head):
        pass
    with pytest.raises(TapError, match=message), mask_attention(model, "blocks.0.attention", query=1, key=0, head=head):
        pass


def test_an_attention_that_is_not_there_is_refused():
    message = r"no tap is named 'block\.0\.attention\.inputs'; did you mean"
    with pytest.raises(TapError, match=message), ablate_head(gpt(), "block.0.attention", 0):
        pass
    rnn = shaken(RNNConfig(vocab_size=23, d_model=10))
    message = r"no tap is named 'decoder\.attention\.inputs'"
    with pytest.raises(TapError, match=message), mask_attention(rnn, "decoder.attention", query=0, key=0):
        pass


def recorded_weights(model, run):
    with record(model, "*.weights") as trace:
        run()
    return trace


def test_a_cut_edge_has_weight_zero_and_the_others_share_its_part():
    model, ids = gpt(), some_ids(1, 3, 7)
    before = recorded_weights(model, lambda: model(ids))["blocks.0.attention.weights"]
    with mask_attention(model, "blocks.0.attention", query=4, key=1):
        after = recorded_weights(model, lambda: model(ids))["blocks.0.attention.weights"]
    expected = before.clone()
    expected[:, :, 4, 1] = 0.0
    close(after, expected / expected.sum(-1, keepdim=True))
    assert (after[:, :, 4, 1] == 0).all()


@pytest.mark.parametrize("head", [None, 2])
@pytest.mark.parametrize("positions", [PositionKind.LEARNED, PositionKind.ALIBI])
def test_a_cut_is_minus_infinity_added_to_the_score_and_stays_fused(head, positions):
    model, ids = gpt(positions=positions), some_ids(1, 3, 7)

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
    close(got, expected)
    assert not torch.allclose(got, model(ids))
    assert (operators.n_fused, operators.n_softmax) == (2, 0)


def test_cutting_the_only_edge_leaves_a_row_of_zeros():
    model, ids = gpt(), some_ids(1, 3, 7)
    with mask_attention(model, "blocks.0.attention", query=0, key=0), record(model, "blocks.0.*") as trace:
        logits = model(ids)
    assert (trace["blocks.0.attention.weights"][:, :, 0] == 0).all()
    assert (trace["blocks.0.attention.head_outputs"][:, :, 0] == 0).all()
    assert logits.isfinite().all()


def test_cutting_all_edges_between_two_tokens_stops_all_that_went_from_one_to_the_other():
    """In a model of one layer, information moves by that edge alone."""
    model, ids = gpt(n_layers=1), some_ids(1, 3, 7, 19)
    changed = ids.clone()
    changed[:, 1] = (changed[:, 1] + 1) % 19
    with mask_attention(model, "blocks.0.attention", query=4, key=1):
        cut, cut_changed = model(ids), model(changed)
    assert torch.equal(cut[:, 4], cut_changed[:, 4])
    assert not torch.allclose(model(ids)[:, 4], model(changed)[:, 4])
    assert not torch.allclose(cut[:, 5], cut_changed[:, 5])


def test_an_edge_that_no_pass_reached_is_an_error_at_the_end():
    model = gpt()
    message = r"the edge 9→1 of 'blocks\.0\.attention' was never reached by a pass"
    with pytest.raises(TapError, match=message), mask_attention(model, "blocks.0.attention", query=9, key=1):
        model(some_ids(1, 3, 7))
    with pytest.raises(TapError, match="the edge 1→7"), mask_attention(model, "blocks.0.attention", query=1, key=7):
        model(some_ids(1, 3, 7))
    assert not model.blocks[0].attention.inputs.has_interventions


def in_steps(model, ids, cuts, run):
    return torch.cat([run(piece) for piece in torch.tensor_split(ids, cuts, dim=1)], dim=1)


@pytest.mark.parametrize("cuts", [[], [4], [2, 3, 4, 5, 6], [1, 6]])
@pytest.mark.parametrize(("query", "key"), [(4, 1), (0, 0), (6, 6)])
def test_an_edge_is_cut_in_cached_generation_as_in_one_pass(cuts, query, key):
    model, ids = gpt(), some_ids(1, 3, 7)
    with mask_attention(model, "blocks.0.attention", query=query, key=key):
        whole = model(ids)
        cache = model.new_cache(batch=3)
        close(in_steps(model, ids, cuts, lambda piece: model(piece, cache=cache)), whole)


@pytest.mark.parametrize("cuts", [[4], [2, 3, 4, 5, 6], [1, 6]])
@pytest.mark.parametrize("query", [0, 4])
def test_an_edge_to_the_source_is_cut_for_its_own_target_position_alone(cuts, query):
    model, ids = seq2seq(), some_ids(1, 3, 7)
    source = model.encode(some_source(1, 3, 5))
    with mask_attention(model, "decoder.blocks.0.cross_attention", query=query, key=3):
        whole = model.decode(ids, source)
        cache = model.new_cache(batch=3)
        close(in_steps(model, ids, cuts, lambda piece: model.decode(piece, source, cache=cache)), whole)
    differs = (whole - model.decode(ids, source)).abs().amax((0, 2)) > 1e-9
    assert differs.tolist() == [position >= query for position in range(7)]


def test_an_edge_is_cut_in_every_row_of_a_ragged_cache():
    model, ids, more = gpt(), some_ids(1, 2, 5), some_ids(2, 2, 3)
    attention_mask = torch.tensor([[True] * 5, [False, False, False, True, True]])
    with mask_attention(model, "blocks.0.attention", query=3, key=1):
        cache = model.new_cache(batch=2)
        first = model(ids, attention_mask=attention_mask, cache=cache)
        second = model(more, cache=cache)
        whole = [model(torch.cat((ids[0], more[0]))[None])[0], model(torch.cat((ids[1, 3:], more[1]))[None])[0]]
    close(torch.cat((first[0], second[0])), whole[0])
    close(torch.cat((first[1, 3:], second[1])), whole[1])


def test_an_edge_is_cut_for_every_beam_that_shares_a_source():
    model, ids = seq2seq(), some_ids(1, 6, 7)
    source = model.encode(some_source(1, 2, 5))
    alone = type(source)(states=source.states.repeat_interleave(3, dim=0))
    with mask_attention(model, "decoder.blocks.*.cross_attention", query=2, key=3, head=1):
        close(model.decode(ids, source), model.decode(ids, alone))
