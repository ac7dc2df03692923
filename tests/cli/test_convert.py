"""`qkv convert`: a model in another format, and mistakes in a line."""

import pytest

from qkv.tasks import load_pretrained
from qkv.weights.save import save_hf
from tests.tasks.small_translator import saved, small_translator
from tests.weights.encoders import random_bert
from tests.weights.loaded_models import assert_same_weights, random_model


@pytest.fixture
def model(tmp_path):
    save_hf(random_model("llama, 2 queries a key"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("to", "options"), [("hf", []), ("gguf", ["--numbers", "f32"])])
def test_a_model_comes_back_as_it_was(command, model, to, options, tmp_path):
    answer = command("convert", model, tmp_path / "out", "--to", to, *options)
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith(f"{tmp_path / 'out'}: ")
    assert_same_weights(load_pretrained(model), load_pretrained(tmp_path / "out"))


def test_a_classifier_takes_its_class_names_along_and_a_missing_head_is_said(command, tmp_path):
    names = ("bad", "so-so", "good")
    save_hf(random_bert(class_names=names, masked_lm_head=True), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("BertForSequenceClassification", "BertForNextSentencePrediction"))
    answer = command("convert", tmp_path / "model", tmp_path / "out", "--to", "hf")
    assert answer.status == 0
    assert answer.err.startswith(f"qkv: {tmp_path / 'model'}: the weights hold no next-sentence head (cls.seq_rel")
    assert answer.err.count("\n") == answer.out.count("\n") == 1
    assert load_pretrained(tmp_path / "out").model.config.class_names == names
    assert load_pretrained(tmp_path / "out").remarks == ()


@pytest.mark.parametrize(
    ("to", "options"), [("int8", []), ("gguf", []), ("gguf", ["--numbers", "q8_0"]), ("hf", ["--numbers", "f16"])]
)
def test_a_smaller_model_comes_back_near(command, model, to, options, tmp_path):
    assert command("convert", model, tmp_path / "out", "--to", to, *options).status == 0
    before, after = load_pretrained(model).model, load_pretrained(tmp_path / "out").model
    for name, parameter in before.named_parameters():
        assert (after.get_parameter(name) - parameter).abs().max() <= parameter.abs().max() / 127


@pytest.mark.parametrize(
    ("options", "remark"),
    [
        (["--to", "int8", "--numbers", "f16"], "leave out --numbers f16"),
        (["--to", "hf", "--numbers", "q8_0"], "--to hf stores f32 or f16, not q8_0"),
        (["--to", "pickle"], "'pickle' is not one of"),
        ([], "Missing option '--to'"),
    ],
)
def test_what_cannot_be_asked_is_status_2(command, model, options, remark, tmp_path):
    answer = command("convert", model, tmp_path / "out", *options)
    assert answer.status == 2
    assert remark in answer.err
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(command, model):
    answer = command("convert", model, model, "--to", "hf")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == f"qkv: error: {model}: is there already; name a new one\n"


def test_a_translator_leaves_for_ctranslate2_and_other_models_do_not(command, model, tmp_path):
    folder = saved(small_translator(), tmp_path / "translator")
    answer = command("convert", folder, tmp_path / "ct2", "--to", "ct2")
    assert (answer.status, answer.err) == (0, "")
    assert (tmp_path / "ct2" / "model.bin").is_file()
    answer = command("convert", model, tmp_path / "out", "--to", "ct2")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == "qkv: error: --to ct2 takes encoder–decoder Transformers, not a gpt\n"
    assert (
        "--to ct2 stores f32 or f16, not q8_0"
        in command("convert", folder, tmp_path / "out", "--to", "ct2", "--numbers", "q8_0").err
    )
