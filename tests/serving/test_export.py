"""Exports as NPZ, CSV and standalone pages, and the notebook widget."""

import base64
import csv
import io
import json
import re

import numpy as np
import pytest
import torch

import qkv
from qkv.errors import InputError, MissingExtraError
from qkv.serving import export, notebook, standalone_page
from qkv.serving.explorer import APIResponse
from qkv.serving.frame_codec import decode_frame
from tests.serving.explorer_client import FAMILIES, SECOND, TEXT, explorer, get_data, post_run, reference_cache, tasks

SCRIPT = 'const t = "</script><!--"; document.title = t;'


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page with the same structure as the built item."""
    folder = tmp_path / "page"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>qkv</title>'
        '<script type="module" crossorigin src="./assets/index.js"></script>'
        '<link rel="stylesheet" crossorigin href="./assets/index.css"></head><body><div id="app"></div></body></html>'
    )
    (folder / "assets" / "index.js").write_text(SCRIPT)
    (folder / "assets" / "index.css").write_text("body { margin: 0 }")
    monkeypatch.setattr(standalone_page, "PAGE_FOLDER", folder)
    return folder


def export_as(kind, *requests, **more) -> APIResponse:
    wanted = [{"path": path, "body": body} for path, body in requests]
    return explorer().handle_request("/api/export", {"format": kind, "requests": wanted, **more})


def read_embedded_data(html: str):
    (data,) = re.findall(r'<script type="application/json" id="qkv-data">(.*?)</script>', html, re.DOTALL)
    return json.loads(data)


def test_npz_arrays_are_named_by_view_and_field():
    run = post_run("gpt")["run"]
    response = export_as("npz", ("/api/heads", {"run": run}), ("/api/row", {"run": run, "layer": 1, "query": 2}))
    assert response.filename == "explorer.npz"
    file = np.load(io.BytesIO(response.body))
    np.testing.assert_allclose(
        file["1_row_weights"], reference_cache("gpt").weights(qkv.choices.AttentionStack.SELF, 1)[:, 2], atol=2e-6
    )
    assert file["0_heads_thumbnails"].dtype == np.float32
    assert json.loads(str(file["responses"]))[0]["data"]["stack"] == "self"


def test_csv_of_a_map_is_a_table_with_labels():
    run = post_run("bert")
    rows = list(csv.reader(io.StringIO(export_as("csv", ("/api/map", {"run": run["run"]})).body.decode())))
    assert rows[0][1:] == [row[0] for row in rows[1:]] == run["sequence"]["labels"]
    assert sum(map(float, rows[1][1:])) == pytest.approx(1, abs=1e-5)


def test_csv_of_other_views_has_one_number_per_line():
    run = post_run("gpt")["run"]
    rows = list(csv.reader(io.StringIO(export_as("csv", ("/api/residual", {"run": run})).body.decode())))
    found = get_data("/api/residual", {"run": run})["residual_norms"]
    assert rows[0] == ["name", "axis 0", "axis 1", "axis 2", "value"]
    assert float(rows[2][-1]) == pytest.approx(float(found[0, 1]))
    assert rows[2][:-1] == ["residual_norms", "0", "1", ""]


def test_a_token_that_resembles_a_formula_is_quoted():
    run = post_run("gpt", "=1+1")["run"]
    first = export_as("csv", ("/api/map", {"run": run})).body.decode().splitlines()[1]
    assert first.startswith("'=")


@pytest.mark.parametrize(
    ("kind", "requests", "status", "expected"),
    [
        ("npz", [("/api/models", None)], 400, "export"),
        ("csv", [("/api/export", {})], 400, "/api/export"),
        ("html", [("/api/lens", {"run": "old"})], 404, "/api/lens"),
        ("pdf", [("/api/models", None)], 400, "'pdf'"),
    ],
)
def test_invalid_exports_are_rejected(kind, requests, status, expected):
    response = export_as(kind, *requests)
    assert response.status == status
    assert expected in json.loads(response.body)["error"]


def test_a_standalone_page_contains_script_and_responses_and_sends_no_requests(page):
    run_request = {"model": "gpt", "text": "</script><script>alert(1)</script>"}
    run = post_run("gpt", run_request["text"])["run"]
    html = export_as("html", ("/api/lens", {"run": run}), ("/api/run", run_request), state="#lens").body.decode()
    data = read_embedded_data(html)
    assert data["state"] == "#lens"
    assert data["live"] is False
    response, of_run, *others = data["responses"]
    assert of_run["body"] == run_request
    assert (response["path"], response["body"]) == ("/api/lens", {"run": run})
    paths = [item["path"] for item in others]
    assert paths.count("/api/neuron") == 3 * 5, "a saved page must contain every head"
    assert ("/api/lens" in paths, "/api/run" in paths) == (False, False), "responses must not be duplicated"
    np.testing.assert_array_equal(
        decode_frame(base64.b64decode(response["response"]))["ids"], get_data("/api/lens", {"run": run})["ids"]
    )
    assert html.count("</script>") == 2
    assert "src=" not in html
    assert "href=" not in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    code = re.search(r'<script type="module">(.*?)</script>', html, re.DOTALL)[1]
    assert standalone_page._csp_hash(code) in policy
    assert "default-src 'none'" in policy
    assert "connect" not in policy


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_page_contains_every_view(family, page, tmp_path):
    second = SECOND if family in ("seq2seq", "rnn") else None
    page_object = qkv.explore(tasks()[family], TEXT, second)
    page_object.save(tmp_path / "x.html")
    answers = read_embedded_data((tmp_path / "x.html").read_text())["responses"]
    assert {item["status"] for item in answers} == {200}
    requests_in_page = {(item["path"], json.dumps(item["body"], sort_keys=True)) for item in answers}
    assert len(requests_in_page) == len(answers)
    run = page_object._run["run"]
    for stack in page_object._run["stacks"]:
        for layer in range(stack["n_layers"]):
            body = {"run": run, "stack": stack["stack"], "layer": layer}
            assert ("/api/attention", json.dumps(body, sort_keys=True)) in requests_in_page
            for head in range(stack["n_heads"]):
                assert ("/api/map", json.dumps({**body, "head": head}, sort_keys=True)) in requests_in_page
                if family != "rnn":
                    ends = family == "bert" or stack["stack"] == "encoder"  # in a special token
                    neuron = {**body, "head": head, "query": stack["n_queries"] - (2 if ends else 1)}
                    assert ("/api/neuron", json.dumps(neuron, sort_keys=True)) in requests_in_page
    assert ("/api/models", "null") in requests_in_page


def test_a_saved_page_of_a_long_text_contains_only_the_first_head(page, monkeypatch):
    monkeypatch.setattr(export, "MAX_ALL_HEADS_BYTES", 100)
    found = [(item.path, item.body) for item in qkv.explore(tasks()["gpt"], TEXT).record_responses()]
    assert [body["layer"] for path, body in found if path == "/api/attention"] == [0, 1, 2]
    assert [(body["layer"], body["head"]) for path, body in found if path == "/api/neuron"] == [(0, 0)]


def test_the_widget_has_a_text_representation(page):
    pytest.importorskip("anywidget")
    bundle, _ = qkv.explore(tasks()["gpt"], TEXT)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"].startswith("ExplorerPage(")


def test_saving_requires_the_built_page(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook, "is_page_built", lambda: False)
    with pytest.raises(InputError, match="make page"):
        qkv.explore(tasks()["gpt"], TEXT).save(tmp_path / "x.html")


def test_a_notebook_shows_a_sandboxed_frame(page, monkeypatch):
    page_object = qkv.explore(tasks()["gpt"], TEXT)

    def missing():
        raise MissingExtraError("no anywidget")

    monkeypatch.setattr(page_object, "widget", missing)
    bundle, _ = page_object._repr_mimebundle_()
    assert bundle["text/html"].startswith('<iframe sandbox="allow-scripts allow-downloads"')
    assert "<script" not in bundle["text/html"]
    assert "tokens" in bundle["text/plain"]


def test_the_widget_responds_to_requests_of_the_page():
    page_object = qkv.explore(tasks()["gpt"], TEXT)
    messages = []

    class Widget:
        def send(self, message, buffers):
            messages.append((message, buffers))

    page_object.handle_message(Widget(), {"qkv": 7, "path": "/api/lens", "body": {"run": page_object._run["run"]}})
    page_object.handle_message(Widget(), {"qkv": 8, "path": "/api/nothing", "body": {}})
    page_object.explorer.runs = None
    page_object.handle_message(Widget(), {"qkv": 9, "path": "/api/lens", "body": {"run": page_object._run["run"]}})
    (good, (frame,)), (bad, (expected,)), (bug, _) = messages
    assert (good["qkv"], good["status"]) == (7, 200)
    assert decode_frame(frame)["depths"]
    assert (bad["status"], b"/api/nothing" in expected) == (404, True)
    assert (bug["qkv"], bug["status"]) == (9, 500), "the page would wait forever"


def test_a_transformers_model_has_the_same_attention(page):
    transformers = pytest.importorskip("transformers")
    bpe = tasks()["gpt"].tokenizer
    config = transformers.GPT2Config(vocab_size=bpe.vocab_size, n_positions=31, n_embd=12, n_layer=2, n_head=3)
    published = transformers.GPT2LMHeadModel(config).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe.backend, eos_token="<|endoftext|>")
    page_object = qkv.explore(published, TEXT, tokenizer=tokenizer)
    ids = page_object._run["sequence"]["ids"]
    published.set_attn_implementation("eager")
    with torch.no_grad():
        expected = published(torch.tensor([ids]), output_attentions=True).attentions
    for layer in range(2):
        row = get_data(
            "/api/row", {"run": page_object._run["run"], "layer": layer, "query": 3}, backend=page_object.explorer
        )
        np.testing.assert_allclose(row["weights"], expected[layer][0, :, 3], atol=1e-5)
    with pytest.raises(InputError, match="tokenizer="):
        qkv.explore(published, TEXT)
