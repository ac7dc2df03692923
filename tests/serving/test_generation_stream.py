"""A text as it is written: the same ids, the real cache, the row that chose."""

import json

import numpy as np
import pytest
import torch

from qkv.choices import AlignmentAveraging, AttentionKind
from qkv.config import BeamConfig, SamplingConfig
from qkv.cost import Precision, cache_bytes
from qkv.cost.calibration import calibration_path, save_calibration
from qkv.inspection import prepare_input_ids, run_with_cache
from qkv.tasks import Translator
from qkv.training.device_calibration import device_name
from tests.cost.synthetic_calibration import made_up
from tests.serving.explorer_client import TEXT, asked, explorer, frames, tasks
from tests.tasks.small_translator import small_translator


def written(**more):
    answer = explorer().ask("/api/generate", {"model": "gpt", "text": TEXT, "max_new": 7, **more})
    assert answer.status == 200, answer.body
    start, *steps, end = frames(answer.body)
    assert (start["kind"], end["kind"]) == ("start", "end")
    return start, steps, end


def test_what_is_written_is_what_the_task_writes():
    start, steps, end = written(temperature=0.7, top_k=5, seed=3)
    sampling = SamplingConfig(temperature=0.7, top_k=5, seed=3)
    (expected,) = tasks()["gpt"].generate_batch([TEXT], max_new=7, sampling=sampling)
    assert end["ids"] == expected.ids == [step["id"] for step in steps]
    assert end["text"] == expected.text == "".join(step["piece"] for step in steps)
    assert [np.log(step["probability"]) for step in steps] == pytest.approx(expected.log_probabilities, abs=1e-4)
    assert start["prompt"]["ids"] == tasks()["gpt"].encode(TEXT)


@pytest.mark.parametrize("cache", [True, False])
def test_the_row_is_the_one_that_chose(cache):
    start, steps, end = written(cache=cache, temperature=0.0)
    task = tasks()["gpt"]
    looked = run_with_cache(task.model, prepare_input_ids(task, [*start["prompt"]["ids"], *end["ids"][:-1]]))
    for step in steps:
        row = looked.all_weights(AttentionKind.SELF)[:, :, step["position"], : step["position"] + 1]
        np.testing.assert_allclose(step["attention"], row.numpy(), atol=2e-6)


def test_the_cache_grows_by_a_token_a_step_in_real_bytes():
    start, steps, _ = written()
    n = len(start["prompt"]["ids"])
    config = tasks()["gpt"].model.config
    for step in steps:
        assert step["cache_tokens"] == n + step["index"]
        assert step["cache_bytes"] == cache_bytes(config, batch=1, length=step["cache_tokens"])
        assert step["computed"] == (n if step["index"] == 0 else 1)
    assert steps[1]["cache_bytes"] - steps[0]["cache_bytes"] == start["bytes_per_token"]


def test_without_a_cache_everything_is_read_anew():
    start, steps, end = written(cache=False)
    assert [step["computed"] for step in steps] == [len(start["prompt"]["ids"]) + i for i in range(7)]
    assert {step["cache_bytes"] for step in steps} == {0}
    assert steps[3]["flops"] > 3 * written()[1][3]["flops"]
    assert end["ids"] == written()[2]["ids"]


def test_candidates_have_probabilities_before_and_after_the_settings():
    _, steps, _ = written(top_k=2, candidates=4)
    for step in steps:
        assert len(step["candidates"]) >= 4
        assert sum(one["revised"] for one in step["candidates"]) == pytest.approx(1, abs=1e-5)
        assert [one["id"] for one in step["candidates"] if one["is_chosen"]] == [step["id"]]


def test_a_text_goes_on_from_ids():
    _, _, whole = written(temperature=0.0)
    ids = [*tasks()["gpt"].encode(TEXT), *whole["ids"][:3]]
    answer = explorer().ask("/api/generate", {"model": "gpt", "ids": ids, "max_new": 1, "temperature": 0})
    assert frames(answer.body)[-1]["ids"] == whole["ids"][3:4]


def test_a_head_that_is_off_stays_off_while_writing_and_comes_back():
    before = written(temperature=0.0)[2]["ids"]
    off = [{"kind": "head", "stack": "self", "layer": layer, "head": head} for layer in range(3) for head in range(5)]
    assert written(temperature=0.0, interventions=off)[2]["ids"] != before
    assert written(temperature=0.0)[2]["ids"] == before


