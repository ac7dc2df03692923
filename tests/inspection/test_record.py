"""Recording by name and pattern, over several passes, and weights recomputed for the fused kernel."""

import pytest
import torch

import qkv
from qkv.choices import AttentionKernel, PositionKind, RNNAttentionScore
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.errors import InputError, TapError
from qkv.inspection import AttentionRecord, intervene, mask_attention, record
from qkv.nn import use_attention_kernel
from tests.agreement.model_strategies import assert_close, build_random_model, random_ids, random_source_ids
from tests.agreement.operator_counter import Operators

SMALL = {"vocab_size": 23, "context_length": 29, "d_model": 10, "n_heads": 5}


def gpt(**changes):
    return build_random_model(GPTConfig(**{**SMALL, "n_layers": 2, **changes}))


def seq2seq(**changes):
    layers = {"n_encoder_layers": 1, "n_decoder_layers": 2, "source_vocab_size": 19, "share_embeddings": False}
    return build_random_model(Seq2SeqConfig(**{**SMALL, **layers, **changes}))


def eager_weights(model, name, run):
    """Returns what passes the tap when the eager kernel computes the weights."""
    recorded = []
    stop = dict(model.named_modules())[name].observe(recorded.append)
    with use_attention_kernel(model, AttentionKernel.EAGER):
        run()
    stop()
    return recorded


def test_a_tap_is_recorded_by_name():
    model, ids = gpt(), random_ids(1, 3, 7)
    with record(model, "last_hidden_state", "blocks.0.resid_pre") as activations:
        model(ids)
    assert_close(activations["last_hidden_state"], model.hidden_states(ids))
    assert activations["blocks.0.resid_pre"].shape == (3, 7, 10)
    assert activations.names == ["blocks.0.resid_pre", "last_hidden_state"]


def test_the_residual_stream_is_the_sum_of_sublayer_outputs():
    model = gpt()
    with record(model, "blocks.*") as activations:
        model(random_ids(1, 3, 7))
    block = "blocks.1"
    assert_close(
        activations[f"{block}.resid_mid"], activations[f"{block}.resid_pre"] + activations[f"{block}.attention_out"]
    )
    assert_close(
        activations[f"{block}.resid_post"], activations[f"{block}.resid_mid"] + activations[f"{block}.feed_forward_out"]
    )
    assert torch.equal(activations["blocks.0.resid_post"], activations["blocks.1.resid_pre"])


def test_recording_ends_with_the_with_block():
    model = gpt()
    with record(model, "last_hidden_state") as activations:
        model(random_ids(1, 3, 7))
    model(random_ids(2, 3, 7))
    assert activations.n_passes("last_hidden_state") == 1
    with Operators() as operators, torch.no_grad():
        model(random_ids(2, 3, 7))
    assert operators.n_fused == 2


def test_recording_ends_when_the_forward_pass_fails():
    model = gpt()
    with pytest.raises(InputError), record(model) as activations:
        model(torch.full((3, 7), 99))
    model(random_ids(2, 3, 7))
    assert activations.names == []


@pytest.mark.parametrize("positions", PositionKind)
@pytest.mark.parametrize("n_kv_heads", [5, 1])
def test_recomputed_weights_equal_eager_weights(positions, n_kv_heads):
    model = gpt(
        positions=positions, n_kv_heads=n_kv_heads, sliding_window=3, relative_buckets=8, relative_max_distance=13
    )
    ids = random_ids(1, 3, 7)
    attention_mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3, [False] * 2 + [True] * 5])
    with record(model, "*.weights") as activations:
        model(ids, attention_mask=attention_mask)
    for i in range(2):
        name = f"blocks.{i}.attention.weights"
        (plain,) = eager_weights(model, name, lambda: model(ids, attention_mask=attention_mask))
        assert_close(activations[name], plain)


def test_scores_are_recorded_with_the_fused_kernel():
    model = gpt()
    with torch.no_grad(), Operators() as operators, record(model, "blocks.0.attention.scores") as activations:
        model(random_ids(1, 3, 7))
    assert operators.n_fused == 2
    scores = activations["blocks.0.attention.scores"]
    assert (scores[0, 0, 2] == float("-inf")).tolist() == [False] * 3 + [True] * 4
    assert_close(scores.softmax(-1), activations["blocks.0.attention.weights"])


