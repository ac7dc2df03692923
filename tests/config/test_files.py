"""Configs survive saving and loading, and errors contain the file name."""

import pytest

from qkv.config import PRESETS, GPTConfig, config_from_dict, load_config, preset, save_config
from qkv.errors import ConfigError


@pytest.mark.parametrize("ending", [".toml", ".json"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_saving(name, ending, tmp_path):
    path = tmp_path / f"model{ending}"
    save_config(preset(name), path)
    loaded = load_config(path)
    assert loaded == preset(name)
    assert type(loaded) is type(preset(name))


@pytest.mark.parametrize("ending", [".toml", ".json"])
def test_none_and_non_default_values_survive_saving(ending, tmp_path):
    config = preset("gpt-nano", sliding_window=5, dropout=0.25, positions="alibi", norm_eps=1e-7, gated=True)
    for variant in (config, config.replace(sliding_window=None)):
        save_config(variant, tmp_path / f"model{ending}")
        assert load_config(tmp_path / f"model{ending}") == variant


def test_the_file_contains_derived_defaults(tmp_path):
    save_config(preset("gpt2"), tmp_path / "gpt2.toml")
    assert "d_ff = 3072" in (tmp_path / "gpt2.toml").read_text()


def test_a_path_may_be_a_string(tmp_path):
    save_config(preset("gpt-nano"), str(tmp_path / "a.json"))
    assert load_config(str(tmp_path / "a.json")) == preset("gpt-nano")


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


NANO = "vocab_size = 31\ncontext_length = 13\nd_model = 12\nn_heads = 3\n"


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        ("a.toml", NANO, r"a\.toml: family .*gpt, bert, seq2seq, rnn$"),
        ("a.toml", 'family = "gtp"\n', r"a\.toml: .*family 'gtp'.*'gpt'"),
        ("a.json", '{"family": 3}', r"a\.json: .*family 3\b.*gpt, bert, seq2seq, rnn$"),
        ("a.toml", NANO + 'family = "gpt"\n', r"a\.toml: gpt: n_layers "),
        ("a.toml", NANO + 'family = "gpt"\nn_layers = 1\nd_mode = 3\n', r"a\.toml: gpt: .*'d_mode'.*'d_model'"),
        ("a.toml", "family = ", r"a\.toml: .*TOML: "),
        ("a.json", "{", r"a\.json: .*JSON: "),
        ("a.json", "[" * 100_000, r"a\.json: .*JSON: "),
        ("a.json", "[1]", r"a\.json: .*\blist$"),
        ("a.yaml", "", r"a\.yaml: .*\.json .*\.toml.* '\.yaml'$"),
        ("a", "", r"a: .*\.json .*\.toml.* ''$"),
    ],
)
def test_the_error_for_an_invalid_file_contains_its_name(name, text, pattern, tmp_path):
    with pytest.raises(ConfigError, match=pattern) as error:
        load_config(write(tmp_path / name, text))
    assert "\n" not in str(error.value)


def test_unreadable_files_are_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: .*No such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.json: .*Is a directory"):
        load_config(tmp_path / "folder.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.json: .*JSON"):
        load_config(tmp_path / "binary.json")


def test_saving_with_another_suffix_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.txt: .*\.json .*\.toml.* '\.txt'"):
        save_config(preset("gpt-nano"), tmp_path / "a.txt")
    assert not (tmp_path / "a.txt").exists()


def test_a_dict_is_converted_to_the_config_of_its_family():
    settings = preset("gpt-nano").model_dump(mode="json")
    assert isinstance(config_from_dict(settings), GPTConfig)
    assert config_from_dict(settings) == preset("gpt-nano")


def test_the_error_for_a_failed_write_contains_the_path(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/config.json: .*No such file or directory"):
        save_config(preset("gpt-nano"), tmp_path / "nowhere" / "config.json")
