"""Folders of Marian, BART and T5 give the same ids, logits, beams and texts as in `transformers`."""

import json
import shutil

import pytest
import sentencepiece
import torch

import qkv
from qkv.config import BeamConfig
from qkv.errors import InputError, WeightsError
from qkv.text import load_tokenizer
from tests.weights.published_translators import ENGLISH, FOLDERS, SPANISH, t5, train_sentencepiece

TEXTS = [*SPANISH, "perro", "El   pan —  es de 日本, ½ y … ﬁn.", "xyzzy; (no)!"]
MAX_NEW = 19


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    created = {}

    def folder(name):
        if name not in created:
            folder_path = tmp_path_factory.mktemp("translator") / "model"
            created[name] = (folder_path, *FOLDERS[name](folder_path))
        return created[name]

    return folder


def encode_texts(theirs, texts):
    return [theirs(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_translates_like_transformers(folders, name):
    folder_path, model, theirs = folders(name)
    task = qkv.load(folder_path)
    inputs = [task.prefix + text for text in TEXTS]
    ids = encode_texts(theirs, inputs)
    for n_beams in (1, 4):
        translations = task.translate_batch(TEXTS, beam=BeamConfig(n_beams=n_beams), max_new=MAX_NEW)
        assert [translation.source_ids for translation in translations] == ids
        for translation, source in zip(translations, ids, strict=True):
            with torch.inference_mode():
                (expected,) = model.generate(
                    torch.tensor([source]), num_beams=n_beams, max_new_tokens=MAX_NEW, do_sample=False,
                    early_stopping=False, length_penalty=1.0,
                )  # fmt: skip
            expected = expected.tolist()[1:]
            assert translation.hypotheses[0].ids == expected
            assert translation.text == " ".join(theirs.decode(expected, skip_special_tokens=True).split())


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_those_of_transformers(folders, name):
    folder_path, model, theirs = folders(name)
    task = qkv.load(folder_path)
    source = torch.tensor([encode_texts(theirs, [SPANISH[0]])[0]])
    ids = torch.tensor([[task.decoder_start_id, 5, 7, 11]])
    with torch.inference_mode():
        expected = model(input_ids=source, decoder_input_ids=ids).logits
        assert (task.model(source, ids) - expected).abs().max() <= 1e-4


def test_language_codes_are_single_tokens_and_spelled_special_tokens_are_text(folders):
    folder_path, _, theirs = folders("marian, swish")
    tokenizer = load_tokenizer(folder_path / "source.spm")
    assert tokenizer.encode(">>en<< el pan") == encode_texts(theirs, [">>en<< el pan"])[0]
    assert tokenizer.id_to_token(tokenizer.encode(">>en<< el pan")[0]) == ">>en<<"
    spelled = tokenizer.encode("el</s>pan<pad>", add_special_tokens=False)
    assert not {"</s>", "<pad>"} & {tokenizer.id_to_token(number) for number in spelled}


def test_source_and_target_use_their_own_tokenizer_files(folders):
    folder_path, _, theirs = folders("marian, two vocabularies")
    target = load_tokenizer(folder_path / "target.spm")
    for text in ENGLISH:
        assert target.encode(text) == theirs(text_target=text)["input_ids"]
        assert target.decode(target.encode(text)) == text
    assert load_tokenizer(folder_path).fingerprint == target.fingerprint


@pytest.mark.parametrize("options", [{}, {"split_by_whitespace": False}, {"add_dummy_prefix": False},
                                     {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
                                     {"user_defined_symbols": ["pan", "<x>"]}, {"byte_fallback": True},
                                     {"normalization_rule_name": "nmt_nfkc_cf"}])  # fmt: skip
def test_ids_equal_those_of_sentencepiece(tmp_path, options):
    (tmp_path / "a.spm").write_bytes(train_sentencepiece(SPANISH, **{"vocab_size": 360, **options}))
    tokenizer = load_tokenizer(tmp_path / "a.spm")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a.spm"))
    for text in [*TEXTS, "", "a  b", "El pan<x>, 🙂"]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text), text
        without_unknown = [i for i in reference.encode(text) if not reference.is_unknown(i)]
        assert tokenizer.decode(without_unknown) == reference.decode(without_unknown)


def test_sentinels_of_t5_follow_the_vocabulary(tmp_path):
    model, theirs = t5(tmp_path / "model", shape={"d_model": 6, "d_kv": 3, "num_heads": 2, "d_ff": 5, "num_layers": 1},
                       tasks={})  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "model")
    n = len(theirs.processor)
    assert tokenizer.vocab_size == n + 7 == model.config.vocab_size
    assert [tokenizer.id_to_token(i) for i in (n, n + 6)] == ["<extra_id_6>", "<extra_id_0>"]


TASKS = {"translation_en_to_de": {"prefix": "al alemán: "}, "summarization": {"prefix": "corto: "}, "other": {"k": 1}}


def test_with_several_tasks_none_is_selected_by_default(tmp_path):
    shape = {"d_model": 6, "d_kv": 3, "num_heads": 2, "d_ff": 5, "num_layers": 1}
    t5(tmp_path / "model", shape=shape, tasks=TASKS)
    task = qkv.load(tmp_path / "model")
    assert task.prefix == ""
    (remark,) = task.remarks
    assert "(translation_en_to_de, summarization)" in remark
    chosen = task.with_task_prefix("translation_en_to_de")
    assert (chosen.prefix, task.with_task_prefix("di: ").prefix) == ("al alemán: ", "di: ")
    (remark,) = chosen.remarks
    assert "'al alemán: '" in remark
    (translation,) = chosen.translate_batch(["El pan"], max_new=3, attention=True)
    assert translation.source_ids == task.source_tokenizer.encode("al alemán: El pan")
    words = [word for word in translation.attention.source_word_ids if word is not None]
    assert sorted(set(words)) == [0, 1]
    assert chosen.translate_batch(["  "])[0].hypotheses[0].ids == []


def copy_with_change(folder_path, tmp_path, name, change):
    copy = tmp_path / "copy"
    shutil.copytree(folder_path, copy)
    file = copy / name
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    return copy


@pytest.mark.parametrize(
    ("name", "change", "remark"),
    [
        ("config.json", {"decoder_start_token_id": -3}, "decoder_start_token_id.*-3"),
        ("config.json", {"decoder_start_token_id": 9999}, "9999"),
        ("config.json", {"forced_bos_token_id": "no"}, "forced_bos_token_id.*'no'"),
        ("config.json", {"task_specific_params": [1]}, r"task_specific_params.*\[1\]"),
        ("generation_config.json", {"bad_words_ids": [[1, 2]]}, r"bad_words_ids.*\[1, 2\]"),
    ],
)
def test_invalid_generation_settings_are_rejected(folders, tmp_path, name, change, remark):
    folder_path = copy_with_change(folders("marian, swish")[0], tmp_path, name, lambda settings: {**settings, **change})
    if name == "config.json":
        (folder_path / "generation_config.json").unlink()
    with pytest.raises(WeightsError, match=remark):
        qkv.load(folder_path)


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        (lambda ids: {token: i + 1 for token, i in ids.items()}, r"\b0\b"),
        (lambda ids: {**ids, "x": "y"}, r"'x'.*'y'"),
        (lambda ids: {token: i for i, token in enumerate(p for p in ids if p != "</s>")}, "</s>"),
    ],
)
def test_an_invalid_vocabulary_is_rejected(folders, tmp_path, change, remark):
    folder_path = copy_with_change(folders("marian, swish")[0], tmp_path, "vocab.json", change)
    with pytest.raises(InputError, match=remark):
        load_tokenizer(folder_path)


@pytest.mark.parametrize(
    ("data", "remark"),
    [
        (b"", r"\b0\b"),
        (b"\x0a\x7fabc", r"\b127 bytes.*\b3\b"),
        (b"\x0b", "wire type 3"),
        (b"\x0a\x02\x08\x01", r"\b1\b"),
        (b"\xff" * 12, "64 bits"),
        (b"\x80", "SentencePiece"),
        (b"\x0a\x00", r"SentencePiece.*\b0\b"),
    ],
)
def test_an_invalid_sentencepiece_model_is_rejected(tmp_path, data, remark):
    (tmp_path / "a.spm").write_bytes(data)
    with pytest.raises(InputError, match=remark):
        load_tokenizer(tmp_path / "a.spm")


def test_a_bpe_model_is_rejected(tmp_path):
    (tmp_path / "a.spm").write_bytes(train_sentencepiece(SPANISH, model_type="bpe", vocab_size=60))
    with pytest.raises(InputError, match=r"a\.spm: .*model_type.*\b2\b"):
        load_tokenizer(tmp_path / "a.spm")
