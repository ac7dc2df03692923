"""Views of every model family have the same numbers as `qkv.inspection`."""

import numpy as np
import pytest

from qkv import inspection
from qkv.choices import AttentionStack
from qkv.inspection import classify_heads, logit_lens, to_jsonable
from tests.serving.explorer_client import (
    FAMILIES,
    SECOND,
    STACKS,
    TEXT,
    assert_close,
    explorer,
    get_data,
    new_explorer,
    post_run,
    reference_cache,
    tasks,
)

EACH_STACK = [(family, stack) for family in FAMILIES for stack in STACKS[family]]
TRANSFORMERS = [(family, stack) for family, stack in EACH_STACK if family != "rnn"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_has_tokens_predictions_and_the_error_of_the_weights(family):
    run = post_run(family)
    cache = reference_cache(family)
    assert run["sequence"]["ids"] == cache.model_input.sequence.ids
    assert run["sequence"]["labels"] == cache.model_input.sequence.labels
    assert [stack["stack"] for stack in run["stacks"]] == STACKS[family]
    for stack in run["stacks"]:
        shape = cache.weights(AttentionStack(stack["stack"]), 0).shape
        assert (stack["n_heads"], stack["n_queries"], stack["n_keys"]) == tuple(shape)
    assert run["error"] == pytest.approx(cache.attention_reconstruction_error, abs=1e-6)
    assert run["error"] < 1e-5
    assert run["effect"] is None
    if family != "bert":
        (prediction,) = run["predictions"]
        best = cache.logits[-1].softmax(-1).max()
        assert prediction["top_tokens"][0]["probability"] == pytest.approx(float(best), abs=1e-5)


@pytest.mark.parametrize(("family", "stack"), EACH_STACK)
def test_heads_equal_classify_heads(family, stack):
    found = get_data("/api/heads", {"run": post_run(family)["run"], "stack": stack})
    expected = classify_heads(reference_cache(family), AttentionStack(stack))
    for name in ("scores", "entropy", "distance"):
        assert_close(found[name], getattr(expected, name), 1e-5)
    assert found["labels"] == to_jsonable(expected.labels)
    assert found["n_queries"] == expected.n_queries
    assert np.abs(found["thumbnails"] - expected.weights.numpy()).max() <= 0.004


@pytest.mark.parametrize(("family", "stack"), EACH_STACK)
def test_quantized_weights_are_within_0_004_and_rows_are_exact(family, stack):
    run, cache = post_run(family)["run"], reference_cache(family)
    for layer in range(cache.n_layers(AttentionStack(stack))):
        expected = cache.weights(AttentionStack(stack), layer).numpy()
        found = get_data("/api/attention", {"run": run, "stack": stack, "layer": layer})
        assert found["pool_size"] == 1
        assert found["weights"].shape == expected.shape
        assert np.abs(found["weights"] - expected).max() <= 0.004
        for query in (0, expected.shape[1] - 1):
            row = get_data("/api/row", {"run": run, "stack": stack, "layer": layer, "query": query})
            assert_close(row["weights"], expected[:, query])


def test_the_first_stack_is_the_default():
    run = post_run("seq2seq")["run"]
    assert get_data("/api/attention", {"run": run, "layer": 1})["stack"] == "encoder"


@pytest.mark.parametrize(("family", "stack"), TRANSFORMERS)
def test_the_neuron_view_contains_all_steps_from_products_to_weights(family, stack):
    wanted = {"layer": 1, "head": 2, "query": 3}
    found = get_data("/api/neuron", {"run": post_run(family)["run"], "stack": stack, **wanted})
    expected = inspection.compute_neuron_view(reference_cache(family), AttentionStack(stack), **wanted)
    for name in ("q", "q_unrotated", "k", "k_unrotated", "products", "dots", "scaled", "scores", "weights"):
        assert_close(found[name], getattr(expected, name), 1e-5)
    assert_close(found["products"].sum(-1), found["dots"], 1e-4)


@pytest.mark.parametrize(("family", "stack"), TRANSFORMERS)
def test_residual_norms_and_attention_output_equal_inspection(family, stack):
    run = post_run(family)["run"]
    if stack != "cross":
        found = get_data("/api/residual", {"run": run, "stack": stack})
        expected = inspection.residual_stream_norms(reference_cache(family), AttentionStack(stack))
        assert_close(found["residual_norms"], expected.residual_norms, 1e-4)
        assert_close(found["sublayer_norms"], expected.sublayer_norms, 1e-4)
    write = get_data("/api/attention_output", {"run": run, "stack": stack, "layer": 1, "query": 2})
    expected = inspection.value_weighted_attention(reference_cache(family), AttentionStack(stack), layer=1)[:, 2]
    assert_close(write["value_weighted"], expected.detach(), 1e-5)
    assert write["head_norms"].shape == (len(expected),)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logit_lens_labels_its_tokens(family):
    found = get_data("/api/lens", {"run": post_run(family)["run"], "n": 3})
    expected = logit_lens(reference_cache(family), tasks()[family].tokenizer, n=3)
    assert_close(found["probabilities"], expected.probabilities.detach(), 1e-5)
    assert_close(found["target_probabilities"], expected.target_probabilities.detach(), 1e-5)
    assert [
        [[found["token_labels"][str(i)] for i in cell] for cell in row] for row in found["ids"].tolist()
    ] == expected.tokens


@pytest.mark.parametrize("family", ["gpt", "bert", "seq2seq"])
def test_logit_attributions_sum_to_the_logit(family):
    found = get_data("/api/logit_attribution", {"run": post_run(family)["run"], "position": 2, "token_id": 17})
    assert found["values"].sum() == pytest.approx(found["logit"], abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_have_a_point_for_every_depth(family):
    found = get_data("/api/embeddings", {"run": post_run(family)["run"], "n": 2})
    expected = inspection.embedding_trajectories(reference_cache(family), tasks()[family].tokenizer, n=2)
    assert_close(found["points"], expected.points, 1e-4)
    assert [len(item) for item in found["neighbors"]] == [2] * len(found["tokens"])


@pytest.mark.parametrize(("family", "stack"), EACH_STACK)
def test_maps_average_merge_words_and_remove_the_sink(family, stack):
    run, cache = post_run(family)["run"], reference_cache(family)
    body = {"run": run, "stack": stack}
    assert_close(get_data("/api/map", body)["weights"], inspection.attention_map(cache, AttentionStack(stack)).weights)
    single = get_data("/api/map", {**body, "layer": 0, "head": 0})
    assert_close(single["weights"], cache.weights(AttentionStack(stack), 0)[0])
    plain_words = get_data("/api/map", {**body, "merge_words": True})
    assert len(plain_words["queries"]) <= len(single["queries"])
    np.testing.assert_allclose(plain_words["weights"].sum(-1), 1, atol=1e-5)
    assert (get_data("/api/map", {**body, "keep_sink": False})["weights"][:, 0] == 0).all()


@pytest.mark.parametrize(("family", "stack"), TRANSFORMERS)
def test_value_weighted_and_rollout_maps_equal_inspection(family, stack):
    run, cache = post_run(family)["run"], reference_cache(family)
    view = get_data("/api/map", {"run": run, "stack": stack, "kind": "value-weighted", "layer": 1, "head": 1})
    assert_close(
        view["weights"],
        inspection.value_weighted_attention(cache, AttentionStack(stack), layer=1)[1].detach(),
        1e-5,
    )
    assert not view["is_share"]
    through = inspection.attention_rollout(cache, AttentionStack(stack))
    expected = through.source if stack == "cross" else through.sequence
    assert_close(get_data("/api/map", {"run": run, "stack": stack, "kind": "rollout"})["weights"], expected[-1], 1e-5)


def test_a_tile_is_a_slice_of_the_map():
    run = post_run("gpt")["run"]
    full = get_data("/api/attention", {"run": run, "layer": 2})["weights"]
    part = get_data("/api/tile", {"run": run, "layer": 2, "head": 3, "rows": [1, 4], "columns": [0, 3]})["weights"]
    np.testing.assert_array_equal(part, full[3, 1:4, 0:3])


def test_maps_of_long_texts_are_max_pooled(monkeypatch):
    monkeypatch.setattr("qkv.serving.views.MAX_CELLS", 4)
    run = post_run("gpt")
    n = len(run["sequence"]["ids"])
    found = get_data("/api/attention", {"run": run["run"], "layer": 0})
    p = found["pool_size"]
    assert p == -(-n // 4)
    assert found["weights"].shape[1] <= 4
    exact = reference_cache("gpt").weights(AttentionStack.SELF, 0).numpy()
    assert np.abs(found["weights"][:, -1, 0] - exact[:, (n - 1) // p * p :, :p].max((1, 2))).max() <= 0.004
    labels = get_data("/api/map", {"run": run["run"]})["queries"]
    assert labels == run["sequence"]["labels"][::p]


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_coreference_equals_inspection(family):
    body = {
        "model": family,
        "text": "the cat and the dog sat, it slept.",
        "pronoun": "it",
        "candidates": ["cat", "dog"],
    }
    found = get_data("/api/coreference", body)
    expected = inspection.coreference(tasks()[family], body["text"], pronoun="it", candidates=["cat", "dog"])
    assert found["attention"] == pytest.approx(expected.attention, abs=1e-6)
    assert found["knock_out"] == pytest.approx(expected.knock_out, abs=1e-4)
    assert found["verdict"] == expected.verdict


def test_an_ablated_head_changes_the_prediction_of_one_run_only():
    before = post_run("gpt")
    ablations = [{"kind": "head", "stack": "self", "layer": 0, "head": head} for head in range(5)]
    changed = post_run("gpt", interventions=ablations)
    assert changed["run"] != before["run"]
    by_id = {item["id"]: item for item in changed["effect"]["top_tokens"]}
    first = before["predictions"][0]["top_tokens"][0]
    assert by_id[first["id"]]["before"] == pytest.approx(first["probability"], abs=1e-5)
    assert by_id[first["id"]]["after"] != pytest.approx(first["probability"], abs=1e-5)
    again = post_run("gpt", backend=new_explorer())
    assert again["predictions"] == before["predictions"]


def test_a_masked_edge_has_no_weight():
    edge = [{"kind": "edge", "stack": "cross", "query": 2, "key": 1, "layer": 1}]
    run = post_run("seq2seq", interventions=edge)["run"]
    weights = [get_data("/api/row", {"run": run, "stack": "cross", "layer": i, "query": 2})["weights"] for i in (0, 1)]
    assert (weights[1][:, 1] == 0).all()
    assert (weights[0][:, 1] > 0).all()


def test_a_patch_of_the_first_layer_reproduces_the_other_text():
    other = "The dog sat on the mat."
    same_length = post_run("gpt", other)
    assert len(same_length["sequence"]["ids"]) == len(post_run("gpt")["sequence"]["ids"])
    patch = [{"kind": "patch", "tap": "blocks.0.resid_pre", "text": other}]
    patched = post_run("gpt", interventions=patch)
    found, expected = (
        {item["id"]: item["probability"] for item in run["predictions"][0]["top_tokens"]}
        for run in (patched, same_length)
    )
    assert found == pytest.approx(expected, abs=1e-6)
    assert "blocks.0.resid_pre" in get_data("/api/taps", {"model": "gpt"})["taps"]


def test_masks_are_predicted_and_classes_are_returned():
    text = "The cat [MASK] on the mat."
    run = post_run("bert", text)
    assert run["sequence"]["text"] == text
    (pair,) = post_run("bert", text, second="It is [MASK].")["predictions"][1:]
    assert pair["position"] > run["predictions"][0]["position"]
    found = get_data(
        "/api/coreference", {"model": "bert", "text": f"{text} It sat.", "pronoun": "It", "candidates": ["cat", "mat"]}
    )
    assert all(found["positions"])
    assert [run["sequence"]["tokens"][item["position"]] for item in run["predictions"]] == ["[MASK]"]
    assert {item["label"] for item in run["classes"]} == {"bad", "good", "neither"}
    assert sum(item["probability"] for item in run["classes"]) == pytest.approx(1)


def test_a_pair_has_three_special_tokens():
    run = get_data("/api/run", {"model": "bert", "text": TEXT, "second": SECOND})
    assert sum(run["sequence"]["is_special"]) == 3


def test_a_translator_translates_if_no_translation_is_passed():
    run = get_data("/api/run", {"model": "rnn", "text": TEXT})
    (found,) = tasks()["rnn"].translate_batch([TEXT])
    assert run["second"] == found.text


def test_maps_of_two_texts_are_compared():
    left, right = post_run("gpt"), post_run("gpt", "The dog sat on the mat.")
    found = get_data("/api/compare", {"left": left["run"], "right": right["run"], "layer": 1, "head": 0})
    assert_close(found["difference"], found["left"]["weights"] - found["right"]["weights"])
    other = post_run("gpt", "The cat")
    found = get_data("/api/compare", {"left": left["run"], "right": other["run"]})
    assert found["difference"] is None
    n, m = len(left["sequence"]["ids"]), len(other["sequence"]["ids"])
    assert f"{n} × {n}" in found["reason"]
    assert f"{m} × {m}" in found["reason"]


def test_position_similarity_requires_position_embeddings():
    found = get_data("/api/positions", {"model": "bert", "n": 7})["similarity"]
    np.testing.assert_allclose(np.diag(found), 1, atol=1e-5)
    response = explorer().handle_request("/api/positions", {"model": "gpt", "n": 7})
    assert response.status == 400


def test_an_evicted_run_is_recomputed():
    local = new_explorer()
    local.runs.max_bytes = 1
    first, second = (post_run("gpt", text, backend=local)["run"] for text in (TEXT, SECOND))
    assert list(local.runs._runs) == [second]
    found = get_data("/api/attention", {"run": first, "layer": 0}, backend=local)
    expected = get_data("/api/attention", {"run": post_run("gpt")["run"], "layer": 0})
    np.testing.assert_array_equal(found["weights"], expected["weights"])


def test_the_size_of_a_run_includes_changed_scores_and_weights():
    local = new_explorer()
    post_run("gpt", backend=local)
    (run,) = local.runs._runs.values()
    logits = run.cache.logits
    assert run.n_bytes > logits.numel() * logits.element_size()
    # With interventions, scores and weights are stored, because they cannot be recomputed from queries and keys.
    post_run("gpt", interventions=[{"kind": "patch", "tap": "blocks.0.attention.weights", "text": TEXT}], backend=local)
    changed, n = local.runs._runs.popitem()[1], len(run.model_input.sequence.ids)
    assert changed.n_bytes - run.n_bytes == 2 * 5 * n * n * 4
    assert logits.grad_fn is None


INVALID_OPTIONS = [
    ("map", {"kind": "rollout", "stack": "cross"}, "'cross'"),
    ("map", {"kind": "rollout", "layer": 99}, "99"),
    ("map", {"kind": "value-weighted", "layer": 99}, "99"),
    ("map", {"kind": "value-weighted", "layer": 0, "head": 5}, "5"),
    ("residual", {"stack": "encoder"}, "'encoder'"),
    ("attention_output", {"layer": 99, "query": 0}, "99"),
    ("attention_output", {"layer": 0, "query": 99}, "99"),
    ("neuron", {"layer": 99, "head": 0, "query": 0}, "99"),
    ("row", {"layer": 0, "query": 99}, "99"),
    ("tile", {"layer": 0, "head": 5, "rows": [0, 1], "columns": [0, 1]}, "5"),
    ("tile", {"layer": 0, "head": 0, "rows": [3, 1], "columns": [0, 1]}, "3–1"),
    ("tile", {"layer": 0, "head": 0, "rows": [0, 10**12], "columns": [0, 1]}, "positions"),
]


@pytest.mark.parametrize(("view", "options", "expected"), INVALID_OPTIONS)
def test_invalid_indices_are_rejected(view, options, expected):
    response = explorer().handle_request(f"/api/{view}", {"run": post_run("gpt")["run"], **options})
    assert (response.status, expected in response.body.decode()) == (400, True), response.body


def test_a_rejected_request_is_not_remembered():
    local = new_explorer()
    assert local.handle_request("/api/run", {"model": "gpt", "text": "cat " * 3_000}).status == 400
    assert not local.runs._requests
