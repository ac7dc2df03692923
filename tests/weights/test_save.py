"""Folders saved by us and by `transformers` can be loaded by both, with the same results."""

import re

import pytest
import torch
import transformers as hf

from qkv.choices import SpecialToken
from qkv.errors import ConfigError, InputError
from qkv.models import build
from qkv.weights.checkpoint_folder import check_folder_matches_manifest, read_safetensors
from qkv.weights.model_loader import ModelBundle, load_model
from qkv.weights.save import StorageDType, save_hf
from tests.weights.loaded_models import SHAPES, assert_same_weights, random_model

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
PROMPT = "The cat sat 😀"


def assert_agree(ours, theirs):
    """Check that logits agree within 1e-4 and that 64 generated tokens are equal."""
    ids = torch.randint(ours.config.vocab_size, (3, 11), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert (ours(ids) - theirs(ids).logits).abs().max() <= 1e-4
        expected = theirs.generate(ids[:1], max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0)
    actual = ids[:1]
    with torch.no_grad():
        for _ in range(64):
            logits = ours(actual)[:, -1]
            logits[:, theirs.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens does
            actual = torch.cat([actual, logits.argmax(-1, keepdim=True)], 1)
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_loads_our_folder_and_computes_the_same(name, tmp_path):
    loaded = random_model(name)
    save_hf(loaded, tmp_path / "out")
    check_folder_matches_manifest(tmp_path / "out")
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_agree(loaded.model, theirs)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(PROMPT)["input_ids"] == loaded.tokenizer.encode(PROMPT)
    assert (
        tokenizer.eos_token_id == loaded.tokenizer.special_id(SpecialToken.EOS) == theirs.generation_config.eos_token_id
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_of_transformers_is_loaded_and_saved_without_changes(name, tmp_path):
    save_hf(random_model(name), tmp_path / "first")
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "first").eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = load_model(tmp_path / "theirs")
    assert_agree(ours.model, theirs)
    save_hf(ours, tmp_path / "again")
    once, again = (read_safetensors(tmp_path / folder / "model.safetensors") for folder in ("first", "again"))
    assert once.keys() == again.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in once.items())


@pytest.mark.parametrize("name", SHAPES)
def test_saving_and_loading_changes_no_weight(name, tmp_path):
    loaded = random_model(name)
    save_hf(loaded, tmp_path / "out")
    back = load_model(tmp_path / "out")
    assert_same_weights(loaded, back)
    assert back.model.config == loaded.model.config
    assert back.tokenizer.fingerprint == loaded.tokenizer.fingerprint


def test_float16_weights_are_stored_as_float16(tmp_path):
    save_hf(random_model("gpt2"), tmp_path / "out", dtype=StorageDType.F16)
    assert {t.dtype for t in read_safetensors(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}
    assert hf.AutoConfig.from_pretrained(tmp_path / "out").dtype is torch.float16


def test_float16_weights_are_loaded_as_float32_with_a_remark(tmp_path):
    save_hf(random_model("gpt2"), tmp_path / "out", dtype=StorageDType.F16)
    back = load_model(tmp_path / "out")
    assert {parameter.dtype for parameter in back.model.parameters()} == {torch.float32}
    (remark,) = back.remarks
    assert "float16" in remark
    assert "float32" in remark


def test_a_config_without_a_published_format_is_rejected_before_writing(tmp_path):
    model = build(SHAPES["gpt2"].replace(positions="alibi"))
    with pytest.raises(ConfigError, match=r"gpt2.*positions="):
        save_hf(ModelBundle(model, None), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(tmp_path):
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        save_hf(random_model("gpt2"), tmp_path)
