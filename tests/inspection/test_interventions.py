"""Effects of ablation, attention masking and patching; coreference; checkpoint timelines; plots of every view."""

from contextlib import ExitStack
from importlib import import_module

import pytest
import torch

from qkv.choices import AttentionKind, SpecialToken
from qkv.errors import InputError, TapError
from qkv.inspection import (
    ActivationPatch,
    CoreferenceView,
    EdgeMask,
    HeadAblation,
    ablate_head,
    attention_map,
    checkpoint_timeline,
    classify_heads,
    compute_neuron_view,
    coreference,
    embedding_trajectories,
    find_ineffective_masks,
    logit_attribution,
    logit_lens,
    mask_attention,
    measure_effect,
    plot_view,
    prepare_input,
    residual_stream_norms,
    run_with_cache,
)
from tests.agreement.families import close
from tests.inspection.examples import FAMILIES, TEXT, reading, task
from tests.tasks.small_bert import small_bert
from tests.tasks.small_gpt import small_task


def log_p(family, **_):
    model, text = task(family).model, reading(family)
    return run_with_cache(model, text).logits.float().log_softmax(-1)


def test_an_effect_contains_the_predictions_before_and_after():
    one, model = task("gpt"), task("gpt").model
    before = log_p("gpt")
    with ablate_head(model, "blocks.0.attention", 1), mask_attention(model, "blocks.*.attention", query=5, key=2):
        after = log_p("gpt")
    cuts = [HeadAblation(stack=AttentionKind.SELF, layer=0, head=1), EdgeMask(stack=AttentionKind.SELF, query=5, key=2)]
    found = measure_effect(model, one.tokenizer, reading("gpt"), cuts, position=5, n=3)
    of, at = reading("gpt").sequence.labels[5], reading("gpt").sequence.labels[2]
    assert found.changes[0].startswith("self, layer 0: head 1 ")
    assert found.changes[1].startswith(f"self: 5 {of} ")
    assert found.changes[1].endswith(f" 2 {at}")
    assert found.changes[1] in " ".join(plot_view(found, title=TEXT).get_suptitle().split())
    torch.testing.assert_close(found.before, before[5, found.ids])
    torch.testing.assert_close(found.after, after[5, found.ids])
    torch.testing.assert_close(found.divergence, (before.exp() * (before - after)).sum(-1), atol=1e-6, rtol=1e-4)
    chosen = reading("gpt").next_ids
    torch.testing.assert_close(found.target_after[4], after[4, chosen[4]])
    assert bool(found.target_after[-1].isnan())
    assert set(before[5].topk(3).indices.tolist()) <= set(found.ids)
    torch.testing.assert_close(log_p("gpt"), before)


@pytest.mark.parametrize(("family", "stack"), [("gpt", "self"), ("bert", "self"), ("seq2seq", "cross")])
def test_masking_in_one_layer_changes_predictions_of_every_family(family, stack):
    cut = EdgeMask(stack=AttentionKind(stack), query=1, key=0, layer=1, head=2)
    found = measure_effect(task(family).model, task(family).tokenizer, reading(family), [cut])
    assert float(found.divergence.max()) > 0
    seen = run_with_cache(task(family).model, reading(family))
    assert f"layer 1, head 2: 1 {seen.query_labels(AttentionKind(stack))[1]} " in found.changes[0]
    assert found.changes[0].endswith(f" 0 {seen.key_labels(AttentionKind(stack))[0]}")
    if family == "gpt":
        assert float(found.divergence[0]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "stack"), [("gpt", "self"), ("bert", "self"), ("seq2seq", "decoder"), ("rnn", "cross")]
)
def test_a_mask_is_ineffective_exactly_where_attention_is_impossible(family, stack):
    cuts = [EdgeMask(stack=AttentionKind(stack), query=query, key=key) for query, key in ((2, 1), (1, 1), (1, 2))]
    into_the_future = cuts[2:] if family in ("gpt", "seq2seq") else []
    assert find_ineffective_masks(task(family).model, reading(family), cuts) == into_the_future
    assert find_ineffective_masks(task(family).model, reading(family), []) == []
    for place in ({"query": -1, "key": 0}, {"query": 0, "key": 97}):
        with pytest.raises(InputError, match=r"(query -1|key 97).*tokens"):
            find_ineffective_masks(task(family).model, reading(family), [EdgeMask(stack=AttentionKind(stack), **place)])


