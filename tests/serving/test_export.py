"""What is seen leaves as a file, and comes back the same."""

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
from qkv.serving.explorer import Answer
from qkv.serving.frame_codec import unpack
from tests.serving.explorer_client import FAMILIES, SECOND, TEXT, asked, explorer, run_of, seen, tasks

SCRIPT = 'const t = "</script><!--"; document.title = t;'


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page as the build makes it."""
    folder = tmp_path / "page"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>qkv</title>'
        '<script type="module" crossorigin src="./assets/index.js"></script>'
        '<link rel="stylesheet" crossorigin href="./assets/index.css"></head><body><div id="app"></div></body></html>'
    )
    (folder / "assets" / "index.js").write_text(SCRIPT)
    (folder / "assets" / "index.css").write_text("body { margin: 0 }")
    monkeypatch.setattr(standalone_page, "PAGE", folder)
    return folder


def exported(kind, *requests, **more) -> Answer:
    wanted = [{"path": path, "body": body} for path, body in requests]
    return explorer().ask("/api/export", {"format": kind, "requests": wanted, **more})


def embedded(html: str):
    (data,) = re.findall(r'<script type="application/json" id="qkv-data">(.*?)</script>', html, re.DOTALL)
    return json.loads(data)


def test_npz_holds_the_blobs_by_view_and_name():
    run = run_of("gpt")["run"]
    answer = exported("npz", ("/api/heads", {"run": run}), ("/api/row", {"run": run, "layer": 1, "query": 2}))
    assert answer.filename == "explorer.npz"
    file = np.load(io.BytesIO(answer.body))
    np.testing.assert_allclose(file["1_row_weights"], seen("gpt").weights(qkv.choices.AttentionKind.SELF, 1)[:, 2], atol=2e-6)
    assert file["0_heads_thumbs"].dtype == np.float32
    assert json.loads(str(file["answers"]))[0]["data"]["stack"] == "self"


def test_a_map_is_a_table_with_its_labels():
    run = run_of("bert")
    rows = list(csv.reader(io.StringIO(exported("csv", ("/api/map", {"run": run["run"]})).body.decode())))
    assert rows[0][1:] == [row[0] for row in rows[1:]] == run["own"]["labels"]
    assert sum(map(float, rows[1][1:])) == pytest.approx(1, abs=1e-5)


def test_any_other_view_is_a_number_a_line():
    run = run_of("gpt")["run"]
    rows = list(csv.reader(io.StringIO(exported("csv", ("/api/residual", {"run": run})).body.decode())))
    found = asked("/api/residual", {"run": run})["residual"]
    assert rows[0] == ["name", "axis 0", "axis 1", "axis 2", "value"]
    assert float(rows[2][-1]) == pytest.approx(float(found[0, 1]))
    assert rows[2][:-1] == ["residual", "0", "1", ""]


def test_a_token_that_looks_like_a_formula_stays_a_text():
    run = run_of("gpt", "=1+1")["run"]
    first = exported("csv", ("/api/map", {"run": run})).body.decode().splitlines()[1]
    assert first.startswith("'=")


@pytest.mark.parametrize(
    ("kind", "requests", "line"),
    [
        ("npz", [("/api/models", None)], "holds numbers in bulk"),
        ("csv", [("/api/export", {})], "cannot be exported"),
        ("html", [("/api/lens", {"run": "old"})], "/api/lens: no run is known"),
        ("pdf", [("/api/models", None)], "format='pdf'"),
    ],
)
def test_what_cannot_be_exported_is_said(kind, requests, line):
    answer = exported(kind, *requests)
    assert answer.status in (400, 404)
    assert line in json.loads(answer.body)["error"]


def test_one_file_holds_page_and_answers_and_asks_nobody(page):
    asked_ = {"model": "gpt", "text": "</script><script>alert(1)</script>"}
    run = run_of("gpt", asked_["text"])["run"]
    html = exported("html", ("/api/lens", {"run": run}), ("/api/run", asked_), state="#lens").body.decode()
    data = embedded(html)
    assert data["state"] == "#lens"
    assert data["live"] is False
    answer, of_run, *others = data["answers"]
    assert of_run["body"] == asked_
    assert (answer["path"], answer["body"]) == ("/api/lens", {"run": run})
    paths = [one["path"] for one in others]
    assert paths.count("/api/neuron") == 3 * 5, "a saved page shows each head that it can open"
    assert ("/api/lens" in paths, "/api/run" in paths) == (False, False), "held twice"
    np.testing.assert_array_equal(
        unpack(base64.b64decode(answer["answer"]))["ids"], asked("/api/lens", {"run": run})["ids"]
    )
    assert html.count("</script>") == 2
    assert "src=" not in html
    assert "href=" not in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    code = re.search(r'<script type="module">(.*?)</script>', html, re.DOTALL)[1]
    assert standalone_page._hash(code) in policy
    assert "default-src 'none'" in policy
    assert "connect" not in policy


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_page_has_every_view_of_its_text(family, page, tmp_path):
    second = SECOND if family in ("seq2seq", "rnn") else None
    shown = qkv.explore(tasks()[family], TEXT, second)
    shown.save(tmp_path / "x.html")
    answers = embedded((tmp_path / "x.html").read_text())["answers"]
    assert {one["status"] for one in answers} == {200}
    held = {(one["path"], json.dumps(one["body"], sort_keys=True)) for one in answers}
    assert len(held) == len(answers)
    run = shown._told["run"]
    for stack in shown._told["stacks"]:
        for layer in range(stack["layers"]):
            body = {"run": run, "stack": stack["stack"], "layer": layer}
            assert ("/api/attention", json.dumps(body, sort_keys=True)) in held
            for head in range(stack["heads"]):
                assert ("/api/map", json.dumps({**body, "head": head}, sort_keys=True)) in held
                if family != "rnn":
                    ends = family == "bert" or stack["stack"] == "encoder"  # in a special token
                    looks = {**body, "head": head, "query": stack["queries"] - (2 if ends else 1)}
                    assert ("/api/neuron", json.dumps(looks, sort_keys=True)) in held
    assert ("/api/models", "null") in held


def test_a_saved_page_of_a_long_text_has_the_views_of_the_first_head_alone(page, monkeypatch):
    monkeypatch.setattr(export, "MOST_BYTES", 100)
    found = [(one.path, one.body) for one in qkv.explore(tasks()["gpt"], TEXT).answers()]
    assert [body["layer"] for path, body in found if path == "/api/attention"] == [0, 1, 2]
    assert [(body["layer"], body["head"]) for path, body in found if path == "/api/neuron"] == [(0, 0)]


def test_a_widget_is_told_in_words_where_nothing_can_be_shown(page):
    pytest.importorskip("anywidget")
    bundle, _ = qkv.explore(tasks()["gpt"], TEXT)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"].startswith("Explored(")


def test_without_the_page_a_file_cannot_be_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook, "is_built", lambda: False)
    with pytest.raises(InputError, match="not built"):
        qkv.explore(tasks()["gpt"], TEXT).save(tmp_path / "x.html")


def test_a_notebook_shows_a_frame_that_cannot_reach_out(page, monkeypatch):
    shown = qkv.explore(tasks()["gpt"], TEXT)

    def missing():
        raise MissingExtraError("no anywidget")

    monkeypatch.setattr(shown, "widget", missing)
    bundle, _ = shown._repr_mimebundle_()
    assert bundle["text/html"].startswith('<iframe sandbox="allow-scripts allow-downloads"')
    assert "<script" not in bundle["text/html"]
    assert "tokens" in bundle["text/plain"]


def test_a_widget_answers_what_the_page_asks():
    shown = qkv.explore(tasks()["gpt"], TEXT)
    sent = []

    class Widget:
        def send(self, message, buffers):
            sent.append((message, buffers))

    shown.reply(Widget(), {"qkv": 7, "path": "/api/lens", "body": {"run": shown._told["run"]}})
    shown.reply(Widget(), {"qkv": 8, "path": "/api/nothing", "body": {}})
    shown.explorer.runs = None
    shown.reply(Widget(), {"qkv": 9, "path": "/api/lens", "body": {"run": shown._told["run"]}})
    (good, (frame,)), (bad, (line,)), (bug, _) = sent
    assert (good["qkv"], good["status"]) == (7, 200)
    assert unpack(frame)["depths"]
    assert (bad["status"], b"there is no" in line) == (404, True)
    assert (bug["qkv"], bug["status"]) == (9, 500), "the page would wait for ever"


def test_a_model_of_transformers_is_seen_as_it_is(page):
    transformers = pytest.importorskip("transformers")
    bpe = tasks()["gpt"].tokenizer
    config = transformers.GPT2Config(vocab_size=bpe.vocab_size, n_positions=31, n_embd=12, n_layer=2, n_head=3)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe.backend, eos_token="<|endoftext|>")
    shown = qkv.explore(theirs, TEXT, tokenizer=tokenizer)
    ids = shown._told["own"]["ids"]
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), output_attentions=True).attentions
    for layer in range(2):
        row = asked("/api/row", {"run": shown._told["run"], "layer": layer, "query": 3}, of=shown.explorer)
        np.testing.assert_allclose(row["weights"], expected[layer][0, :, 3], atol=1e-5)
    with pytest.raises(InputError, match="needs its tokenizer"):
        qkv.explore(theirs, TEXT)
