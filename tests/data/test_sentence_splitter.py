"""Sentence splitting and stores with sentence boundaries."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import TokenizerKind
from qkv.data import TokenStore
from qkv.data.documents import DocumentChunk
from qkv.data.sentence_splitter import split_sentences
from qkv.data.sentence_store import SENTENCES_FILE, SentenceStore, prepare_sentence_store
from qkv.data.token_store_writer import encode_chunks_with_sentence_ends
from qkv.errors import DiskError, InputError
from qkv.text import train_tokenizer
from tests.data.sentence_stores import N_DOCUMENTS, N_SENTENCES, document, sentence, small_store, store_of, tokenizer


@pytest.mark.parametrize(
    "sentences",
    [
        ["Mr. Smith met J. S. Bach at 5 p.m. in St. Louis.", "He left."],
        ['"What is it?" he said.', "“Nothing.”", "(So it was.)", "Then he went!"],
        ["It costs 3.50 dollars, e.g. in Ohio, etc. or so.", "So do I.", "Yes ... and no.", "Wait…", "No."],
        ["Who?!", "Me!!", "In 1990.", "2001 was later."],
        ["A title", "A text below it.", "Another"],
        ["これは文です。", "次の文。", "終わり"],
        ["no end here"],
    ],
)
def test_texts_are_split_into_sentences(sentences):
    between = "\n \n" if sentences[0] == "A title" else " "
    assert split_sentences(between.join(sentences)) == sentences


def test_japanese_sentences_are_split_without_spaces():
    assert split_sentences("これは文です。次の文！終わり") == ["これは文です。", "次の文！", "終わり"]


@given(st.text(alphabet="aB .!?\n\"')1。", max_size=60))
def test_splitting_only_removes_whitespace(text):
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in sentences)


def test_a_separator_follows_each_sentence(tmp_path):
    store = small_store(tmp_path)
    ids = store.store.document(3)
    ends = np.flatnonzero(ids == store.store.end_id)
    assert len(ends) == N_SENTENCES
    assert ends[-1] == len(ids) - 1
    assert ids[: ends[0]].tolist() == tokenizer().encode(sentence(3, 0), add_special_tokens=False)


def test_there_is_no_separator_between_the_chunks_of_a_document():
    chunks = [
        DocumentChunk("One two. Three", is_last=False),
        DocumentChunk(" four. Five.", is_last=True),
        DocumentChunk("\u200d", is_last=True),
    ]
    wordpiece = train_tokenizer(TokenizerKind.WORDPIECE, ["one two three four five ."], vocab_size=67, lowercase=True)
    encoded = encode_chunks_with_sentence_ends(wordpiece, chunks, end_id=3, dtype="uint16")
    rows = [wordpiece.encode(text, add_special_tokens=False) for text in ("One two.", "Three four.", "Five.")]
    assert encoded.tokens.tolist()[: sum(map(len, rows)) + 3] == [n for row in rows for n in (*row, 3)]
    assert sum(encoded.lengths) == len(encoded.tokens)


def test_positions_only_count_text_tokens(tmp_path):
    store = small_store(tmp_path)
    ids = store.store.read(0, store.store.n_tokens)
    text_ids = ids[ids != store.store.end_id]
    assert store.n_text_tokens == len(text_ids)
    assert len(store.boundaries) == N_DOCUMENTS * N_SENTENCES + 1
    starts, lengths = np.array([0, 17, store.n_text_tokens - 5]), np.array([41, 1, 5])
    expected = np.concatenate([text_ids[s : s + n] for s, n in zip(starts, lengths, strict=True)])
    assert store.read_spans_without_separators(starts, lengths).tolist() == expected.tolist()
    first, end = store.clipped_document_spans(np.array([7]))
    text = tokenizer().decode(store.read_spans_without_separators(first, end - first).tolist())
    assert text.replace(" ", "") == document(7).lower().replace(" ", "")
    assert store.document_at(np.array([first[0] - 1, first[0], end[0] - 1, end[0]])).tolist() == [6, 7, 7, 8]


def test_several_shards_are_equivalent_to_one(tmp_path):
    single = small_store(tmp_path / "single")
    (tmp_path / "many").mkdir()
    from qkv.data import prepare_store

    paths = []
    for half in (0, 1):  # two files, because a small file is never split into several shards
        paths.append(tmp_path / f"{half}.txt")
        texts = [document(number) for number in range(N_DOCUMENTS) if (number >= 11) == bool(half)]
        paths[-1].write_text("\n<|endoftext|>\n".join(texts))
    prepare_store(paths, tmp_path / "many", tokenizer=tokenizer(), sentences=True, shard_tokens=1)
    many = prepare_sentence_store(paths, tmp_path / "many", tokenizer=tokenizer())
    assert len(many.store.index.shards) == 2
    assert (many.boundaries == single.boundaries).all()
    starts = np.arange(0, single.n_text_tokens - 40, 31)
    lengths = np.full(len(starts), 37)
    assert (
        many.read_spans_without_separators(starts, lengths) == single.read_spans_without_separators(starts, lengths)
    ).all()


def test_a_store_is_split_between_documents(tmp_path):
    store = small_store(tmp_path)
    train, validation = store.split(0.1)
    assert train.document_range == range(26)
    assert validation.document_range == range(26, 29)
    assert train.stop == validation.start
    assert train.n_text_tokens + validation.n_text_tokens == store.n_text_tokens
    assert store.split(0.999)[0].document_range == range(2)
    assert store.split(0.001)[1].document_range == range(27, 29)


def test_a_store_of_few_documents_is_split_between_sentences(tmp_path):
    store = store_of(tmp_path, [document(1)])
    train, validation = store.split(0.2)
    assert train.document_range == validation.document_range == range(1)
    assert validation.start in store.boundaries
    assert validation.n_text_tokens == pytest.approx(0.2 * store.n_text_tokens, abs=9)
    assert [span.tolist() for span in train.clipped_document_spans(np.array([0]))] == [[0], [train.stop]]
    with pytest.raises(InputError, match=r"\b50%"):
        store_of(tmp_path / "one", ["word"]).split(0.5)


def test_an_interrupted_preparation_is_resumed(tmp_path, monkeypatch):
    expected = small_store(tmp_path / "expected")
    for n_syncs in (3, 5, 7, 9):
        n_left, real_fsync = n_syncs, os.fsync

        def fsync(handle, real_fsync=real_fsync):
            nonlocal n_left
            n_left -= 1
            if n_left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            real_fsync(handle)

        folder = tmp_path / str(n_syncs)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(DiskError, match="No space left"):
                small_store(folder)
        resumed = prepare_sentence_store([folder / "text.txt"], folder / "store", tokenizer=tokenizer())
        assert (resumed.boundaries == expected.boundaries).all()
        assert (resumed.store.read(0, 999) == expected.store.read(0, 999)).all()


def test_missing_or_mismatched_boundaries_are_errors(tmp_path):
    store = small_store(tmp_path)
    path = tmp_path / "store" / SENTENCES_FILE
    table = path.read_bytes()
    path.write_bytes(table[:-8])
    with pytest.raises(InputError, match=rf"{SENTENCES_FILE}: .*\b{store.store.n_tokens} tokens"):
        SentenceStore.open(tmp_path / "store")
    path.unlink()
    with pytest.raises(InputError, match=rf"store: .*{SENTENCES_FILE}"):
        SentenceStore.open(tmp_path / "store")
    assert TokenStore.open(tmp_path / "store").n_tokens == store.store.n_tokens
    assert store_of(tmp_path, [document(n) for n in range(N_DOCUMENTS)]).n_text_tokens == store.n_text_tokens
