"""Translators can be saved for `transformers` if a published format supports them, and always as int8."""

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
from qkv.weights.save import save_hf, save_native_int8
from tests.tasks.small_translator import WORDS, small_translator
from tests.weights.published_translators import FOLDERS, SPANISH

SIZES = {"context_length": 41, "d_model": 12, "n_heads": 3, "n_encoder_layers": 2, "n_decoder_layers": 1}


def random_translator(**shape) -> ModelBundle:
    tokenizer = small_translator().tokenizer
    config = Seq2SeqConfig(vocab_size=tokenizer.vocab_size, init_std=0.3, **{**SIZES, **shape})
    return ModelBundle(Seq2Seq(config, seed=5).eval(), tokenizer)


def test_transformers_translates_our_model_as_marian(tmp_path):
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


def test_max_joined_is_saved(tmp_path):
    loaded = replace(random_translator(sinusoid="halves"), generation_config=GenerationConfig(max_joined=13))
    save_hf(loaded, tmp_path / "hf")
    save_native_int8(loaded, tmp_path / "int8")
    assert [qkv.load(tmp_path / name).generation_config.max_joined for name in ("hf", "int8")] == [13, 13]


@pytest.mark.parametrize(
    ("shape", "remark"),
    [
        ({}, "marian.*sinusoid=interleaved$"),
        (
            {"sinusoid": "halves", "norm": "rms", "gated": True},
            "marian.*gated=True, norm=rms$",
        ),
        (
            {"sinusoid": "halves", "share_embeddings": False, "d_patch": 7},
            "marian.*d_patch=7$",
        ),
    ],
)
def test_settings_that_marian_does_not_support_are_listed(tmp_path, shape, remark):
    with pytest.raises(ConfigError, match=remark):
        save_hf(random_translator(**shape), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with two tokenizers, and one whose outputs start with a forced token."""
    folders = {name: tmp_path_factory.mktemp("model") / "model" for name in ("marian, relu", "bart")}
    for name, folder in folders.items():
        FOLDERS[name](folder)
    return folders


@pytest.mark.parametrize("name", ["marian, relu", "bart"])
def test_a_published_folder_round_trips(published, name, tmp_path):
    before = qkv.load(published[name])
    save_hf(load_pretrained(published[name]), tmp_path / "hf")
    save_native_int8(load_pretrained(published[name]), tmp_path / "int8")
    expected = before.translate_batch(SPANISH, max_new=9)
    for folder in (tmp_path / "hf", tmp_path / "int8"):
        after = qkv.load(folder)
        assert after.generation_config == before.generation_config
        assert after.decoder_start_id == before.decoder_start_id
        translations = after.translate_batch(SPANISH, max_new=9)
        assert [translation.source_ids for translation in translations] == [
            translation.source_ids for translation in expected
        ]
        if folder.name == "hf":
            assert [translation.text for translation in translations] == [translation.text for translation in expected]


def test_two_vocabularies_cannot_be_saved_for_transformers(tmp_path):
    FOLDERS["marian, two vocabularies"](tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model")
    sizes = [tokenizer.vocab_size for tokenizer in (loaded.source_tokenizer, loaded.tokenizer)]
    with pytest.raises(InputError, match=rf"\b{sizes[0]}\b.*\b{sizes[1]}\b"):
        save_hf(loaded, tmp_path / "out")
    save_native_int8(loaded, tmp_path / "int8")
    back = load_pretrained(tmp_path / "int8")
    assert back.source_tokenizer.encode(SPANISH[0]) == loaded.source_tokenizer.encode(SPANISH[0])
