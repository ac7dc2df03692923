"""Streamed generation: token ids, KV cache size, attention rows and interventions."""

import json

import numpy as np
import pytest
import torch

from qkv.choices import AlignmentLayerAveraging, AttentionStack
from qkv.config import BeamConfig, SamplingConfig
from qkv.cost import Precision, cache_bytes
from qkv.cost.calibration import default_calibration_path, save_calibration
from qkv.inspection import prepare_gpt_input_from_ids, run_with_cache
from qkv.tasks import Translator
from qkv.utils import gpu_name_or_cpu_threads
from tests.cost.synthetic_calibration import make_calibration
from tests.serving.explorer_client import TEXT, explorer, get_data, split_frames, tasks
from tests.tasks.small_translator import small_translator


def generate(**more):
    response = explorer().handle_request("/api/generate", {"model": "gpt", "text": TEXT, "max_new": 7, **more})
    assert response.status == 200, response.body
    start, *steps, end = split_frames(response.body)
    assert (start["kind"], end["kind"]) == ("start", "end")
    return start, steps, end


def test_streamed_text_equals_the_tasks_generation():
    start, steps, end = generate(temperature=0.7, top_k=5, seed=3)
    sampling = SamplingConfig(temperature=0.7, top_k=5, seed=3)
    (expected,) = tasks()["gpt"].generate_batch([TEXT], max_new=7, sampling=sampling)
    assert end["ids"] == expected.ids == [step["id"] for step in steps]
    assert end["text"] == expected.text == "".join(step["text"] for step in steps)
    assert [np.log(step["probability"]) for step in steps] == pytest.approx(expected.log_probabilities, abs=1e-4)
    assert start["prompt"]["ids"] == tasks()["gpt"].tokenize(TEXT)


@pytest.mark.parametrize("use_cache", [True, False])
def test_attention_is_the_row_of_the_query_that_chose_the_token(use_cache):
    start, steps, end = generate(use_cache=use_cache, temperature=0.0)
    task = tasks()["gpt"]
    cache = run_with_cache(task.model, prepare_gpt_input_from_ids(task, [*start["prompt"]["ids"], *end["ids"][:-1]]))
    for step in steps:
        row = cache.all_weights(AttentionStack.SELF)[:, :, step["position"], : step["position"] + 1]
        np.testing.assert_allclose(step["attention"], row.numpy(), atol=2e-6)


def test_the_cache_grows_by_one_token_in_every_step():
    start, steps, _ = generate()
    n = len(start["prompt"]["ids"])
    config = tasks()["gpt"].model.config
    for step in steps:
        assert step["n_cached"] == n + step["index"]
        assert step["cache_bytes"] == cache_bytes(config, batch_size=1, seq_len=step["n_cached"])
        assert step["n_computed"] == (n if step["index"] == 0 else 1)
    assert steps[1]["cache_bytes"] - steps[0]["cache_bytes"] == start["bytes_per_token"]


def test_without_a_cache_every_step_recomputes_the_sequence():
    start, steps, end = generate(use_cache=False)
    assert [step["n_computed"] for step in steps] == [len(start["prompt"]["ids"]) + i for i in range(7)]
    assert {step["cache_bytes"] for step in steps} == {0}
    assert steps[3]["flops"] > 3 * generate()[1][3]["flops"]
    assert end["ids"] == generate()[2]["ids"]


def test_candidates_have_probabilities_before_and_after_sampling_settings():
    _, steps, _ = generate(top_k=2, candidates=4)
    for step in steps:
        assert len(step["candidates"]) >= 4
        assert sum(item["sampling_probability"] for item in step["candidates"]) == pytest.approx(1, abs=1e-5)
        assert [item["id"] for item in step["candidates"] if item["is_chosen"]] == [step["id"]]


def test_generation_continues_from_ids():
    _, _, end = generate(temperature=0.0)
    ids = [*tasks()["gpt"].tokenize(TEXT), *end["ids"][:3]]
    response = explorer().handle_request("/api/generate", {"model": "gpt", "ids": ids, "max_new": 1, "temperature": 0})
    assert split_frames(response.body)[-1]["ids"] == end["ids"][3:4]


def test_ablated_heads_stay_ablated_during_generation_only():
    before = generate(temperature=0.0)[2]["ids"]
    ablations = [
        {"kind": "head", "stack": "self", "layer": layer, "head": head} for layer in range(3) for head in range(5)
    ]
    assert generate(temperature=0.0, interventions=ablations)[2]["ids"] != before
    assert generate(temperature=0.0)[2]["ids"] == before


