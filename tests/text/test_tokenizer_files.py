"""Tokenizers survive saving and loading, and invalid files raise a one-line error."""

import json

import pytest
from transformers import AutoTokenizer

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.errors import DiskError, InputError
from qkv.text import load_tokenizer, save_tokenizer
from tests.text.samples import TEXTS, published, trained

KINDS = list(TokenizerKind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", list(SpecialTokenStyle))
def test_a_tokenizer_survives_saving(kind, style, tmp_path):
    tokenizer = trained(kind, style)
    save_tokenizer(tokenizer, tmp_path / "new")
    for path in (tmp_path / "new", tmp_path / "new" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.special_tokens == tokenizer.special_tokens
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.encode_batch(TEXTS[:4]) == tokenizer.encode_batch(TEXTS[:4])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_can_load_the_saved_folder(kind, tmp_path):
    tokenizer = trained(kind, SpecialTokenStyle.BERT)
    save_tokenizer(tokenizer, tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:4]:
        assert hf_tokenizer(text)["input_ids"] == tokenizer.encode(text)
    assert hf_tokenizer.mask_token_id == tokenizer.special_id(SpecialToken.MASK)
    assert hf_tokenizer.pad_token_id == tokenizer.special_id(SpecialToken.PAD)


def test_roles_default_to_common_spellings_without_a_tokenizer_config(tmp_path):
    save_tokenizer(trained(TokenizerKind.UNIGRAM), tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).special_tokens == trained(TokenizerKind.UNIGRAM).special_tokens


def test_a_special_token_may_be_a_json_object(tmp_path):
    save_tokenizer(trained(TokenizerKind.BPE), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load_tokenizer(tmp_path).special_tokens == {SpecialToken.EOS: "<|endoftext|>"}


def test_truncation_settings_of_a_file_are_ignored(tmp_path):
    save_tokenizer(trained(TokenizerKind.BPE), tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert len(load_tokenizer(tmp_path).encode(TEXTS[0])) > 3


@pytest.mark.parametrize("name", ["gpt2-vocab.json", "gpt2-merges.txt"])
def test_the_published_gpt2_files(name):
    tokenizer = load_tokenizer(published(name))
    assert tokenizer.vocab_size == 50257
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.special_id(SpecialToken.EOS) == 50256
    assert 50256 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.encode("<|endoftext|>", parse_special_tokens=True) == [50256]


def test_the_published_bert_vocabulary():
    tokenizer = load_tokenizer(published("bert-base-uncased-vocab.txt"))
    assert tokenizer.vocab_size == 30522
    assert tokenizer.encode("Hello, World!") == [101, 7592, 1010, 2088, 999, 102]
    assert tokenizer.encode_pair("Hello", "World").segments == [0, 0, 0, 1, 1]
    assert tokenizer.encode("a [MASK]", parse_special_tokens=True)[-2] == tokenizer.special_id(SpecialToken.MASK) == 103
    assert tokenizer.decode([7592, 1010, 2088]) == "hello, world"


@pytest.mark.parametrize(("settings", "cased"), [(None, True), ('{"do_lower_case": true}', False)])
def test_a_vocabulary_with_capitals_is_cased_unless_configured_otherwise(settings, cased, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Cat", "cat", "é"]
    (tmp_path / "vocab.txt").write_text("\r\n".join(words), newline="")
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Cat cat é", add_special_tokens=False) == ([5, 6, 7] if cased else [6, 6, 1])
    assert tokenizer.special_id(SpecialToken.MASK) == 4


INVALID = {
    "empty": ("tokenizer.json", "", "JSON"),
    "list": ("tokenizer.json", "[1]", r"\blist\b"),
    "no model": ("tokenizer.json", "{}", "'model'"),
    "unknown model": ("tokenizer.json", '{"model": {"type": "Magic"}}', "tokenizer.json: "),
    "deep": ("tokenizer.json", "[" * 100_000, "JSON"),
    "negative id": ("tokenizer.json", '{"model": {"vocab": {"a": -1}}}', "id -1"),
    "huge id": ("tokenizer.json", '{"model": {"vocab": {"a": 4000000000}}}', "4000000000.* 16777215"),
    "merge of nothing": (
        "tokenizer.json",
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        "tokenizer.json: ",
    ),
    "fails in use": (
        "tokenizer.json",
        '{"model": {"type": "Unigram", "vocab": [["x", 0.0]], "unk_id": null}}',
        "tokenizer.json: .*unknown token",
    ),
    "no merges": ("vocab.json", "{}", "merges.txt: "),
    "no special tokens": ("vocab.txt", "cat\ndog", r"\[UNK\] \[CLS\] \[SEP\]"),
}


@pytest.mark.parametrize(("name", "content", "pattern"), INVALID.values(), ids=INVALID.keys())
def test_the_error_for_an_invalid_file_is_one_line_with_its_path(name, content, pattern, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=pattern) as error:
        load_tokenizer(tmp_path / name)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_with_an_unknown_token_is_an_error_instead_of_a_rust_panic(tmp_path, capfd):
    save_tokenizer(trained(TokenizerKind.BPE, SpecialTokenStyle.BERT), tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    del state["post_processor"]["special_tokens"]["[SEP]"]
    for processor in (state["post_processor"], {"type": "Sequence", "processors": [state["post_processor"]]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**state, "post_processor": processor}))
        with pytest.raises(InputError, match=r"'\[SEP\]' .*post_processor\.special_tokens"):
            load_tokenizer(tmp_path)
    assert capfd.readouterr().err == ""


def test_invalid_utf8_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b'{"a\xff')
    with pytest.raises(InputError, match=r"tokenizer\.json: .*UTF-8.*byte 3"):
        load_tokenizer(tmp_path)


def test_the_error_for_a_missing_special_token_contains_the_file_name(tmp_path):
    save_tokenizer(trained(TokenizerKind.BPE), tmp_path)
    with pytest.raises(InputError, match=r"/tokenizer\.json .*mask_token.*bos_token, eos_token"):
        load_tokenizer(tmp_path).special_id(SpecialToken.MASK)


def test_a_missing_tokenizer_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.json: .*No such file"):
        load_tokenizer(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match=r"tokenizer\.json.*vocab\.txt"):
        load_tokenizer(tmp_path)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="file/new: "):
        save_tokenizer(trained(TokenizerKind.BPE), tmp_path / "file" / "new")