def test_overlapping_patterns_record_a_pass_once():
    model = gpt()
    with record(model, "*.weights", "blocks.0.*", "*.inputs", "*") as activations:
        model(random_ids(1, 3, 7))
    assert {activations.n_passes(name) for name in activations.names} == {1}


def test_only_the_requested_rows_are_computed():
    model = gpt()
    with record(model, "*.weights") as activations:
        model(random_ids(1, 3, 7))
    attention_record = activations.attention("blocks.1.attention")
    assert_close(attention_record.weights(rows=[5, 2]), attention_record.weights()[:, :, [5, 2]])
    assert attention_record.weights(rows=[3]).shape == (3, 5, 1, 7)
    assert_close(attention_record.scores(rows=[4]), attention_record.scores()[:, :, [4]])
    with pytest.raises(InputError, match=r"row 7.*\b7 queries \(0 … 6\)"):
        attention_record.weights(rows=[0, 7])
    with pytest.raises(InputError, match=r"row -1.*\b7 queries"):
        attention_record.weights(rows=[-1])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_the_error_is_small(dtype, limit):
    model = gpt().to(dtype)
    with record(model, "*.weights") as activations:
        model(random_ids(1, 3, 7))
    assert activations["blocks.0.attention.weights"].dtype == torch.promote_types(dtype, torch.float32)
    assert all(activations.attention(f"blocks.{i}.attention").reconstruction_error < limit for i in range(2))


def test_the_error_detects_a_wrong_kernel_result():
    model = gpt()
    with record(model, "*.weights") as activations:
        model(random_ids(1, 3, 7))
    attention_record = activations.attention("blocks.0.attention")
    other = attention_record.head_outputs.clone()
    other[1, 2, 3, 1] += 0.25
    assert AttentionRecord(attention_record.inputs, other).reconstruction_error == pytest.approx(0.25)


def test_each_step_of_a_cached_generation_is_a_pass():
    model, ids = gpt(), random_ids(1, 3, 7)
    cache = model.new_cache(batch=3)
    with record(model, "*.weights", "last_hidden_state") as activations:
        for chunk in ids.split((4, 1, 1, 1), dim=1):
            model(chunk, cache=cache)
    name = "blocks.1.attention.weights"
    assert (
        activations.n_passes(name)
        == activations.n_passes("last_hidden_state")
        == activations.n_passes("blocks.1.attention")
        == 4
    )
    assert [activations.get_pass(name, i).shape for i in range(4)] == [
        (3, 5, 4, 4),
        (3, 5, 1, 5),
        (3, 5, 1, 6),
        (3, 5, 1, 7),
    ]
    (full,) = eager_weights(model, name, lambda: model(ids))
    assert_close(activations.get_pass(name, 0), full[:, :, :4, :4])
    for step in range(1, 4):
        assert_close(activations.get_pass(name, step), full[:, :, 3 + step : 4 + step, : 4 + step])
    assert_close(activations[name], activations.get_pass(name, 3))
    assert activations.attention("blocks.1.attention", 2).reconstruction_error < 1e-12


def test_records_do_not_change_when_the_cache_is_written_again():
    """With rows of different lengths, later passes write slots that were empty before."""
    model = gpt()
    attention_mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    cache = model.new_cache(batch=2)
    with record(model, "blocks.0.attention.*") as activations:
        model(random_ids(1, 2, 5), attention_mask=attention_mask, cache=cache)
        before = {name: activations.get_pass(name, 0).clone() for name in activations.names}
        model(random_ids(2, 2, 3), cache=cache)
    for name, expected in before.items():
        assert torch.equal(activations.get_pass(name, 0), expected), name


@pytest.mark.parametrize("positions", [PositionKind.LEARNED, PositionKind.RELATIVE])
def test_recorded_tensors_are_detached_from_the_graph(positions):
    model = gpt(positions=positions, relative_buckets=8, relative_max_distance=13)
    with record(model) as activations:
        model(random_ids(1, 3, 7))
    assert not any(activations[name].requires_grad for name in activations.names)


def test_changed_weights_are_recorded_as_changed():
    model = gpt()
    with intervene(model, {"blocks.0.attention.weights": 0.25}), record(model, "*.weights") as activations:
        model(random_ids(1, 3, 7))
    assert (activations["blocks.0.attention.weights"] == 0.25).all()
    assert (activations.attention("blocks.0.attention").weights(rows=[2]) == 0.25).all()
    assert activations.attention("blocks.0.attention").reconstruction_error < 1e-12
    assert (activations["blocks.1.attention.weights"][:, :, 0, 0] == 1.0).all()


