"""Tokenizers come back from disk as they went, and bad files are refused in a line."""

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
def test_saved_and_loaded_is_the_same(kind, style, tmp_path):
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
def test_transformers_reads_the_saved_folder(kind, tmp_path):
    tokenizer = trained(kind, SpecialTokenStyle.BERT)
    save_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:4]:
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.mask_token_id == tokenizer.special_id(SpecialToken.MASK)
    assert theirs.pad_token_id == tokenizer.special_id(SpecialToken.PAD)


def test_roles_are_known_by_their_spelling_where_no_file_says_them(tmp_path):
    save_tokenizer(trained(TokenizerKind.UNIGRAM), tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).special_tokens == trained(TokenizerKind.UNIGRAM).special_tokens


def test_a_role_may_be_written_as_an_object(tmp_path):
    save_tokenizer(trained(TokenizerKind.BPE), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load_tokenizer(tmp_path).special_tokens == {SpecialToken.EOS: "<|endoftext|>"}


def test_truncation_in_a_file_cuts_nothing(tmp_path):
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
def test_gpt2s_own_files(name):
    tokenizer = load_tokenizer(published(name))
    assert tokenizer.vocab_size == 50257
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.special_id(SpecialToken.EOS) == 50256
    assert 50256 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.encode("<|endoftext|>", parse_special_tokens=True) == [50256]


def test_berts_own_file():
    tokenizer = load_tokenizer(published("bert-base-uncased-vocab.txt"))
    assert tokenizer.vocab_size == 30522
    assert tokenizer.encode("Hello, World!") == [101, 7592, 1010, 2088, 999, 102]
    assert tokenizer.encode_pair("Hello", "World").segments == [0, 0, 0, 1, 1]
    assert tokenizer.encode("a [MASK]", parse_special_tokens=True)[-2] == tokenizer.special_id(SpecialToken.MASK) == 103
    assert tokenizer.decode([7592, 1010, 2088]) == "hello, world"


@pytest.mark.parametrize(("settings", "cased"), [(None, True), ('{"do_lower_case": true}', False)])
def test_a_cased_vocabulary_is_known_by_its_capitals_unless_told(settings, cased, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Cat", "cat", "é"]
    (tmp_path / "vocab.txt").write_text("\r\n".join(words), newline="")
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Cat cat é", add_special_tokens=False) == ([5, 6, 7] if cased else [6, 6, 1])
    assert tokenizer.special_id(SpecialToken.MASK) == 4


BAD = {
    "empty": ("tokenizer.json", "", "not valid JSON"),
    "list": ("tokenizer.json", "[1]", "holds a list, not an object"),
    "no model": ("tokenizer.json", "{}", "has no field 'model'"),
    "unknown model": ("tokenizer.json", '{"model": {"type": "Magic"}}', "tokenizer.json: "),
    "deep": ("tokenizer.json", "[" * 100_000, "not valid JSON"),
    "negative id": ("tokenizer.json", '{"model": {"vocab": {"a": -1}}}', "the id -1"),
    "huge id": ("tokenizer.json", '{"model": {"vocab": {"a": 4000000000}}}', "ids go from 0 to 16777215"),
    "merge of nothing": (
        "tokenizer.json",
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        "tokenizer.json: ",
    ),
    "fails at work": (
        "tokenizer.json",
        '{"model": {"type": "Unigram", "vocab": [["x", 0.0]], "unk_id": null}}',
        "tokenizer.json: the pair cannot be encoded: .*unknown token",
    ),
    "no merges": ("vocab.json", "{}", "merges.txt: not found"),
    "no specials": ("vocab.txt", "cat\ndog", r"has no \[UNK\] \[CLS\] \[SEP\]"),
}


@pytest.mark.parametrize(("name", "content", "line"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_in_a_line_that_names_it(name, content, line, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=line) as refusal:
        load_tokenizer(tmp_path / name)
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_template_that_names_an_unknown_token_is_refused_before_rust_panics(tmp_path, capfd):
    save_tokenizer(trained(TokenizerKind.BPE, SpecialTokenStyle.BERT), tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    del state["post_processor"]["special_tokens"]["[SEP]"]
    for processor in (state["post_processor"], {"type": "Sequence", "processors": [state["post_processor"]]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**state, "post_processor": processor}))
        with pytest.raises(InputError, match=r"special_tokens has no '\[SEP\]', which its template names"):
            load_tokenizer(tmp_path)
    assert capfd.readouterr().err == ""


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b'{"a\xff')
    with pytest.raises(InputError, match="not UTF-8 at byte 3"):
        load_tokenizer(tmp_path)


def test_a_role_that_a_file_does_not_have_is_refused_by_the_files_name(tmp_path):
    save_tokenizer(trained(TokenizerKind.BPE), tmp_path)
    with pytest.raises(InputError, match=r"/tokenizer\.json has no mask_token \(it has: bos_token, eos_token\)"):
        load_tokenizer(tmp_path).special_id(SpecialToken.MASK)


def test_nothing_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_tokenizer(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be written"):
        save_tokenizer(trained(TokenizerKind.BPE), tmp_path / "file" / "new")
