"""`qkv convert`: formats, data types and errors."""

import pytest

from qkv.tasks import load_pretrained
from qkv.weights.save import save_hf
from tests.cli.answers import assert_only_error
from tests.tasks.small_translator import save_translator, small_translator
from tests.weights.loaded_models import assert_same_weights, random_model
from tests.weights.small_berts import random_bert


@pytest.fixture
def model(tmp_path):
    save_hf(random_model("llama, group size 2"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("to", "options"), [("hf", []), ("gguf", ["--dtype", "f32"])])
def test_a_converted_model_has_the_same_weights(command, model, to, options, tmp_path):
    answer = command("convert", model, tmp_path / "out", "--to", to, *options)
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith(f"{tmp_path / 'out'}: ")
    assert_same_weights(load_pretrained(model), load_pretrained(tmp_path / "out"))


def test_class_names_are_kept_and_a_missing_head_is_reported(command, tmp_path):
    names = ("bad", "so-so", "good")
    save_hf(random_bert(class_names=names, masked_lm_head=True), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("BertForSequenceClassification", "BertForNextSentencePrediction"))
    answer = command("convert", tmp_path / "model", tmp_path / "out", "--to", "hf")
    assert answer.status == 0
    assert answer.err.startswith(f"qkv: {tmp_path / 'model'}: ")
    assert "cls.seq_rel" in answer.err
    assert answer.err.count("\n") == answer.out.count("\n") == 1
    assert load_pretrained(tmp_path / "out").model.config.class_names == names
    assert load_pretrained(tmp_path / "out").remarks == ()


@pytest.mark.parametrize(
    ("to", "options"), [("int8", []), ("gguf", []), ("gguf", ["--dtype", "q8_0"]), ("hf", ["--dtype", "f16"])]
)
def test_a_quantized_model_has_nearly_the_same_weights(command, model, to, options, tmp_path):
    assert command("convert", model, tmp_path / "out", "--to", to, *options).status == 0
    before, after = load_pretrained(model).model, load_pretrained(tmp_path / "out").model
    for name, parameter in before.named_parameters():
        assert (after.get_parameter(name) - parameter).abs().max() <= parameter.abs().max() / 127


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--to", "int8", "--dtype", "f16"], ["--dtype f16", "--to int8"]),
        (["--to", "hf", "--dtype", "q8_0"], ["--to hf", "q8_0", "f32", "f16"]),
        (["--to", "pickle"], ["'pickle'"]),
        ([], ["'--to'"]),
    ],
)
def test_invalid_options_are_rejected(command, model, options, parts, tmp_path):
    answer = command("convert", model, tmp_path / "out", *options)
    assert answer.status == 2
    assert all(part in answer.err for part in parts)
    assert not (tmp_path / "out").exists()


def test_existing_files_are_not_overwritten(command, model):
    assert_only_error(command("convert", model, model, "--to", "hf"), f"{model}: ")


def test_only_translators_are_converted_to_ctranslate2(command, model, tmp_path):
    folder = save_translator(small_translator(), tmp_path / "translator")
    answer = command("convert", folder, tmp_path / "ct2", "--to", "ct2")
    assert (answer.status, answer.err) == (0, "")
    assert (tmp_path / "ct2" / "model.bin").is_file()
    assert_only_error(command("convert", model, tmp_path / "out", "--to", "ct2"), "--to ct2", "gpt")
    assert_only_error(
        command("convert", folder, tmp_path / "out", "--to", "ct2", "--dtype", "q8_0"), "--to ct2", "q8_0"
    )
