"""Every view of every family: the numbers are inspection's own."""

import numpy as np
import pytest

from qkv import inspection
from qkv.choices import AttentionKind
from qkv.inspection import classify_heads
from tests.serving.explorer_client import FAMILIES, SECOND, STACKS, TEXT, asked, explorer, new_explorer, run_of, same, seen, tasks

EACH_STACK = [(family, stack) for family in FAMILIES for stack in STACKS[family]]
TRANSFORMERS = [(family, stack) for family, stack in EACH_STACK if family != "rnn"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_tells_tokens_guesses_and_how_exact_the_weights_are(family):
    run = run_of(family)
    looked = seen(family)
    assert run["own"]["ids"] == looked.model_input.sequence.ids
    assert run["own"]["labels"] == looked.model_input.sequence.labels
    assert [stack["stack"] for stack in run["stacks"]] == STACKS[family]
    for stack in run["stacks"]:
        shape = looked.weights(AttentionKind(stack["stack"]), 0).shape
        assert (stack["heads"], stack["queries"], stack["keys"]) == tuple(shape)
    assert run["error"] == pytest.approx(looked.error, abs=1e-6)
    assert run["error"] < 1e-5
    assert run["effect"] is None
    if family != "bert":
        (said,) = run["predictions"]
        best = looked.logits[-1].softmax(-1).max()
        assert said["guesses"][0]["probability"] == pytest.approx(float(best), abs=1e-5)


@pytest.mark.parametrize(("family", "stack"), EACH_STACK)
def test_heads_are_those_of_inspection(family, stack):
    found = asked("/api/heads", {"run": run_of(family)["run"], "stack": stack})
    expected = classify_heads(seen(family), AttentionKind(stack))
    for name in ("scores", "entropy", "distance"):
        same(found[name], getattr(expected, name), 1e-5)
    assert found["labels"] == plain(expected.labels)
    assert found["n_queries"] == expected.n_queries
    assert np.abs(found["thumbs"] - expected.weights.numpy()).max() <= 0.004


@pytest.mark.parametrize(("family", "stack"), EACH_STACK)
def test_weights_on_the_wire_are_wrong_by_at_most_0_004_and_a_row_is_exact(family, stack):
    run, looked = run_of(family)["run"], seen(family)
    for layer in range(looked.n_layers(AttentionKind(stack))):
        expected = looked.weights(AttentionKind(stack), layer).numpy()
        found = asked("/api/attention", {"run": run, "stack": stack, "layer": layer})
        assert found["pool"] == 1
        assert found["weights"].shape == expected.shape
        assert np.abs(found["weights"] - expected).max() <= 0.004
        for query in (0, expected.shape[1] - 1):
            row = asked("/api/row", {"run": run, "stack": stack, "layer": layer, "query": query})
            same(row["weights"], expected[:, query])


def test_the_first_stack_is_meant_where_none_is_said():
    run = run_of("seq2seq")["run"]
    assert asked("/api/attention", {"run": run, "layer": 1})["stack"] == "encoder"


@pytest.mark.parametrize(("family", "stack"), TRANSFORMERS)
def test_a_neuron_goes_from_dimensions_to_weights(family, stack):
    wanted = {"layer": 1, "head": 2, "query": 3}
    found = asked("/api/neuron", {"run": run_of(family)["run"], "stack": stack, **wanted})
    expected = inspection.neuron(seen(family), AttentionKind(stack), **wanted)
    for name in ("q", "q_unrotated", "k", "k_unrotated", "products", "dots", "scaled", "scores", "weights"):
        same(found[name], getattr(expected, name), 1e-5)
    same(found["products"].sum(-1), found["dots"], 1e-4)


@pytest.mark.parametrize(("family", "stack"), TRANSFORMERS)
def test_writes_add_up_in_the_stream(family, stack):
    run = run_of(family)["run"]
    if stack != "cross":
        found = asked("/api/residual", {"run": run, "stack": stack})
        expected = inspection.stream(seen(family), AttentionKind(stack))
        same(found["residual"], expected.residual, 1e-4)
        same(found["writes"], expected.writes, 1e-4)
    write = asked("/api/write", {"run": run, "stack": stack, "layer": 1, "query": 2})
    expected = inspection.value_weighted(seen(family), AttentionKind(stack), layer=1)[:, 2]
    same(write["moved"], expected.detach(), 1e-5)
    assert write["heads"].shape == (len(expected),)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_names_its_guesses(family):
    found = asked("/api/lens", {"run": run_of(family)["run"], "n": 3})
    expected = lens(seen(family), tasks()[family].tokenizer, n=3)
    same(found["probabilities"], expected.probabilities.detach(), 1e-5)
    same(found["target_probabilities"], expected.target_probabilities.detach(), 1e-5)
    assert [
        [[found["names"][str(i)] for i in cell] for cell in row] for row in found["ids"].tolist()
    ] == expected.tokens


@pytest.mark.parametrize("family", ["gpt", "bert", "seq2seq"])
def test_contributions_sum_to_the_logit(family):
    found = asked("/api/contributions", {"run": run_of(family)["run"], "position": 2, "token_id": 17})
    assert found["values"].sum() == pytest.approx(found["logit"], abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_have_a_point_a_depth(family):
    found = asked("/api/embeddings", {"run": run_of(family)["run"], "n": 2})
    expected = inspection.embeddings(seen(family), tasks()[family].tokenizer, n=2)
    same(found["points"], expected.points, 1e-4)
    assert [len(one) for one in found["neighbors"]] == [2] * len(found["tokens"])


@pytest.mark.parametrize(("family", "stack"), EACH_STACK)
def test_maps_are_means_words_and_without_the_sink(family, stack):
    run, looked = run_of(family)["run"], seen(family)
    body = {"run": run, "stack": stack}
    same(asked("/api/map", body)["weights"], inspection.attention_map(looked, AttentionKind(stack)).weights)
    one = asked("/api/map", {**body, "layer": 0, "head": 0})
    same(one["weights"], looked.weights(AttentionKind(stack), 0)[0])
    plain_words = asked("/api/map", {**body, "words": True})
    assert len(plain_words["queries"]) <= len(one["queries"])
    np.testing.assert_allclose(plain_words["weights"].sum(-1), 1, atol=1e-5)
    assert (asked("/api/map", {**body, "sink": False})["weights"][:, 0] == 0).all()


@pytest.mark.parametrize(("family", "stack"), TRANSFORMERS)
def test_maps_of_what_is_moved_and_of_rollout(family, stack):
    run, looked = run_of(family)["run"], seen(family)
    moved = asked("/api/map", {"run": run, "stack": stack, "of": "value-weighted", "layer": 1, "head": 1})
    same(moved["weights"], inspection.value_weighted(looked, AttentionKind(stack), layer=1)[1].detach(), 1e-5)
    assert not moved["is_share"]
    through = inspection.rollout(looked, AttentionKind(stack))
    expected = through.source if stack == "cross" else through.sequence
    same(asked("/api/map", {"run": run, "stack": stack, "of": "rollout"})["weights"], expected[-1], 1e-5)


def test_a_tile_is_a_part_of_the_map():
    run = run_of("gpt")["run"]
    whole = asked("/api/attention", {"run": run, "layer": 2})["weights"]
    part = asked("/api/tile", {"run": run, "layer": 2, "head": 3, "rows": [1, 4], "columns": [0, 3]})["weights"]
    np.testing.assert_array_equal(part, whole[3, 1:4, 0:3])


def test_a_long_text_is_pooled_by_the_greatest(monkeypatch):
    monkeypatch.setattr("qkv.serving.views.MOST_CELLS", 4)
    run = run_of("gpt")
    n = len(run["own"]["ids"])
    found = asked("/api/attention", {"run": run["run"], "layer": 0})
    p = found["pool"]
    assert p == -(-n // 4)
    assert found["weights"].shape[1] <= 4
    exact = seen("gpt").weights(AttentionKind.SELF, 0).numpy()
    assert np.abs(found["weights"][:, -1, 0] - exact[:, (n - 1) // p * p :, :p].max((1, 2))).max() <= 0.004
    labels = asked("/api/map", {"run": run["run"]})["queries"]
    assert labels == run["own"]["labels"][::p]


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_what_it_refers_to_has_four_columns(family):
    body = {
        "model": family,
        "text": "the cat and the dog sat, it slept.",
        "pronoun": "it",
        "candidates": ["cat", "dog"],
    }
    found = asked("/api/it", body)
    expected = inspection.reference(tasks()[family], body["text"], pronoun="it", candidates=["cat", "dog"])
    assert found["attention"] == pytest.approx(expected.attention, abs=1e-6)
    assert found["knock_out"] == pytest.approx(expected.knock_out, abs=1e-4)
    assert found["verdict"] == expected.verdict


def test_a_head_switched_off_changes_the_prediction_and_is_gone_afterwards():
    before = run_of("gpt")
    off = [{"kind": "head", "stack": "self", "layer": 0, "head": head} for head in range(5)]
    changed = run_of("gpt", interventions=off)
    assert changed["run"] != before["run"]
    shown = {one["id"]: one for one in changed["effect"]["guesses"]}
    first = before["predictions"][0]["guesses"][0]
    assert shown[first["id"]]["before"] == pytest.approx(first["probability"], abs=1e-5)
    assert shown[first["id"]]["after"] != pytest.approx(first["probability"], abs=1e-5)
    again = run_of("gpt", of=new_explorer())
    assert again["predictions"] == before["predictions"]


def test_a_cut_edge_has_no_weight():
    cut = [{"kind": "edge", "stack": "cross", "query": 2, "key": 1, "layer": 1}]
    run = run_of("seq2seq", interventions=cut)["run"]
    weights = [asked("/api/row", {"run": run, "stack": "cross", "layer": i, "query": 2})["weights"] for i in (0, 1)]
    assert (weights[1][:, 1] == 0).all()
    assert (weights[0][:, 1] > 0).all()


def test_a_patch_makes_one_text_end_like_another():
    other = "The dog sat on the mat."
    same_length = run_of("gpt", other)
    assert len(same_length["own"]["ids"]) == len(run_of("gpt")["own"]["ids"])
    patch = [{"kind": "patch", "tap": "blocks.0.resid_pre", "text": other}]
    patched = run_of("gpt", interventions=patch)
    found, expected = (
        {one["id"]: one["probability"] for one in run["predictions"][0]["guesses"]} for run in (patched, same_length)
    )
    assert found == pytest.approx(expected, abs=1e-6)
    assert "blocks.0.resid_pre" in asked("/api/taps", {"model": "gpt"})["taps"]


def test_a_mask_and_a_class_are_told_of():
    text = "The cat [MASK] on the mat."
    run = run_of("bert", text)
    assert run["own"]["text"] == text
    (pair,) = run_of("bert", text, second="It is [MASK].")["predictions"][1:]
    assert pair["position"] > run["predictions"][0]["position"]
    found = asked(
        "/api/it", {"model": "bert", "text": f"{text} It sat.", "pronoun": "It", "candidates": ["cat", "mat"]}
    )
    assert all(found["places"])
    assert [run["own"]["tokens"][one["position"]] for one in run["predictions"]] == ["[MASK]"]
    assert {one["label"] for one in run["classes"]} == {"bad", "good", "neither"}
    assert sum(one["probability"] for one in run["classes"]) == pytest.approx(1)


def test_a_pair_is_read_as_a_pair():
    run = asked("/api/run", {"model": "bert", "text": TEXT, "second": SECOND})
    assert sum(run["own"]["is_special"]) == 3


def test_a_translator_without_a_translation_makes_its_own():
    run = asked("/api/run", {"model": "rnn", "text": TEXT})
    (found,) = tasks()["rnn"].translate_batch([TEXT])
    assert run["second"] == found.text


def test_two_texts_are_compared():
    left, right = run_of("gpt"), run_of("gpt", "The dog sat on the mat.")
    found = asked("/api/compare", {"left": left["run"], "right": right["run"], "layer": 1, "head": 0})
    same(found["difference"], found["left"]["weights"] - found["right"]["weights"])
    other = run_of("gpt", "The cat")
    found = asked("/api/compare", {"left": left["run"], "right": other["run"]})
    assert found["difference"] is None
    n, m = len(left["own"]["ids"]), len(other["own"]["ids"])
    assert found["why"] == f"the left map is {n} × {n}, the right one {m} × {m}"


def test_positions_are_compared_where_there_are_such():
    found = asked("/api/positions", {"model": "bert", "n": 7})["similarity"]
    np.testing.assert_allclose(np.diag(found), 1, atol=1e-5)
    answer = explorer().ask("/api/positions", {"model": "gpt", "n": 7})
    assert (answer.status, b"nothing to compare" in answer.body) == (400, True)


def test_a_run_that_was_let_go_is_made_again():
    own = new_explorer()
    own.runs.most_bytes = 1
    first, second = (run_of("gpt", text, of=own)["run"] for text in (TEXT, SECOND))
    assert list(own.runs._kept) == [second]
    found = asked("/api/attention", {"run": first, "layer": 0}, of=own)
    expected = asked("/api/attention", {"run": run_of("gpt")["run"], "layer": 0})
    np.testing.assert_array_equal(found["weights"], expected["weights"])


def test_what_is_kept_is_counted_in_bytes():
    own = new_explorer()
    run_of("gpt", of=own)
    (run,) = own.runs._kept.values()
    logits = run.seen.logits
    assert run.n_bytes > logits.numel() * logits.element_size()
    # A change keeps what really passed, scores and weights, which cannot be computed again.
    run_of("gpt", interventions=[{"kind": "patch", "tap": "blocks.0.attention.weights", "text": TEXT}], of=own)
    changed, n = own.runs._kept.popitem()[1], len(run.reading.sequence.ids)
    assert changed.n_bytes - run.n_bytes == 2 * 5 * n * n * 4
    assert logits.grad_fn is None


NOWHERE = [
    ("map", {"of": "rollout", "stack": "cross"}, "no attention 'cross'; it has: self"),
    ("map", {"of": "rollout", "layer": 99}, "layer 99 is outside the 3 layers (0 … 2)"),
    ("map", {"of": "value-weighted", "layer": 99}, "layer 99 is outside"),
    ("map", {"of": "value-weighted", "layer": 0, "head": 5}, "head 5 is outside the 5 heads (0 … 4)"),
    ("residual", {"stack": "encoder"}, "no attention 'encoder'"),
    ("write", {"layer": 99, "query": 0}, "layer 99 is outside"),
    ("write", {"layer": 0, "query": 99}, "query 99 is outside"),
    ("neuron", {"layer": 99, "head": 0, "query": 0}, "layer 99 is outside"),
    ("row", {"layer": 0, "query": 99}, "query 99 is outside"),
    ("tile", {"layer": 0, "head": 5, "rows": [0, 1], "columns": [0, 1]}, "head 5 is outside"),
    ("tile", {"layer": 0, "head": 0, "rows": [3, 1], "columns": [0, 1]}, "no tile"),
    ("tile", {"layer": 0, "head": 0, "rows": [0, 10**12], "columns": [0, 1]}, "is outside"),
]


@pytest.mark.parametrize(("view", "place", "line"), NOWHERE)
def test_a_place_that_is_not_there_is_told_in_words(view, place, line):
    answer = explorer().ask(f"/api/{view}", {"run": run_of("gpt")["run"], **place})
    assert (answer.status, line in answer.body.decode()) == (400, True), answer.body


def test_a_text_that_was_refused_is_not_remembered():
    own = new_explorer()
    assert own.ask("/api/run", {"model": "gpt", "text": "cat " * 3_000}).status == 400
    assert not own.runs._known
