"""Tasks create all tensors on the model's device, and invalid devices raise.

The tests use `simulated_gpu`, which works without a GPU but does not support an RNN's kernels.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as tried

from qkv.choices import CheckStatus
from qkv.config import BeamConfig, SamplingConfig
from qkv.errors import InputError
from qkv.generation import generate, translate
from qkv.inspection.alignment import compute_cross_attention
from qkv.tasks import LanguageModel, TextEncoder, load
from qkv.tasks.loader import resolve_dtype
from qkv.tasks.verification import verify
from qkv.tasks.verification.implementations import forward, forward_in_chunks
from qkv.tasks.word_vectors import word_vectors
from qkv.utils import resolve_device
from tests.agreement.model_strategies import (
    assert_close,
    build_random_model,
    gpts,
    random_ids,
    random_source_ids,
    seq2seqs,
)
from tests.simulated_gpu import GPU, SimulatedGPUTensor, simulated_gpu
from tests.tasks.small_bert import save_bert
from tests.tasks.small_gpt import save_task, small_gpt

SAMPLING = SamplingConfig(temperature=1.3, top_k=50, top_p=0.95, typical_p=0.9, repetition_penalty=1.2, seed=3)
PAIRS = [("The cat", "sat there."), ("El niño", "comió.")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"gpt": save_task(small_gpt(), folder / "gpt"), "bert": save_bert(folder / "bert")}


def gpt_outputs(task: LanguageModel):
    prompts = ["The cat", "El", "One day there was a"]
    texts = task.generate_batch(prompts, max_new=7, sampling=SAMPLING, stop=["zz"])
    results = task.beam_search(prompts, max_new=5, beam=BeamConfig(n_beams=3, n_best=2, no_repeat_ngram_size=2))
    return {
        "continued": [text.ids for text in texts],
        "found": [[continuation.ids for continuation in continuations] for continuations in results],
        "scores": [score.loss_sum for score in task.score_documents(["The cat sat.", "El niño comió doce manzanas."])],
        "words": word_vectors(task, ["cat", "the [niño] ate"]).cosine.flatten().tolist(),
    }


def bert_outputs(task: TextEncoder):
    texts = ["The cat", "El niño comió doce manzanas."]
    masked = ["The [MASK] sat.", "A [MASK] of [MASK] and more"]
    return {
        "filled": [
            guess.probability for filled in task.fill_mask(masked) for mask in filled.predictions for guess in mask
        ],
        "vectors": [vector for pooling in ("mean", "cls") for vector in task.embed(texts, pooling=pooling).tolist()],
        "similar": [similar.cosine for similar in task.find_similar(texts[:1], texts)[0]],
        "classes": [list(answer.probabilities.values()) for answer in task.classify(PAIRS)],
        "follows": task.next_sentence_probability(PAIRS),
    }


@pytest.mark.parametrize(("kind", "answers"), [("gpt", gpt_outputs), ("bert", bert_outputs)])
def test_every_output_on_a_gpu_equals_the_cpus(folders, kind, answers):
    expected = answers(load(folders[kind]))
    with simulated_gpu():
        task = load(folders[kind], device="cuda")
        assert {type(parameter) for parameter in task.model.parameters()} == {SimulatedGPUTensor}
        assert next(task.model.parameters()).device == GPU
        actual = answers(task)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert flat(actual[name]) == pytest.approx(flat(value), abs=1e-5), name


def flat(value):
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [value]


@tried(max_examples=4)
@given(gpts())
def test_a_gpt_of_any_shape_runs_on_its_device(config):
    model, ids = build_random_model(config), random_ids(1, 2, 11)
    with torch.no_grad():
        expected = forward_in_chunks(model, ids, [5, 6])
        with simulated_gpu():
            assert_close(forward_in_chunks(model.to(GPU), ids.to(GPU), [5, 6]).cpu(), expected)


@tried(max_examples=4)
@given(seq2seqs())
def test_a_translation_model_of_any_shape_runs_on_its_device(config):
    model, sources = build_random_model(config), [random_source_ids(2, 1, n)[0].tolist() for n in (3, 7)]

    def generate_with_attention():
        results = translate(
            model,
            sources,
            start_id=1,
            max_new=[4, 6],
            stop_ids=frozenset({2}),
            beam=BeamConfig(n_beams=3),
            constraints=[[], [[5, 6]]],
        )
        weights = compute_cross_attention(model, sources[1], results[1][0].ids, start_id=1)
        return [hypotheses[0].ids for hypotheses in results], weights.cpu()

    expected_ids, expected_weights = generate_with_attention()
    with simulated_gpu(), torch.no_grad():
        model.to(GPU)
        ids, weights = generate_with_attention()
    assert ids == expected_ids
    assert_close(weights, expected_weights)


def test_an_invalid_id_raises_before_the_copy_to_the_gpu():
    """On a GPU, an invalid id would abort the process."""
    model = build_random_model(small_gpt().model.config)
    n = model.config.vocab_size
    with simulated_gpu(), torch.no_grad(), pytest.raises(InputError, match=rf"\b{n}\b is out of range"):
        generate(model.to(GPU), [[1, n]], max_new=1)


def test_a_tensor_on_the_wrong_device_raises():
    """Checks that the tests above can fail."""
    model = build_random_model(small_gpt().model.config)
    with simulated_gpu(), torch.no_grad(), pytest.raises(AssertionError, match="devices"):
        forward(model.to(GPU), random_ids(1, 2, 11))


def test_verify_runs_on_the_device_and_compares_it_with_the_cpu(folders):
    with simulated_gpu():
        results = {
            result.check: result
            for result in verify(folders["gpt"], texts=["The cat sat.", "El niño"], quick=True, device="cuda")
        }
    assert results["device"].verdict is CheckStatus.PASSED
    assert not [result for result in results.values() if result.verdict is CheckStatus.FAILED]


def test_bfloat16_converts_the_weights_and_keeps_the_outputs_similar(folders):
    expected = load(folders["bert"]).embed(["The cat"])
    with simulated_gpu():
        task = load(folders["bert"], device="cuda", dtype="bfloat16")
        assert {parameter.dtype for parameter in task.model.parameters()} == {torch.bfloat16}
        vectors = task.embed(["The cat"]).float().cpu()
    assert float((vectors * expected).sum()) > 0.99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, r"--device cuda: .*CUDA.*--device cpu"),
        ({"device": "gpu"}, "--device gpu: .*cpu, cuda, auto"),
        ({"device": "cuda", "int8": True}, "--int8 .*CPU.*--device cuda"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16.*GPU"),
        ({"dtype": "float64"}, "--dtype float64: .*float32.*bfloat16"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_invalid_options_raise_before_loading(options, message):
    with pytest.raises(InputError, match=message):
        load("no-such-model", **options)


def test_auto_selects_the_gpu_if_available(monkeypatch):
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_dtype("bfloat16", torch.device("cuda")) is torch.bfloat16


def test_int8_with_auto_selects_the_cpu(monkeypatch, folders):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert load(folders["gpt"], int8=True, device="auto").model.embedding.token.weight.device.type == "cpu"
