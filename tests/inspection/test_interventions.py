"""Effects of ablation, attention masking and patching; coreference; checkpoint timelines; plots of every view."""

from contextlib import ExitStack
from importlib import import_module

import pytest
import torch

from qkv.choices import AttentionStack, SpecialToken
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
from tests.agreement.model_strategies import assert_close
from tests.inspection.examples import FAMILIES, TEXT, example_input, example_task
from tests.tasks.small_bert import small_bert
from tests.tasks.small_gpt import small_gpt


def log_p(family, **_):
    model, text = example_task(family).model, example_input(family)
    return run_with_cache(model, text).logits.float().log_softmax(-1)


def test_an_effect_contains_the_predictions_before_and_after():
    task, model = example_task("gpt"), example_task("gpt").model
    before = log_p("gpt")
    with ablate_head(model, "blocks.0.attention", 1), mask_attention(model, "blocks.*.attention", query=5, key=2):
        after = log_p("gpt")
    masks = [
        HeadAblation(stack=AttentionStack.SELF, layer=0, head=1),
        EdgeMask(stack=AttentionStack.SELF, query=5, key=2),
    ]
    effect = measure_effect(model, task.tokenizer, example_input("gpt"), masks, position=5, n=3)
    of, at = example_input("gpt").sequence.labels[5], example_input("gpt").sequence.labels[2]
    assert effect.changes[0].startswith("self, layer 0: head 1 ")
    assert effect.changes[1].startswith(f"self: 5 {of} ")
    assert effect.changes[1].endswith(f" 2 {at}")
    assert effect.changes[1] in " ".join(plot_view(effect, title=TEXT).get_suptitle().split())
    torch.testing.assert_close(effect.log_probs_before, before[5, effect.ids])
    torch.testing.assert_close(effect.log_probs_after, after[5, effect.ids])
    torch.testing.assert_close(effect.divergence, (before.exp() * (before - after)).sum(-1), atol=1e-6, rtol=1e-4)
    chosen = example_input("gpt").next_ids
    torch.testing.assert_close(effect.target_log_probs_after[4], after[4, chosen[4]])
    assert bool(effect.target_log_probs_after[-1].isnan())
    assert set(before[5].topk(3).indices.tolist()) <= set(effect.ids)
    torch.testing.assert_close(log_p("gpt"), before)


@pytest.mark.parametrize(("family", "stack"), [("gpt", "self"), ("bert", "self"), ("seq2seq", "cross")])
def test_masking_in_one_layer_changes_predictions_of_every_family(family, stack):
    mask = EdgeMask(stack=AttentionStack(stack), query=1, key=0, layer=1, head=2)
    effect = measure_effect(example_task(family).model, example_task(family).tokenizer, example_input(family), [mask])
    assert float(effect.divergence.max()) > 0
    cache = run_with_cache(example_task(family).model, example_input(family))
    assert f"layer 1, head 2: 1 {cache.query_labels(AttentionStack(stack))[1]} " in effect.changes[0]
    assert effect.changes[0].endswith(f" 0 {cache.key_labels(AttentionStack(stack))[0]}")
    if family == "gpt":
        assert float(effect.divergence[0]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "stack"), [("gpt", "self"), ("bert", "self"), ("seq2seq", "decoder"), ("rnn", "cross")]
)
def test_a_mask_is_ineffective_exactly_where_attention_is_impossible(family, stack):
    masks = [EdgeMask(stack=AttentionStack(stack), query=query, key=key) for query, key in ((2, 1), (1, 1), (1, 2))]
    into_the_future = masks[2:] if family in ("gpt", "seq2seq") else []
    assert find_ineffective_masks(example_task(family).model, example_input(family), masks) == into_the_future
    assert find_ineffective_masks(example_task(family).model, example_input(family), []) == []
    for position in ({"query": -1, "key": 0}, {"query": 0, "key": 97}):
        with pytest.raises(InputError, match=r"(query -1|key 97).*tokens"):
            find_ineffective_masks(
                example_task(family).model, example_input(family), [EdgeMask(stack=AttentionStack(stack), **position)]
            )


def test_a_patch_inserts_the_activations_of_another_text():
    task, model = example_task("gpt"), example_task("gpt").model
    other = prepare_input(task, TEXT.replace("mat", "cat"))
    model_input = example_input("gpt")
    assert len(other.sequence.ids) == len(model_input.sequence.ids)
    full_patch = measure_effect(
        model, task.tokenizer, model_input, [ActivationPatch(tap="blocks.0.resid_pre", other=other)]
    )
    expected = run_with_cache(model, other).logits.float().log_softmax(-1)
    torch.testing.assert_close(full_patch.log_probs_after, expected[-1, full_patch.ids])
    differ = [n for n, (a, b) in enumerate(zip(model_input.sequence.ids, other.sequence.ids, strict=True)) if a != b]
    partial_patch = measure_effect(
        model,
        task.tokenizer,
        model_input,
        [ActivationPatch(tap="blocks.0.resid_pre", other=other, positions=tuple(differ))],
    )
    torch.testing.assert_close(partial_patch.log_probs_after, expected[-1, partial_patch.ids])
    with pytest.raises(TapError, match=r"position 99 of 'blocks\.0\.resid_pre'"):
        measure_effect(
            model,
            task.tokenizer,
            model_input,
            [ActivationPatch(tap="blocks.0.resid_pre", other=other, positions=(99,))],
        )
    with pytest.raises(TapError, match=r"'\*\.resid_pre'"):
        measure_effect(model, task.tokenizer, model_input, [ActivationPatch(tap="*.resid_pre", other=other)])