def test_changed_scores_are_recorded_with_the_weights_they_give():
    model = gpt()
    with record(model, "*.weights") as activations, intervene(model, {"blocks.0.attention.scores": 1.0}):
        model(random_ids(1, 3, 7))
    assert (activations["blocks.0.attention.scores"] == 1.0).all()
    assert_close(activations["blocks.0.attention.weights"], torch.full((3, 5, 7, 7), 1 / 7, dtype=torch.float64))


def test_a_masked_edge_is_recorded_with_weight_zero():
    model = gpt()
    with mask_attention(model, "blocks.0.attention", query=4, key=1), record(model, "*.weights") as activations:
        model(random_ids(1, 3, 7))
    assert (activations["blocks.0.attention.weights"][:, :, 4, 1] == 0).all()
    assert activations.attention("blocks.0.attention").reconstruction_error < 1e-12


def test_beams_that_share_a_source_are_recorded_as_separate_rows():
    model, ids = seq2seq(), random_ids(1, 6, 7)
    source = model.encode(random_source_ids(1, 2, 5))
    with record(model, "decoder.blocks.1.cross_attention.*") as activations:
        model.decode(ids, source)
    repeated_source = type(source)(states=source.states.repeat_interleave(3, dim=0))
    with record(model, "decoder.blocks.1.cross_attention.*") as one_by_one:
        model.decode(ids, repeated_source)
    for last in ("queries", "weights", "scores", "head_outputs"):
        name = f"decoder.blocks.1.cross_attention.{last}"
        assert activations[name].shape[0] == 6
        assert_close(activations[name], one_by_one[name])
    attention_record = activations.attention("decoder.blocks.1.cross_attention")
    assert_close(attention_record.weights(rows=[6, 0]), attention_record.weights()[:, :, [6, 0]])
    assert attention_record.reconstruction_error < 1e-12


@pytest.mark.parametrize("kind", [RNNAttentionScore.DOT, RNNAttentionScore.GENERAL, RNNAttentionScore.ADDITIVE])
def test_an_rnns_weights_are_recorded(kind):
    config = RNNConfig(vocab_size=23, source_vocab_size=19, d_model=10, attention=kind)
    model = build_random_model(config)
    with record(model) as activations:
        model(random_source_ids(1, 3, 5), random_ids(1, 3, 7))
    weights = activations["decoder.attention.weights"]
    assert weights.shape == (3, 1, 7, 5)
    assert_close(weights.sum(-1), torch.ones(3, 1, 7, dtype=torch.float64))
    assert_close(activations["decoder.attention.head_outputs"][:, 0], weights[:, 0] @ activations["encoder.states"])


def test_qkv_record_works_with_a_bert():
    model = build_random_model(BERTConfig(**SMALL, n_layers=2))
    with qkv.record(model, "blocks.*.attention.weights") as activations:
        model(random_ids(1, 3, 7))
    assert activations["blocks.1.attention.weights"].shape == (3, 5, 7, 7)


def test_an_unknown_tap_suggests_the_closest_one():
    with (
        pytest.raises(TapError, match=r"'blocks\.0\.atention\.weights'.*'blocks\.0\.attention\.weights'"),
        record(gpt(), "blocks.0.atention.weights"),
    ):
        pass


def test_a_missing_record_lists_the_recorded_taps():
    model = gpt()
    with record(model, "blocks.0.attention.weights") as activations:
        pass
    with pytest.raises(TapError, match=r"'last_hidden_state'.*none"):
        activations["last_hidden_state"]
    with record(model, "blocks.0.attention.weights") as activations:
        model(random_ids(1, 3, 7))
    recorded = r"blocks\.0\.attention\.scores, blocks\.0\.attention\.weights"
    with pytest.raises(TapError, match=rf"'blocks\.1\.attention\.weights'.*{recorded}"):
        activations["blocks.1.attention.weights"]
    with pytest.raises(TapError, match=rf"'blocks\.1\.attention'.*{recorded}"):
        activations.attention("blocks.1.attention")
    with pytest.raises(TapError, match=r"pass 1 of 'blocks\.0\.attention'.*\b1 pass"):
        activations.get_pass("blocks.0.attention.weights", 1)
    assert activations.n_passes("blocks.0.attention.queries") == 0