def test_a_cut_that_no_step_reaches_is_remarked():
    cut = [{"kind": "edge", "stack": "self", "query": 39, "key": 1}]
    assert "39→1" in written(interventions=cut)[2]["remarks"][0]
    reached = [{"kind": "edge", "stack": "self", "query": len(tasks()["gpt"].encode(TEXT)) + 2, "key": 1}]
    _, steps, end = written(interventions=reached)
    assert end["remarks"] == []
    assert (steps[3]["attention"][:, :, 1] == 0).all()
    assert (steps[4]["attention"][:, :, 1] > 0).all()


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"model": "bert", "text": TEXT}, "asked of a GPT"),
        ({"model": "gpt", "text": "cat " * 60}, "context_length is 41"),
        ({"model": "gpt", "ids": [9999]}, "9999"),
        ({"model": "gpt", "text": TEXT, "ids": [1]}, "one of the two"),
        ({"model": "gpt", "text": TEXT, "temperature": -1}, "temperature"),
        ({"model": "gpt", "text": TEXT, "interventions": [{"kind": "patch", "tap": "x", "text": "y"}]}, "patch"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_stream_begins(body, line):
    answer = explorer().ask("/api/generate", body)
    assert answer.status == 400
    assert line in json.loads(answer.body)["error"]


@pytest.mark.parametrize("family", ["seq2seq", "rnn"])
def test_a_beam_shows_where_its_best_came_from(family):
    found = asked("/api/translate", {"model": family, "text": TEXT, "beam": 3, "max_new": 6})
    beam = BeamConfig(n_beams=3, n_best=3)
    (expected,) = tasks()[family].translate_batch([TEXT], beam=beam, max_new=6, attention=True)
    assert [one["text"] for one in found["found"]] == [one.text for one in expected.hypotheses]
    np.testing.assert_allclose(found["alignment"]["weights"], expected.attention.average(AlignmentAveraging.ALL).numpy(), atol=1e-5)
    assert found["alignment"]["pharaoh"] == expected.attention.to_pharaoh()
    for one in found["found"]:
        assert path_of(one["ids"], found["steps"], sum(one["log_probabilities"]), one["log_probabilities"])


def path_of(ids, steps, total, log_p):
    """Whether the running guesses lead to these ids, with their sums; the last id is never read."""
    reached = {0}
    for number, (step, wanted) in enumerate(zip(steps, ids[:-1], strict=False)):
        going = {i for i, guess in enumerate(step) if guess["parent"] in reached and guess["id"] == wanted}
        if not going:
            return False
        assert any(step[i]["total"] == pytest.approx(sum(log_p[: number + 1]), abs=1e-3) for i in going)
        reached = going
    return True


@pytest.mark.long
def test_a_trained_translator_is_seen_translating():
    own = {"trained": small_translator()}
    from qkv.serving.explorer import Explorer
    from qkv.serving.model_registry import ModelRegistry

    found = asked(
        "/api/translate", {"model": "trained", "text": "uno dos tres"}, of=Explorer(ModelRegistry(memory=own, zoo=False))
    )
    assert found["found"][0]["text"] == "tres dos uno"


def test_a_prefix_and_forbidden_ids_are_those_of_the_task():
    from qkv.serving.explorer import Explorer
    from qkv.serving.model_registry import ModelRegistry
    from qkv.weights.decoding import Decoding

    plain = tasks()["seq2seq"]
    first = asked("/api/translate", {"model": "seq2seq", "text": TEXT, "beam": 3, "max_new": 6})["found"][0]["ids"]
    decoding = Decoding(suppressed_ids=frozenset(first[:1]), prefixes={"de": "El niño: "})
    own = Explorer(ModelRegistry(memory={"t5": Translator(plain.model, plain.tokenizer, decoding=decoding)}, zoo=False))
    found = asked("/api/translate", {"model": "t5", "text": TEXT, "beam": 3, "max_new": 6}, of=own)
    assert found["source"]["text"] == f"El niño: {TEXT}"
    assert first[0] not in {guess["id"] for step in found["steps"] for guess in step}
    run = asked("/api/run", {"model": "t5", "text": TEXT}, of=own)
    assert run["source"]["ids"] == found["source"]["ids"]
    assert "El niño" in run["remarks"][0]


def test_a_prompt_far_over_the_context_is_refused_before_its_words_are_counted(monkeypatch):
    def counted(*_):
        raise AssertionError("20,000 tokens are looked at for nothing")

    monkeypatch.setattr("qkv.inspection.model_input.word_indices_of_ids", counted)
    answer = explorer().ask("/api/generate", {"model": "gpt", "text": "x7" * 10_000, "max_new": 1})
    assert answer.status == 400
    assert "context_length is 41" in json.loads(answer.body)["error"]


def test_a_prediction_is_by_a_calibration_of_the_same_device(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = device_name(torch.device("cpu"))
    for name, is_here in (("cpu, 97 threads", False), (here, True)):
        save_calibration(made_up().replace(device=name), calibration_path(name, Precision.FLOAT32))
        assert (written()[1][0]["predicted_ms"] is not None) is is_here
    for device in ("cpu", "h200"):
        told = asked("/api/cost", {"preset": "gpt-nano", "device": device, "dtype": "float32"})
        assert (told["time"]["calibrated"] is not None) is (device == "cpu")
        assert (told["curve"][0]["decode_predicted_ms"] is not None) is (device == "cpu")
