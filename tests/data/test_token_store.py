"""Token stores return the written tokens and detect modified files."""

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
    """Create a store of several shards with documents that cross shard boundaries."""
    return small_store(tmp_path_factory.mktemp("store"), shard_tokens=50)


@pytest.fixture(scope="module")
def expected():
    end = tokenizer().backend.token_to_id("<|endoftext|>")
    return [[*tokenizer().encode(text), end] for text in TEXTS]


def test_the_store_contains_the_documents_in_order(store, expected):
    assert store.n_documents == len(TEXTS)
    assert [store.document(n).tolist() for n in range(store.n_documents)] == expected
    assert store.read(0, store.n_tokens).tolist() == [number for ids in expected for number in ids]
    assert store.n_tokens == sum(map(len, expected))


def test_utf8_bytes_are_counted(store):
    assert store.document_bytes().tolist() == [len(text.encode()) for text in TEXTS]
    assert store.n_bytes == sum(len(text.encode()) for text in TEXTS)


def test_tokens_have_document_ids(store, expected):
    document_ids = np.repeat(np.arange(len(expected)), [len(ids) for ids in expected])
    assert np.array_equal(store.document_ids(0, store.n_tokens), document_ids)


@given(data=st.data())
def test_any_range_can_be_read(store, data):
    start = data.draw(st.integers(0, store.n_tokens))
    stop = data.draw(st.integers(start, store.n_tokens))
    for read in (store.read, store.document_ids):
        assert np.array_equal(read(start, stop), read(0, store.n_tokens)[start:stop])


def test_a_slice_has_its_own_token_and_document_numbers(store):
    store_slice = store.slice(31, 307)
    assert store_slice.n_tokens == 276
    assert np.array_equal(store_slice.read(3, 200), store.read(34, 231))
    document_ids = store_slice.document_ids(0, 276)
    assert document_ids[0] == 0
    assert document_ids[-1] == store_slice.n_documents - 1
    assert store_slice.end_id == store.end_id


def test_the_store_contains_its_tokenizer(store):
    assert store.tokenizer().fingerprint == tokenizer().fingerprint
    assert store.vocab_size == tokenizer().vocab_size


def test_the_error_for_an_invalid_range_contains_the_size(store):
    n = store.n_tokens
    with pytest.raises(InputError, match=rf"\b0 to {n + 1}\b.*\b{n}\b"):
        store.read(0, n + 1)
    with pytest.raises(InputError, match=r"document 23\b.*\b23\b"):
        store.document(23)
    with pytest.raises(InputError, match=rf"\b5 to 5\b.*\b{n}\b"):
        store.slice(5, 5)
    with pytest.raises(InputError, match=r"\b0 to 9\b.*\b5\b"):
        store.slice(0, 5).read(0, 9)


def test_any_flipped_bit_is_detected(tmp_path):
    folder = small_store(tmp_path).folder
    files = sorted(path for path in folder.iterdir() if path.suffix == ".bin" or path.name == "index.json")
    assert len(files) == 3
    generator = np.random.default_rng(0)
    for path in files:
        original = path.read_bytes()
        for position in generator.integers(0, len(original), 60):
            modified = bytearray(original)
            modified[position] ^= 1 << generator.integers(0, 8)
            path.write_bytes(modified)
            with pytest.raises(InputError, match=path.name):
                TokenStore.open(folder, verify=True)
        path.write_bytes(original)
    TokenStore.open(folder, verify=True)


def test_missing_and_truncated_files_are_detected_on_opening(tmp_path):
    folder = small_store(tmp_path).folder
    path = folder / "tokens-00000.bin"
    original = path.read_bytes()
    path.write_bytes(original[:-2])
    with pytest.raises(InputError, match=rf"tokens-00000\.bin: .*\b{len(original)} .*\b{len(original) - 2}\b"):
        TokenStore.open(folder)
    path.unlink()
    with pytest.raises(InputError, match=r"tokens-00000\.bin: .*missing"):
        TokenStore.open(folder)


def test_a_different_tokenizer_is_detected(tmp_path):
    store = small_store(tmp_path)
    path = store.folder / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["merges"] = state["model"]["merges"][:-1]
    path.write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        store.tokenizer()


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("", "JSON"),
        ("[]", r"\blist\b"),
        ("{}", "dtype "),
        ('{"dtype": "uint8"}', "dtype='uint8': .*'uint16' or 'uint32'"),
        ('{"dtpye": 1}', "'dtpye'"),
    ],
)
def test_the_error_for_an_invalid_index_contains_its_name(content, pattern, tmp_path):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(InputError, match=pattern) as error:
        TokenStore.open(tmp_path)
    assert "index.json" in str(error.value)


def test_a_folder_without_a_store_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"index\.json"):
        TokenStore.open(tmp_path)