def test_knock_out_is_the_change_of_the_following_text_with_masked_attention():
    task, text = example_task("gpt"), "The cat sat on the mat, and it slept by the dog."
    effect = coreference(task, text, pronoun="it", candidates=["cat", "mat"])
    model_input = prepare_input(task, text)
    ids, query = torch.tensor([model_input.sequence.ids]), model_input.sequence.find_last_occurrence("it")

    def following():
        scores = task.model(ids)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return float(scores[query[-1] :].sum().detach())

    before = following()
    for word, change_of in zip(effect.candidates, effect.knock_out, strict=True):
        with ExitStack() as masks:
            for position in query:
                for key in model_input.sequence.find_last_occurrence(word):
                    masks.enter_context(mask_attention(task.model, "blocks.*.attention", query=position, key=key))
            assert following() - before == pytest.approx(change_of, abs=1e-4)
    assert "knock-out" in effect.remarks[-1]


def test_knock_out_of_a_bert_masks_each_later_token_in_turn(monkeypatch):
    monkeypatch.setattr(import_module("qkv.inspection.coreference"), "MAX_MASKED_BATCH", 3)
    task, text = example_task("bert"), "The cat sat on the mat, and it slept."
    effect = coreference(task, text, pronoun="it", candidates=["cat", "mat"])
    model_input = prepare_input(task, text).sequence
    mask, query = task.tokenizer.special_id(SpecialToken.MASK), model_input.find_last_occurrence("it")

    def following():
        total = 0.0
        for position in range(query[-1] + 1, len(model_input.ids) - 1):
            ids = torch.tensor([model_input.ids])
            ids[0, position] = mask
            total += float(
                task.model.masked_lm_logits(task.model(ids))[0, position]
                .log_softmax(-1)[model_input.ids[position]]
                .detach()
            )
        return total

    before = following()
    with ExitStack() as masks:
        for position in query:
            masks.enter_context(
                mask_attention(
                    task.model, "blocks.*.attention", query=position, key=model_input.find_last_occurrence("mat")[0]
                )
            )
        assert following() - before == pytest.approx(effect.knock_out[1], abs=1e-4)


def test_shares_exclude_the_sink():
    task, text = example_task("bert"), "The cat sat on the mat, and it slept."
    effect = coreference(task, text, pronoun="it", candidates=["cat", "mat"])
    cache = run_with_cache(task.model, prepare_input(task, text))
    query, *keys = effect.positions
    row = cache.all_weights(AttentionStack.SELF).mean((0, 1))[query].mean(0)
    row[[0, -1]] = 0
    assert effect.attention == pytest.approx([float(row[model_input].sum() / row.sum()) for model_input in keys])
    assert all(0 < share < 1 for share in effect.rollout + effect.value_weighted)


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
            coreference(example_task("gpt"), text, pronoun="it", candidates=candidates)
    with pytest.raises(InputError, match=r"GPT.*BERT"):
        coreference(example_task("rnn"), TEXT, pronoun="it", candidates=["cat", "mat"])
    headless = small_bert(masked_lm_head=False)
    effect = coreference(headless, "The cat sat on the mat, and it slept.", pronoun="it", candidates=["cat", "mat"])
    assert effect.knock_out is None
    assert len(effect.remarks) == 1
    assert "masked-word head" in effect.remarks[0]
    with pytest.raises(InputError, match=r"BERT.*masked-word head"):
        logit_lens(run_with_cache(headless.model, prepare_input(headless, TEXT)), headless.tokenizer)


def test_a_timeline_runs_every_checkpoint():
    runs = [(3, small_gpt(seed=0)), (7, small_gpt(seed=1))]
    effect = checkpoint_timeline(runs, TEXT)
    assert effect.steps == [3, 7]
    for position, (_, task) in enumerate(runs):
        cache = run_with_cache(task.model, prepare_input(task, TEXT))
        assert_close(effect.scores[position], classify_heads(cache).scores)
        torch.testing.assert_close(
            effect.target_probabilities[position, :, :-1],
            logit_lens(cache, task.tokenizer).target_probabilities[:, :-1],
        )
        expected = (
            -cache.logits.float()
            .log_softmax(-1)[torch.arange(len(cache.logits) - 1), cache.model_input.next_ids]
            .mean()
        )
        assert effect.losses[position] == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(InputError, match=r"\b1 checkpoint\b"):
        checkpoint_timeline([], TEXT)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_view_is_plotted_with_its_title(family, tmp_path):
    task, text = example_task(family), example_input(family)
    cache = run_with_cache(task.model, text)
    views = [
        attention_map(cache),
        classify_heads(cache),
        logit_lens(cache, task.tokenizer),
        embedding_trajectories(cache, task.tokenizer),
    ]
    if family != "rnn":
        views += [
            residual_stream_norms(cache),
            compute_neuron_view(cache),
            logit_attribution(cache, task.tokenizer, position=0, token_id=1),
        ]
        views += [
            measure_effect(task.model, task.tokenizer, text, [HeadAblation(stack=cache.stacks[0], layer=0, head=0)])
        ]
    if family == "gpt":
        views += [checkpoint_timeline([(1, task), (2, task)], TEXT)]
        views += [coreference(task, "The cat sat on the mat and it slept.", pronoun="it", candidates=["cat", "mat"])]
    for number, view in enumerate(views):
        figure = plot_view(view, title="what was read")
        titles = [figure.get_suptitle(), *(axis.get_title() for axis in figure.axes)]
        assert any("what was read" in line for line in titles), type(view)
        if number < 2:
            figure.savefig(tmp_path / "a.png")
            assert (tmp_path / "a.png").stat().st_size > 5000
