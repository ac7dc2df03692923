"""Recipes are loaded, overridden and saved, and errors contain the file name."""

import pytest

from qkv.config import Recipe, load_recipe
from qkv.errors import ConfigError
from tests.training.runs import recipe


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.toml").write_text(recipe().to_toml())
    return tmp_path / "a.toml"


def test_a_recipe_survives_saving(path):
    assert load_recipe(path) == recipe()


def test_overrides_use_dotted_names(path):
    changed = load_recipe(
        path, ("training.steps=7", "model.norm=rms", "data.train=['b.txt']", "training.max_grad_norm=0.5")
    )
    assert changed.training.steps == 7
    assert changed.model["norm"] == "rms"
    assert changed.data.train == ("b.txt",)
    assert changed.training.max_grad_norm == 0.5


@pytest.mark.parametrize(
    ("override", "pattern"),
    [
        ("training.step=7", "training: .*'step'.*'steps'"),
        ("trainin.steps=7", "'trainin'.*'training'"),
        ("model.n_layer=7", "'n_layer'.*'n_layers'"),
        ("training.seq_len=99", r"training\.seq_len=99 .*model\.context_length=13"),
        ("model.vocab_size=9", r"model\.vocab_size .*tokenizer\.vocab_size"),
        ("data.validation=['c.txt']", "data: validation .*validation_fraction"),
        ("data.train=[]", "train"),
        ("training.steps.more=1", r"'training\.steps\.more=1': steps "),
        ("pairs.join_fraction=0.1", "pairs .*'seq2seq' .*'rnn'.*family='gpt'"),
        ("training.label_smoothing=0.1", r"training\.label_smoothing=0\.1 .*'seq2seq' .*'rnn'.*family='gpt'"),
        ("steps", r"'steps'.*training\.steps=200"),
        ("family=lstm", "family='lstm'"),
    ],
)
def test_the_error_for_an_invalid_override_is_one_line_with_a_hint(path, override, pattern):
    with pytest.raises(ConfigError, match=pattern) as error:
        load_recipe(path, (override,))
    assert "\n" not in str(error.value)


def test_cross_documents_can_only_be_disabled_for_gpt(path):
    with pytest.raises(ConfigError, match=r"training\.cross_documents=false .*'gpt'.*family='bert'"):
        load_recipe(path, ("family=bert", "training.cross_documents=false"))


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"family = ", r"a\.toml: .*TOML: "),
        (b"\xff\xfe", r"a\.toml: .*TOML: "),
        (b"a = " + b"[" * 5000, r"a\.toml: .*TOML: "),
        (b"", r"a\.toml: family "),
    ],
)
def test_the_error_for_an_invalid_recipe_contains_the_file_name(path, content, pattern):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=pattern):
        load_recipe(path)


def test_a_missing_recipe_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"b\.toml: .*No such file or directory"):
        load_recipe(tmp_path / "b.toml")


def test_a_saved_recipe_contains_all_settings():
    toml = recipe().to_toml()
    assert "micro_batch_size = 2" in toml
    assert "weight_decay = 0.1" in toml
    assert isinstance(recipe(), Recipe)
