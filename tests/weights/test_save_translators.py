"""Translators that leave: for `transformers` where a published shape fits, as int8 with all that belongs to them."""

from dataclasses import replace

import pytest
import torch
import transformers as hf

import qkv
from qkv.config import BeamConfig, Seq2SeqConfig
from qkv.errors import ConfigError, InputError
from qkv.models import Seq2Seq
from qkv.tasks import load_pretrained
from qkv.weights.generation_config import GenerationConfig
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import save_hf, save_int8
from tests.tasks.small_translator import WORDS, small_translator
from tests.weights.published_translators import FOLDERS, SPANISH

SIZES = {"context_length": 41, "d_model": 12, "n_heads": 3, "n_encoder_layers": 2, "n_decoder_layers": 1}


def random_translator(**shape) -> ModelBundle:
    tokenizer = small_translator().tokenizer
    config = Seq2SeqConfig(vocab_size=tokenizer.vocab_size, init_std=0.3, **{**SIZES, **shape})
    return ModelBundle(Seq2Seq(config, seed=5).eval(), tokenizer)


def test_our_own_training_leaves_as_marian_and_transformers_translates_the_same(tmp_path):
    save_hf(random_translator(sinusoid="halves", activation="silu"), tmp_path / "out")
    model = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert isinstance(model, hf.MarianMTModel)
    task = qkv.load(tmp_path / "out")
    for text in (WORDS[0], " ".join(WORDS)):
        (ours,) = task.translate_batch([text], beam=BeamConfig(n_beams=3), max_new=11)
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            theirs = model.generate(ids, num_beams=3, max_new_tokens=11, do_sample=False, length_penalty=1.0)
        assert ids.tolist() == [ours.source_ids]
        assert theirs.tolist()[0][1:] == ours.hypotheses[0].ids


def test_what_a_translator_says_is_too_long_leaves_with_it(tmp_path):
    loaded = replace(random_translator(sinusoid="halves"), generation_config=GenerationConfig(max_joined=13))
    save_hf(loaded, tmp_path / "hf")
    save_int8(loaded, tmp_path / "int8")
    assert [qkv.load(tmp_path / name).generation_config.max_joined for name in ("hf", "int8")] == [13, 13]


@pytest.mark.parametrize(
    ("shape", "remark"),
    [
        ({}, "a published marian cannot have sinusoid=interleaved$"),
        (
            {"sinusoid": "halves", "norm": "rms", "gated": True},
            "a published marian cannot have gated=True, norm=rms$",
        ),
        (
            {"sinusoid": "halves", "share_embeddings": False, "d_patch": 7},
            "a published marian cannot have d_patch=7$",
        ),
    ],
)
def test_a_shape_that_marian_lacks_is_named(tmp_path, shape, remark):
    with pytest.raises(ConfigError, match=remark):
        save_hf(random_translator(**shape), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with two tokenizers, and one whose texts begin with a forced token."""
    places = {name: tmp_path_factory.mktemp("model") / "model" for name in ("marian, relu", "bart")}
    for name, place in places.items():
        FOLDERS[name](place)
    return places


@pytest.mark.parametrize("name", ["marian, relu", "bart"])
def test_a_published_folder_comes_back_as_it_was(published, name, tmp_path):
    before = qkv.load(published[name])
    save_hf(load_pretrained(published[name]), tmp_path / "hf")
    save_int8(load_pretrained(published[name]), tmp_path / "int8")
    expected = before.translate_batch(SPANISH, max_new=9)
    for place in (tmp_path / "hf", tmp_path / "int8"):
        after = qkv.load(place)
        assert after.generation_config == before.generation_config
        assert after.decoder_start_id == before.decoder_start_id
        found = after.translate_batch(SPANISH, max_new=9)
        assert [one.source_ids for one in found] == [one.source_ids for one in expected]
        if place.name == "hf":
            assert [one.text for one in found] == [one.text for one in expected]


def test_two_vocabularies_do_not_fit_into_one_folder_of_transformers(tmp_path):
    FOLDERS["marian, two vocabularies"](tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model")
    sizes = [one.vocab_size for one in (loaded.source_tokenizer, loaded.tokenizer)]
    with pytest.raises(InputError, match=rf"vocabularies of their own \({sizes[0]} and {sizes[1]} ids\)"):
        save_hf(loaded, tmp_path / "out")
    save_int8(loaded, tmp_path / "int8")
    back = load_pretrained(tmp_path / "int8")
    assert back.source_tokenizer.encode(SPANISH[0]) == loaded.source_tokenizer.encode(SPANISH[0])
