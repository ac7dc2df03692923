"""Recipes: read, changed from the command line, written, and refused with their file's name."""

import pytest

from qkv.config import Recipe, load_recipe
from qkv.errors import ConfigError
from tests.training.runs import recipe


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.toml").write_text(recipe().to_toml())
    return tmp_path / "a.toml"


def test_a_recipe_comes_back_from_its_own_file(path):
    assert load_recipe(path) == recipe()


def test_settings_are_changed_by_their_dotted_names(path):
    changed = load_recipe(
        path, ("training.steps=7", "model.norm=rms", "data.train=['b.txt']", "training.max_grad_norm=0.5")
    )
    assert changed.training.steps == 7
    assert changed.model["norm"] == "rms"
    assert changed.data.train == ("b.txt",)
    assert changed.training.max_grad_norm == 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.step=7", "training: unknown key 'step'; did you mean 'steps'?"),
        ("trainin.steps=7", "unknown key 'trainin'; did you mean 'training'?"),
        ("model.n_layer=7", "unknown key 'n_layer'; did you mean 'n_layers'?"),
        ("training.seq_len=99", "training.seq_len=99 must not be more than model.context_length=13"),
        ("model.vocab_size=9", "model.vocab_size is the tokenizer's: set tokenizer.vocab_size"),
        ("data.validation=['c.txt']", "data: validation files and validation_fraction were both given; choose one"),
        ("data.train=[]", "train"),
        ("training.steps.more=1", "'training.steps.more=1': steps is a value, not a table of settings"),
        ("pairs.join_fraction=0.1", "pairs: is for translation (seq2seq, rnn), and family='gpt'"),
        ("training.label_smoothing=0.1", "training.label_smoothing=0.1 is for translation (seq2seq, rnn)"),
        ("steps", "'steps' is no setting; write name=value, such as training.steps=200"),
        ("family=lstm", "family='lstm'"),
    ],
)
def test_a_wrong_setting_is_one_line_with_what_was_meant(path, override, message):
    with pytest.raises(ConfigError) as refused:
        load_recipe(path, (override,))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_documents_are_kept_apart_in_windows_alone(path):
    with pytest.raises(ConfigError, match="cross_documents=false is for gpt, and family='bert'"):
        load_recipe(path, ("family=bert", "training.cross_documents=false"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"family = ", r"a\.toml: not valid TOML: "),
        (b"\xff\xfe", r"a\.toml: not valid TOML: "),
        (b"a = " + b"[" * 5000, r"a\.toml: not valid TOML: "),
        (b"", r"a\.toml: family is missing"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_its_name(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


def test_a_missing_recipe_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"b\.toml: cannot be read: No such file or directory"):
        load_recipe(tmp_path / "b.toml")


def test_nothing_is_left_out_of_the_written_recipe():
    written = recipe().to_toml()
    assert "micro_batch_size = 2" in written
    assert "weight_decay = 0.1" in written
    assert isinstance(recipe(), Recipe)
