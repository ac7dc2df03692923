"""Configs on disk: what is written is what is read, and what cannot be read is refused by name."""

import pytest

from qkv.config import PRESETS, GPTConfig, config_from_dict, load_config, preset, save_config
from qkv.errors import ConfigError


@pytest.mark.parametrize("ending", [".toml", ".json"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_disk(name, ending, tmp_path):
    path = tmp_path / f"model{ending}"
    save_config(preset(name), path)
    loaded = load_config(path)
    assert loaded == preset(name)
    assert type(loaded) is type(preset(name))


@pytest.mark.parametrize("ending", [".toml", ".json"])
def test_a_setting_that_is_none_or_far_from_the_default_survives_too(ending, tmp_path):
    config = preset("gpt-nano", sliding_window=5, dropout=0.25, positions="alibi", norm_eps=1e-7, gated=True)
    for one in (config, config.replace(sliding_window=None)):
        save_config(one, tmp_path / f"model{ending}")
        assert load_config(tmp_path / f"model{ending}") == one


def test_the_file_holds_derived_settings_too(tmp_path):
    save_config(preset("gpt2"), tmp_path / "gpt2.toml")
    assert "d_ff = 3072" in (tmp_path / "gpt2.toml").read_text()


def test_a_path_may_be_text(tmp_path):
    save_config(preset("gpt-nano"), str(tmp_path / "a.json"))
    assert load_config(str(tmp_path / "a.json")) == preset("gpt-nano")


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


NANO = "vocab_size = 31\ncontext_length = 13\nd_model = 12\nn_heads = 3\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", NANO, r"a\.toml: family is missing; it is one of gpt, bert, seq2seq, rnn$"),
        ("a.toml", 'family = "gtp"\n', r"a\.toml: unknown family 'gtp'; .*; did you mean 'gpt'\?$"),
        ("a.json", '{"family": 3}', r"a\.json: unknown family 3; it is one of gpt, bert, seq2seq, rnn$"),
        ("a.toml", NANO + 'family = "gpt"\n', r"a\.toml: gpt: n_layers is missing$"),
        (
            "a.toml",
            NANO + 'family = "gpt"\nn_layers = 1\nd_mode = 3\n',
            r"a\.toml: gpt: unknown key 'd_mode'; did you mean 'd_model'\?$",
        ),
        ("a.toml", "family = ", r"a\.toml: not valid TOML: "),
        ("a.json", "{", r"a\.json: not valid JSON: "),
        ("a.json", "[" * 100_000, r"a\.json: not valid JSON: "),
        ("a.json", "[1]", r"a\.json: holds a list, not a table of settings$"),
        ("a.yaml", "", r"a\.yaml: a config ends in \.json or \.toml, not '\.yaml'$"),
        ("a", "", r"a: a config ends in \.json or \.toml, not ''$"),
    ],
)
def test_a_bad_file_is_refused_by_name(name, text, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(written(tmp_path / name, text))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.json: cannot be read: Is a directory"):
        load_config(tmp_path / "folder.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.json: not valid JSON"):
        load_config(tmp_path / "binary.json")


def test_saving_under_another_ending_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"a config ends in \.json or \.toml, not '\.txt'"):
        save_config(preset("gpt-nano"), tmp_path / "a.txt")
    assert not (tmp_path / "a.txt").exists()


def test_a_dict_becomes_the_config_of_its_family():
    settings = preset("gpt-nano").model_dump(mode="json")
    assert isinstance(config_from_dict(settings), GPTConfig)
    assert config_from_dict(settings) == preset("gpt-nano")


def test_a_config_that_cannot_be_written_says_where(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/config.json: cannot be written: No such file or directory"):
        save_config(preset("gpt-nano"), tmp_path / "nowhere" / "config.json")
