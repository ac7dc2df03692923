"""What was written is read, and what was changed is noticed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.data import TokenStore
from qkv.errors import InputError
from tests.data.stores import TEXTS, small_store, tokenizer


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Several shards, with documents across their borders."""
    return small_store(tmp_path_factory.mktemp("store"), shard_tokens=50)


@pytest.fixture(scope="module")
def expected():
    end = tokenizer().backend.token_to_id("<|endoftext|>")
    return [[*tokenizer().encode(text), end] for text in TEXTS]


def test_the_store_holds_the_documents_in_order(store, expected):
    assert store.n_documents == len(TEXTS)
    assert [store.document(n).tolist() for n in range(store.n_documents)] == expected
    assert store.read(0, store.n_tokens).tolist() == [number for ids in expected for number in ids]
    assert store.n_tokens == sum(map(len, expected))


def test_bytes_are_counted_for_bits_a_byte(store):
    assert store.document_bytes().tolist() == [len(text.encode()) for text in TEXTS]
    assert store.n_bytes == sum(len(text.encode()) for text in TEXTS)


def test_every_token_knows_its_document(store, expected):
    numbers = np.repeat(np.arange(len(expected)), [len(ids) for ids in expected])
    assert np.array_equal(store.document_ids(0, store.n_tokens), numbers)


@given(data=st.data())
def test_a_range_is_a_slice_of_the_whole(store, data):
    start = data.draw(st.integers(0, store.n_tokens))
    stop = data.draw(st.integers(start, store.n_tokens))
    for read in (store.read, store.document_ids):
        assert np.array_equal(read(start, stop), read(0, store.n_tokens)[start:stop])


def test_a_part_is_a_store_of_its_own(store):
    part = store.slice(31, 307)
    assert part.n_tokens == 276
    assert np.array_equal(part.read(3, 200), store.read(34, 231))
    documents = part.document_ids(0, 276)
    assert documents[0] == 0
    assert documents[-1] == part.n_documents - 1
    assert part.end_id == store.end_id


def test_the_store_has_its_tokenizer(store):
    assert store.tokenizer().fingerprint == tokenizer().fingerprint
    assert store.vocab_size == tokenizer().vocab_size


def test_ranges_outside_are_refused_with_both_numbers(store):
    n = store.n_tokens
    with pytest.raises(InputError, match=f"tokens 0 to {n + 1} of a store with {n}"):
        store.read(0, n + 1)
    with pytest.raises(InputError, match="document 23 of a store with 23"):
        store.document(23)
    with pytest.raises(InputError, match=f"a part from 5 to 5 of a store with {n} tokens"):
        store.slice(5, 5)
    with pytest.raises(InputError, match="tokens 0 to 9 of a part with 5"):
        store.slice(0, 5).read(0, 9)


def test_every_flipped_byte_is_noticed(tmp_path):
    folder = small_store(tmp_path).folder
    files = sorted(path for path in folder.iterdir() if path.suffix == ".bin" or path.name == "index.json")
    assert len(files) == 3
    generator = np.random.default_rng(0)
    for path in files:
        whole = path.read_bytes()
        for place in generator.integers(0, len(whole), 60):
            bad = bytearray(whole)
            bad[place] ^= 1 << generator.integers(0, 8)
            path.write_bytes(bad)
            with pytest.raises(InputError, match=path.name):
                TokenStore.open(folder, verify=True)
        path.write_bytes(whole)
    TokenStore.open(folder, verify=True)


def test_a_missing_or_cut_file_is_noticed_at_once(tmp_path):
    folder = small_store(tmp_path).folder
    path = folder / "tokens-00000.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(InputError, match=f"has {len(whole) - 2} bytes, and the index says {len(whole)}"):
        TokenStore.open(folder)
    path.unlink()
    with pytest.raises(InputError, match=r"tokens-00000\.bin: is missing from the store"):
        TokenStore.open(folder)


def test_another_tokenizer_in_the_folder_is_noticed(tmp_path):
    store = small_store(tmp_path)
    path = store.folder / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["merges"] = state["model"]["merges"][:-1]
    path.write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"tokenizer\.json is not the one that made this store's tokens"):
        store.tokenizer()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "not valid JSON"),
        ("[]", "holds a list"),
        ("{}", "dtype is missing"),
        ('{"dtype": "uint8"}', "dtype='uint8': input should be 'uint16' or 'uint32'"),
        ('{"dtpye": 1}', "index.json: "),
    ],
)
def test_a_bad_index_is_refused_in_a_line_that_names_it(content, line, tmp_path):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(InputError, match=line) as refusal:
        TokenStore.open(tmp_path)
    assert "index.json" in str(refusal.value)


def test_no_store_at_all(tmp_path):
    with pytest.raises(InputError, match="holds no token store"):
        TokenStore.open(tmp_path)