def test_a_masked_edge_that_no_step_reaches_is_reported():
    edge = [{"kind": "edge", "stack": "self", "query": 39, "key": 1}]
    assert "query 39 to key 1" in generate(interventions=edge)[2]["remarks"][0]
    reached = [{"kind": "edge", "stack": "self", "query": len(tasks()["gpt"].tokenize(TEXT)) + 2, "key": 1}]
    _, steps, end = generate(interventions=reached)
    assert end["remarks"] == []
    assert (steps[3]["attention"][:, :, 1] == 0).all()
    assert (steps[4]["attention"][:, :, 1] > 0).all()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "bert", "text": TEXT}, "bert"),
        ({"model": "gpt", "text": "cat " * 60}, "41"),
        ({"model": "gpt", "ids": [9999]}, "9999"),
        ({"model": "gpt", "text": TEXT, "ids": [1]}, "text and ids"),
        ({"model": "gpt", "text": TEXT, "temperature": -1}, "temperature"),
        ({"model": "gpt", "text": TEXT, "interventions": [{"kind": "patch", "tap": "x", "text": "y"}]}, "patch"),
    ],
)
def test_invalid_requests_fail_before_the_stream_starts(body, expected):
    response = explorer().handle_request("/api/generate", body)
    assert response.status == 400
    assert expected in json.loads(response.body)["error"]


@pytest.mark.parametrize("family", ["seq2seq", "rnn"])
def test_beam_steps_contain_the_path_of_every_hypothesis(family):
    found = get_data("/api/translate", {"model": family, "text": TEXT, "beam": 3, "max_new": 6})
    beam = BeamConfig(n_beams=3, n_best=3)
    (expected,) = tasks()[family].translate_batch([TEXT], beam=beam, max_new=6, attention=True)
    assert [item["text"] for item in found["hypotheses"]] == [item.text for item in expected.hypotheses]
    np.testing.assert_allclose(
        found["alignment"]["weights"], expected.attention.average(AlignmentLayerAveraging.ALL).numpy(), atol=1e-5
    )
    assert found["alignment"]["pharaoh"] == expected.attention.to_pharaoh()
    for hypothesis in found["hypotheses"]:
        assert is_path_in_steps(hypothesis["ids"], found["steps"], hypothesis["log_probabilities"])


def is_path_in_steps(ids, steps, log_p):
    """Whether the recorded hypotheses lead to these ids. The last id is never extended, so it is not recorded."""
    reached = {0}
    for number, (step, token_id) in enumerate(zip(steps, ids[:-1], strict=False)):
        extended = {i for i, guess in enumerate(step) if guess["parent"] in reached and guess["id"] == token_id}
        if not extended:
            return False
        assert any(step[i]["log_probability"] == pytest.approx(sum(log_p[: number + 1]), abs=1e-3) for i in extended)
        reached = extended
    return True


@pytest.mark.long
def test_a_trained_translator_translates():
    memory = {"trained": small_translator()}
    from qkv.serving.explorer import Explorer
    from qkv.serving.model_registry import ModelRegistry

    found = get_data(
        "/api/translate",
        {"model": "trained", "text": "uno dos tres"},
        backend=Explorer(ModelRegistry(memory=memory, zoo=False)),
    )
    assert found["hypotheses"][0]["text"] == "tres dos uno"


def test_task_prefix_and_suppressed_ids_are_applied():
    from qkv.serving.explorer import Explorer
    from qkv.serving.model_registry import ModelRegistry
    from qkv.weights.generation_config import GenerationConfig

    plain = tasks()["seq2seq"]
    first = get_data("/api/translate", {"model": "seq2seq", "text": TEXT, "beam": 3, "max_new": 6})["hypotheses"][0][
        "ids"
    ]
    decoding = GenerationConfig(suppressed_ids=frozenset(first[:1]), task_prefixes={"de": "El niño: "})
    local = Explorer(
        ModelRegistry(memory={"t5": Translator(plain.model, plain.tokenizer, generation_config=decoding)}, zoo=False)
    )
    found = get_data("/api/translate", {"model": "t5", "text": TEXT, "beam": 3, "max_new": 6}, backend=local)
    assert found["source"]["text"] == f"El niño: {TEXT}"
    assert first[0] not in {guess["id"] for step in found["steps"] for guess in step}
    run = get_data("/api/run", {"model": "t5", "text": TEXT}, backend=local)
    assert run["source"]["ids"] == found["source"]["ids"]
    assert "El niño" in run["remarks"][0]


def test_a_prompt_beyond_the_context_is_rejected_before_its_words_are_computed(monkeypatch):
    def fail(*_):
        raise AssertionError("words of 20,000 tokens were computed")

    monkeypatch.setattr("qkv.inspection.model_input.word_indices_of_ids", fail)
    response = explorer().handle_request("/api/generate", {"model": "gpt", "text": "x7" * 10_000, "max_new": 1})
    assert response.status == 400
    assert "41" in json.loads(response.body)["error"]


def test_predictions_use_the_calibration_of_the_same_device(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = gpu_name_or_cpu_threads(torch.device("cpu"))
    for name, is_here in (("cpu, 97 threads", False), (here, True)):
        save_calibration(make_calibration().replace(device=name), default_calibration_path(name, Precision.FLOAT32))
        assert (generate()[1][0]["predicted_ms"] is not None) is is_here
    for device in ("cpu", "h200"):
        report = get_data("/api/cost", {"preset": "gpt-nano", "device": device, "dtype": "float32"})
        assert (report["time"]["calibrated"] is not None) is (device == "cpu")
        assert (report["context_curve"][0]["decode_predicted_ms"] is not None) is (device == "cpu")