def test_a_patch_inserts_the_activations_of_another_text():
    one, model = task("gpt"), task("gpt").model
    other = prepare_input(one, TEXT.replace("mat", "cat"))
    own = reading("gpt")
    assert len(other.sequence.ids) == len(own.sequence.ids)
    whole = measure_effect(model, one.tokenizer, own, [ActivationPatch(tap="blocks.0.resid_pre", other=other)])
    expected = run_with_cache(model, other).logits.float().log_softmax(-1)
    torch.testing.assert_close(whole.after, expected[-1, whole.ids])
    differ = [n for n, (a, b) in enumerate(zip(own.sequence.ids, other.sequence.ids, strict=True)) if a != b]
    part = measure_effect(
        model, one.tokenizer, own, [ActivationPatch(tap="blocks.0.resid_pre", other=other, positions=tuple(differ))]
    )
    torch.testing.assert_close(part.after, expected[-1, part.ids])
    with pytest.raises(TapError, match=r"position 99 of 'blocks\.0\.resid_pre'"):
        measure_effect(
            model, one.tokenizer, own, [ActivationPatch(tap="blocks.0.resid_pre", other=other, positions=(99,))]
        )
    with pytest.raises(TapError, match=r"'\*\.resid_pre'"):
        measure_effect(model, one.tokenizer, own, [ActivationPatch(tap="*.resid_pre", other=other)])


def test_knock_out_is_the_change_of_the_following_text_with_masked_attention():
    one, text = task("gpt"), "The cat sat on the mat, and it slept by the dog."
    found = coreference(one, text, pronoun="it", candidates=["cat", "mat"])
    own = prepare_input(one, text)
    ids, query = torch.tensor([own.sequence.ids]), own.sequence.find_word("it")

    def following():
        scores = one.model(ids)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return float(scores[query[-1] :].sum().detach())

    before = following()
    for word, change_of in zip(found.candidates, found.knock_out, strict=True):
        with ExitStack() as cuts:
            for place in query:
                for key in own.sequence.find_word(word):
                    cuts.enter_context(mask_attention(one.model, "blocks.*.attention", query=place, key=key))
            assert following() - before == pytest.approx(change_of, abs=1e-4)
    assert "knock-out" in found.remarks[-1]


def test_knock_out_of_a_bert_masks_each_later_token_in_turn(monkeypatch):
    monkeypatch.setattr(import_module("qkv.inspection.coreference"), "MAX_MASKED_BATCH", 3)
    one, text = task("bert"), "The cat sat on the mat, and it slept."
    found = coreference(one, text, pronoun="it", candidates=["cat", "mat"])
    own = prepare_input(one, text).sequence
    mask, query = one.tokenizer.special_id(SpecialToken.MASK), own.find_word("it")

    def following():
        total = 0.0
        for place in range(query[-1] + 1, len(own.ids) - 1):
            ids = torch.tensor([own.ids])
            ids[0, place] = mask
            total += float(
                one.model.masked_word_logits(one.model(ids))[0, place].log_softmax(-1)[own.ids[place]].detach()
            )
        return total

    before = following()
    with ExitStack() as cuts:
        for place in query:
            cuts.enter_context(
                mask_attention(one.model, "blocks.*.attention", query=place, key=own.find_word("mat")[0])
            )
        assert following() - before == pytest.approx(found.knock_out[1], abs=1e-4)


def test_shares_exclude_the_sink():
    one, text = task("bert"), "The cat sat on the mat, and it slept."
    found = coreference(one, text, pronoun="it", candidates=["cat", "mat"])
    seen = run_with_cache(one.model, prepare_input(one, text))
    query, *keys = found.positions
    row = seen.all_weights(AttentionKind.SELF).mean((0, 1))[query].mean(0)
    row[[0, -1]] = 0
    assert found.attention == pytest.approx([float(row[own].sum() / row.sum()) for own in keys])
    assert all(0 < share < 1 for share in found.rollout + found.value_weighted)


