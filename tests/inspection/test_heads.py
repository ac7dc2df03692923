"""Pattern scores of ideal heads are 1, and a constructed induction head is recognized."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import AttentionStack, HeadPattern
from qkv.config import GPTConfig
from qkv.inspection import PATTERNS, TokenizedText, classify_heads, plot_view, run_with_cache
from qkv.inspection.heads import best_pattern, pattern_target_masks, score_pattern
from qkv.inspection.model_input import ModelInput
from qkv.models import GPT
from tests.inspection.examples import FAMILIES, example_input, example_task

WORDS = ["[CLS]", " a", " b", ",", " a", " b", " c", "[SEP]"]
N = len(WORDS)


def tokens(words=WORDS, ids=None):
    special = [word.startswith("[") for word in words]
    ids = [sorted(set(words)).index(word) for word in words] if ids is None else ids
    return TokenizedText(
        text="",
        ids=ids,
        tokens=list(words),
        word_ids=[None] * len(words),
        spans=[None] * len(words),
        is_special=special,
    )


def scored(weights, visible, pattern):
    return float(
        score_pattern(weights[None, None], visible, pattern, pattern_target_masks(tokens(), visible, is_cross=False))[
            0, 0
        ]
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_ideal_head_scores_one_and_gets_the_name_of_its_pattern(pattern, causal):
    visible = torch.ones(N, N, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    targets = pattern_target_masks(tokens(), visible, is_cross=False)
    mask = visible if pattern is HeadPattern.BAG else targets[pattern]
    # A query without a target attends to itself.
    mask = torch.where(mask.any(-1, keepdim=True), mask, torch.eye(N, dtype=torch.bool)).double()
    weights = mask / mask.sum(-1, keepdim=True)
    scores = torch.tensor([scored(weights, visible, other_pattern) for other_pattern in PATTERNS])
    assert scores[PATTERNS.index(pattern)] == pytest.approx(1.0)
    assert best_pattern(scores, [N] * 6) is pattern


def test_the_query_key_pairs_of_each_pattern():
    visible = torch.ones(N, N, dtype=torch.bool).tril()
    targets = pattern_target_masks(tokens(), visible, is_cross=False)
    meant = {pattern: [tuple(pair) for pair in mask.nonzero().tolist()] for pattern, mask in targets.items()}
    assert meant[HeadPattern.PREVIOUS] == [(i, i - 1) for i in range(1, N)]
    assert meant[HeadPattern.FIRST] == [(i, 0) for i in range(1, N)]
    assert meant[HeadPattern.DELIMITER] == [(i, 3) for i in range(4, N)]
    assert meant[HeadPattern.DUPLICATE] == [(4, 1), (5, 2)]
    assert meant[HeadPattern.INDUCTION] == [(4, 2), (5, 3)]


@given(st.integers(0, 999), st.booleans())
def test_scores_are_between_zero_and_one(seed, causal):
    visible = torch.ones(N, N, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    raw = torch.randn(N, N, generator=torch.Generator().manual_seed(seed)) * 5
    weights = raw.masked_fill(~visible, float("-inf")).softmax(-1)
    for pattern in PATTERNS:
        assert 0.0 <= scored(weights, visible, pattern) <= 1.0


def test_two_queries_show_no_pattern_and_a_uniform_head_is_a_bag_of_words():
    scores = torch.zeros(6)
    scores[PATTERNS.index(HeadPattern.DELIMITER)] = 0.9
    scores[PATTERNS.index(HeadPattern.BAG)] = 0.97
    assert best_pattern(scores, [9] * 6) is HeadPattern.DELIMITER
    assert best_pattern(scores, [2] * 6) is HeadPattern.BAG
    assert best_pattern(scores * 0.4, [9] * 6) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_all_heads_of_a_stack_are_scored(family):
    cache = run_with_cache(example_task(family).model, example_input(family))
    for stack in cache.stacks:
        view = classify_heads(cache, stack)
        assert view.scores.shape == (*view.weights.shape[:2], len(PATTERNS))
        assert view.error < 1e-12
        if stack is AttentionStack.CROSS:
            assert view.n_queries[PATTERNS.index(HeadPattern.PREVIOUS)] == 0


def test_the_plot_only_shows_legible_token_labels():
    view = classify_heads(run_with_cache(example_task("bert").model, example_input("bert")))
    *_, left = plot_view(view).axes[: -view.weights.shape[1] + 1]
    assert [label.get_text() for label in left.get_yticklabels()] == view.queries
    assert [label.get_text() for label in left.get_xticklabels()] == view.keys
    many = replace(
        view, weights=view.weights.new_ones(*view.weights.shape[:2], 99, 99), queries=["a"] * 99, keys=["b"] * 99
    )
    assert not plot_view(many).axes[0].get_yticklabels()


def induction_model(n_ids: int, context: int) -> GPT:
    """Build a GPT with hand-set weights whose second layer is an induction head.

    Layer 0 copies the previous token, and layer 1 attends to positions whose previous token equals the current one. The
    residual stream has three parts: the token, its position and the previous token. There are no norms.
    """
    third = max(n_ids, context)
    width = 3 * third
    config = GPTConfig(
        vocab_size=n_ids,
        context_length=context,
        d_model=width,
        n_heads=1,
        n_layers=2,
        positions="learned",
        attention_bias=False,
        scale_scores=False,
        tie_embeddings=False,
    )
    model = GPT(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        eye = torch.eye(third).double()
        model.embedding.token.weight[:, :n_ids] = eye[:n_ids, :n_ids]
        model.embedding.position.table.weight[:, third : third + context] = eye[:context, :context]
        # Without norms, one-hot vectors are preserved.
        for block in model.blocks:
            block.attention_norm = torch.nn.Identity()
        back, match = (block.attention for block in model.blocks)
        back.q_proj.weight[:third, third : 2 * third] = 50 * torch.diag(torch.ones(third - 1).double(), 1)
        back.k_proj.weight[:third, third : 2 * third] = eye
        back.v_proj.weight[:third, :third] = eye
        back.out_proj.weight[2 * third :, :third] = eye
        match.q_proj.weight[:third, :third] = 50 * eye
        match.k_proj.weight[:third, 2 * third :] = eye
    return model


def test_a_constructed_induction_head_and_its_previous_token_head_are_recognized():
    ids = torch.randperm(11, generator=torch.Generator().manual_seed(3)).tolist() * 2
    sequence = tokens([f" w{number}" for number in ids], ids=ids)
    view = classify_heads(run_with_cache(induction_model(11, 23), ModelInput(sequence=sequence, next_ids=ids[1:])))
    assert view.labels == [[HeadPattern.PREVIOUS], [HeadPattern.INDUCTION]]
    # The first token has no previous token, so layer 1 cannot match it exactly.
    assert float(view.scores[0, 0, PATTERNS.index(HeadPattern.PREVIOUS)]) > 0.99
    assert float(view.scores[1, 0, PATTERNS.index(HeadPattern.INDUCTION)]) > 0.85


def test_the_title_of_a_narrow_plot_is_wrapped():
    figure = plot_view(
        classify_heads(run_with_cache(example_task("rnn").model, example_input("rnn"))),
        title="The quick brown fox jumps over the lazy dog.",
    )
    figure.draw_without_rendering()
    above = figure.texts[0].get_window_extent()
    assert above.x0 >= 0
    assert above.x1 <= figure.bbox.width
