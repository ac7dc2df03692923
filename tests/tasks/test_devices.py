"""Where a task computes: every tensor that it makes follows its model, and what cannot be is refused in one line.

There is no GPU here, so `pretended_gpu` stands for one. An RNN's own kernels it cannot stand for.
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
from qkv.tasks.devices import resolve_device, resolve_dtype
from qkv.tasks.verification import verify
from qkv.tasks.verification.implementations import forward, forward_in_chunks
from qkv.tasks.word_vectors import word_vectors
from tests.agreement.families import close, gpts, seq2seqs, shaken, some_ids, some_source
from tests.pretend_gpu import GPU, OnGPU, pretended_gpu
from tests.tasks.small_bert import saved_bert
from tests.tasks.small_gpt import saved, small_task

SAMPLING = SamplingConfig(temperature=1.3, top_k=50, top_p=0.95, typical_p=0.9, repetition_penalty=1.2, seed=3)
PAIRS = [("The cat", "sat there."), ("El niño", "comió.")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {"gpt": saved(small_task(), place / "gpt"), "bert": saved_bert(place / "bert")}


def of_gpt(task: LanguageModel):
    prompts = ["The cat", "El", "One day there was a"]
    texts = task.generate_batch(prompts, max_new=7, sampling=SAMPLING, stop=["zz"])
    found = task.beam_search(prompts, max_new=5, beam=BeamConfig(n_beams=3, n_best=2, no_repeat_ngram_size=2))
    return {
        "continued": [text.ids for text in texts],
        "found": [[one.ids for one in some] for some in found],
        "scores": [score.loss_sum for score in task.score_documents(["The cat sat.", "El niño comió doce manzanas."])],
        "words": word_vectors(task, ["cat", "the [niño] ate"]).cosine.flatten().tolist(),
    }


def of_bert(task: TextEncoder):
    texts = ["The cat", "El niño comió doce manzanas."]
    masked = ["The [MASK] sat.", "A [MASK] of [MASK] and more"]
    return {
        "filled": [guess.probability for one in task.fill_mask(masked) for mask in one.masks for guess in mask],
        "vectors": [vector for pooling in ("mean", "cls") for vector in task.embed(texts, pooling=pooling).tolist()],
        "similar": [one.cosine for one in task.find_similar(texts[:1], texts)[0]],
        "classes": [list(answer.probabilities.values()) for answer in task.classify(PAIRS)],
        "follows": task.next_sentence_probability(PAIRS),
    }


@pytest.mark.parametrize(("kind", "answers"), [("gpt", of_gpt), ("bert", of_bert)])
def test_every_answer_is_the_cpus_on_a_device_whose_tensors_mix_with_no_others(folders, kind, answers):
    expected = answers(load(folders[kind]))
    with pretended_gpu():
        task = load(folders[kind], device="cuda")
        assert {type(parameter) for parameter in task.model.parameters()} == {OnGPU}
        assert next(task.model.parameters()).device == GPU
        found = answers(task)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert flat(found[name]) == pytest.approx(flat(value), abs=1e-5), name


def flat(value):
    return [one for part in value for one in flat(part)] if isinstance(value, list) else [value]


@tried(max_examples=4)
@given(gpts())
def test_a_gpt_of_any_shape_follows_its_device(config):
    model, ids = shaken(config), some_ids(1, 2, 11)
    with torch.no_grad():
        expected = forward_in_chunks(model, ids, [5, 6])
        with pretended_gpu():
            close(forward_in_chunks(model.to(GPU), ids.to(GPU), [5, 6]).cpu(), expected)


@tried(max_examples=4)
@given(seq2seqs())
def test_a_translator_of_any_shape_follows_its_device(config):
    model, sources = shaken(config), [some_source(2, 1, n)[0].tolist() for n in (3, 7)]

    def written():
        found = translate(
            model,
            sources,
            start_id=1,
            max_new=[4, 6],
            stop_ids=frozenset({2}),
            beam=BeamConfig(n_beams=3),
            constraints=[[], [[5, 6]]],
        )
        looks = compute_cross_attention(model, sources[1], found[1][0].ids, start_id=1)
        return [some[0].ids for some in found], looks.cpu()

    ids, looks = written()
    with pretended_gpu(), torch.no_grad():
        model.to(GPU)
        found, seen = written()
    assert found == ids
    close(seen, looks)


def test_an_id_outside_the_vocabulary_is_refused_before_it_leaves_the_cpu():
    """A GPU would end the process with an assertion of its own."""
    model = shaken(small_task().model.config)
    n = model.config.vocab_size
    with pretended_gpu(), torch.no_grad(), pytest.raises(InputError, match=f"id {n} is outside the vocabulary of {n}"):
        generate(model.to(GPU), [[1, n]], max_new=1)


def test_a_tensor_left_on_the_cpu_is_noticed():
    """Else the tests above could not fail."""
    model = shaken(small_task().model.config)
    with pretended_gpu(), torch.no_grad(), pytest.raises(AssertionError, match="its tensors are on both devices"):
        forward(model.to(GPU), some_ids(1, 2, 11))


def test_verify_takes_the_fast_roads_on_the_device_and_compares_it_with_the_cpu(folders):
    with pretended_gpu():
        results = {
            one.check: one
            for one in verify(folders["gpt"], texts=["The cat sat.", "El niño"], quick=True, device="cuda")
        }
    assert results["device"].verdict is CheckStatus.PASSED
    assert not [one for one in results.values() if one.verdict is CheckStatus.FAILED]


def test_bfloat16_reaches_the_weights_and_the_answers_stay_near(folders):
    expected = load(folders["bert"]).embed(["The cat"])
    with pretended_gpu():
        task = load(folders["bert"], device="cuda", dtype="bfloat16")
        assert {parameter.dtype for parameter in task.model.parameters()} == {torch.bfloat16}
        vectors = task.embed(["The cat"]).float().cpu()
    assert float((vectors * expected).sum()) > 0.99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, r"--device cuda: this torch \(.+\) has no CUDA; --device cpu computes here"),
        ({"device": "gpu"}, "--device gpu: it is cpu, cuda or auto"),
        ({"device": "cuda", "int8": True}, "--int8 .* on a CPU alone, and --device cuda was asked for"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 is for a GPU"),
        ({"dtype": "float64"}, "--dtype float64: it is float32 or bfloat16"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_what_cannot_be_is_refused_before_anything_is_read(options, message):
    with pytest.raises(InputError, match=message):
        load("no-such-model", **options)


def test_auto_is_the_gpu_where_there_is_one(monkeypatch):
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_dtype("bfloat16", torch.device("cuda")) is torch.bfloat16


def test_int8_is_a_cpus_where_the_device_is_left_open(monkeypatch, folders):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert load(folders["gpt"], int8=True, device="auto").model.embedding.token.weight.device.type == "cpu"