def test_the_selection_of_each_method_and_their_agreement():
    def view(knock_out, rollout=(0.2, 0.1)):
        return CoreferenceView(
            text="",
            pronoun="it",
            candidates=["cat", "mat"],
            positions=[],
            attention=[0.3, 0.2],
            rollout=list(rollout),
            value_weighted=[0.5, 0.1],
            knock_out=knock_out,
            remarks=[],
        )

    assert "4" in view([-0.5, 0.1]).verdict
    assert "cat" in view([-0.5, 0.1]).verdict
    assert view(None).methods_agree
    assert not view([0.5, 0.1]).methods_agree
    assert view([0.5, 0.1]).selections["knock-out"] is None
    assert view([-0.5, -0.9], (0.1, 0.2)).verdict.endswith(
        "attention → cat, rollout → mat, value-weighted → cat, knock-out → mat"
    )


def test_invalid_coreference_inputs_raise():
    for text, candidates, line in [
        ("The cat slept and it sat.", ["cat"], r"\b2 candidates.*\b1\b"),
        ("The cat slept and it sat by the mat.", ["cat", "mat"], "'mat'.*'it'"),
        ("The cat slept and it sat.", ["cat", "dog"], "'dog'"),
        ("The cat slept and it sat.", ["cat", "it"], "'it'.*'it'"),
    ]:
        with pytest.raises(InputError, match=line):
            coreference(task("gpt"), text, pronoun="it", candidates=candidates)
    with pytest.raises(InputError, match=r"GPT.*BERT"):
        coreference(task("rnn"), TEXT, pronoun="it", candidates=["cat", "mat"])
    headless = small_bert(masked_lm_head=False)
    found = coreference(headless, "The cat sat on the mat, and it slept.", pronoun="it", candidates=["cat", "mat"])
    assert found.knock_out is None
    assert len(found.remarks) == 1
    assert "masked-word head" in found.remarks[0]
    with pytest.raises(InputError, match=r"BERT.*masked-word head"):
        logit_lens(run_with_cache(headless.model, prepare_input(headless, TEXT)), headless.tokenizer)


def test_a_timeline_runs_every_checkpoint():
    runs = [(3, small_task(seed=0)), (7, small_task(seed=1))]
    found = checkpoint_timeline(runs, TEXT)
    assert found.steps == [3, 7]
    for place, (_, one) in enumerate(runs):
        seen = run_with_cache(one.model, prepare_input(one, TEXT))
        close(found.scores[place], classify_heads(seen).scores)
        torch.testing.assert_close(
            found.target_probabilities[place, :, :-1], logit_lens(seen, one.tokenizer).target_probabilities[:, :-1]
        )
        expected = (
            -seen.logits.float().log_softmax(-1)[torch.arange(len(seen.logits) - 1), seen.model_input.next_ids].mean()
        )
        assert found.losses[place] == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(InputError, match="checkpoints"):
        checkpoint_timeline([], TEXT)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_view_is_plotted_with_its_title(family, tmp_path):
    one, text = task(family), reading(family)
    seen = run_with_cache(one.model, text)
    views = [
        attention_map(seen),
        classify_heads(seen),
        logit_lens(seen, one.tokenizer),
        embedding_trajectories(seen, one.tokenizer),
    ]
    if family != "rnn":
        views += [
            residual_stream_norms(seen),
            compute_neuron_view(seen),
            logit_attribution(seen, one.tokenizer, position=0, token_id=1),
        ]
        views += [measure_effect(one.model, one.tokenizer, text, [HeadAblation(stack=seen.stacks[0], layer=0, head=0)])]
    if family == "gpt":
        views += [checkpoint_timeline([(1, one), (2, one)], TEXT)]
        views += [coreference(one, "The cat sat on the mat and it slept.", pronoun="it", candidates=["cat", "mat"])]
    for number, view in enumerate(views):
        drawn = plot_view(view, title="what was read")
        said = [drawn.get_suptitle(), *(axis.get_title() for axis in drawn.axes)]
        assert any("what was read" in line for line in said), type(view)
        if number < 2:
            drawn.savefig(tmp_path / "a.png")
            assert (tmp_path / "a.png").stat().st_size > 5000
