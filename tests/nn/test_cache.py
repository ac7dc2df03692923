"""Tests of the KV cache: contents, slots, sizes and rejected inputs."""

import gc
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import GPTConfig
from qkv.errors import KVCacheError
from qkv.models import GPT
from qkv.nn import KVCache
from qkv.nn.cache import LayerSourceCache

LAYERS, BATCH, CAPACITY, KV_HEADS, D_HEAD, D_VALUE = 2, 3, 11, 5, 7, 4


def new_cache(dtype: torch.dtype = torch.float32, batch: int = BATCH, growth_step: int | None = None) -> KVCache:
    return KVCache(
        n_layers=LAYERS,
        batch=batch,
        capacity=CAPACITY,
        key_shape=(KV_HEADS, D_HEAD),
        value_shape=(KV_HEADS, D_VALUE),
        like=torch.zeros(1, dtype=dtype),
        growth_step=growth_step,
    )


def random_keys_values(n: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, KV_HEADS, n, D_HEAD), torch.randn(batch, KV_HEADS, n, D_VALUE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bytes_are_2_n_d_layers_bytes(dtype):
    """The size is batch × 2 (keys and values) × n × d × layers × bytes per number, with d = n_heads · d_head."""
    config = GPTConfig(vocab_size=11, context_length=13, d_model=6, n_heads=3, n_layers=5)
    cache = GPT(config).to(dtype).new_cache(batch=7, capacity=9)
    assert cache.n_bytes == 7 * 2 * 9 * 6 * 5 * dtype.itemsize


def test_grouped_heads_and_other_value_widths_are_counted_as_they_are():
    expected = LAYERS * BATCH * CAPACITY * KV_HEADS * (D_HEAD + D_VALUE) * 4
    assert new_cache().n_bytes == expected
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in new_cache().layers) == expected


def test_n_bytes_includes_the_source_cache_once_it_is_filled():
    cache = new_cache()
    before = cache.n_bytes
    keys, values = random_keys_values(3)
    cache.sources[0].get_or_compute(lambda: (keys, values))
    assert cache.n_bytes == before + BATCH * KV_HEADS * 3 * (D_HEAD + D_VALUE) * 4


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda steps: sum(steps) <= CAPACITY))
def test_keys_appended_in_steps_are_returned_together(steps):
    cache = new_cache()
    keys, values = random_keys_values(sum(steps))
    start = 0
    for n in steps:
        positions = cache.reserve(batch=BATCH, n_new=n)
        assert positions.tolist() == [list(range(start, start + n))]
        for layer in cache.layers:
            got = layer.append(keys[:, :, start : start + n], values[:, :, start : start + n])
        start += n
        assert torch.equal(got[0], keys[:, :, :start])
        assert torch.equal(got[1], values[:, :, :start])
    assert cache.n_filled == sum(steps)
    assert cache.lengths.tolist() == [sum(steps)] * BATCH
    assert not cache.is_ragged


def test_ragged_rows_are_written_from_the_left_without_their_padding():
    cache = new_cache()
    keys, values = random_keys_values(4)
    attention_mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]]).bool()
    positions = cache.reserve(batch=BATCH, n_new=4, attention_mask=attention_mask)
    assert positions[attention_mask].tolist() == [0, 1, 2, 3, 0, 1, 0]
    cache.layers[0].append(keys, values)
    assert cache.lengths.tolist() == [4, 2, 1]
    more_keys, more_values = random_keys_values(2)
    is_token_2 = torch.tensor([[1, 1], [1, 1], [0, 1]]).bool()
    positions = cache.reserve(batch=BATCH, n_new=2, attention_mask=is_token_2)
    assert positions[is_token_2].tolist() == [4, 5, 2, 3, 1]
    got_keys, got_values = cache.layers[0].append(more_keys, more_values)
    assert cache.lengths.tolist() == [6, 4, 2]
    assert cache.n_filled == 6
    for row in range(BATCH):
        expected = torch.cat((keys[row][:, attention_mask[row]], more_keys[row][:, is_token_2[row]]), dim=1)
        assert torch.equal(got_keys[row, :, : expected.shape[1]], expected)
        assert not got_keys[row, :, expected.shape[1] :].any()
        expected = torch.cat((values[row][:, attention_mask[row]], more_values[row][:, is_token_2[row]]), dim=1)
        assert torch.equal(got_values[row, :, : expected.shape[1]], expected)


def test_a_ragged_cache_appends_a_step_without_padding_at_each_rows_end():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=2, attention_mask=torch.tensor([[1, 1], [0, 1], [1, 1]]).bool())
    assert cache.reserve(batch=BATCH, n_new=1).tolist() == [[2], [1], [2]]
    assert cache.lengths.tolist() == [3, 2, 3]


@pytest.mark.parametrize("n_new", [1, 3])
def test_a_ragged_cache_appends_new_tokens_at_each_rows_end(n_new):
    cache = new_cache()
    attention_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    cache.reserve(batch=BATCH, n_new=4, attention_mask=attention_mask)
    keys, values = random_keys_values(4)
    cache.layers[0].append(keys, values)
    more_keys, more_values = random_keys_values(n_new)
    positions = cache.reserve(batch=BATCH, n_new=n_new)
    assert positions.tolist() == [list(range(n, n + n_new)) for n in (4, 2, 1)]
    got_keys, got_values = cache.layers[0].append(more_keys, more_values)
    assert got_keys.shape[2] == 4 + n_new
    for row, n in enumerate((4, 2, 1)):
        assert torch.equal(got_keys[row, :, : n + n_new], torch.cat((keys[row, :, :n], more_keys[row]), dim=1))
        assert torch.equal(got_values[row, :, : n + n_new], torch.cat((values[row, :, :n], more_values[row]), dim=1))
        assert not got_keys[row, :, n + n_new :].any()


def test_dropping_the_longest_row_frees_capacity():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=9, attention_mask=torch.arange(9) < torch.tensor([[9], [4], [1]]))
    cache.reorder(torch.tensor([1, 2]))
    assert cache.n_filled == 4
    cache.reserve(batch=2, n_new=7)
    with pytest.raises(KVCacheError, match=r"\b11\b.*\b12\b"):
        cache.reserve(batch=2, n_new=1)


def test_reorder_keeps_the_given_rows_in_order_with_repeats():
    cache = new_cache()
    keys, values = random_keys_values(4)
    attention_mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0]]).bool()
    cache.reserve(batch=BATCH, n_new=4, attention_mask=attention_mask)
    for layer in cache.layers:
        layer.append(keys, values)
    before = [(layer.keys, layer.values) for layer in cache.layers]
    rows = torch.tensor([2, 0, 2, 1])
    cache.reorder(rows)
    assert cache.batch == 4
    assert cache.lengths.tolist() == [3, 4, 3, 2]
    for layer, (old_keys, old_values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, old_keys[rows])
        assert torch.equal(layer.values, old_values[rows])


def test_a_source_is_computed_once():
    calls = []

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return random_keys_values(3)

    source = LayerSourceCache()
    first, second = source.get_or_compute(compute), source.get_or_compute(compute)
    assert calls == [1]
    assert torch.equal(first[0], second[0])


def test_a_full_cache_refuses_more_and_stays_as_it_was():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=9)
    with pytest.raises(KVCacheError, match=r"\b11\b.*\b12\b"):
        cache.reserve(batch=BATCH, n_new=3)
    assert cache.n_filled == 9
    assert cache.lengths.tolist() == [9] * BATCH
    cache.reserve(batch=BATCH, n_new=2)


def test_a_ragged_cache_is_full_when_its_longest_row_is():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=11, attention_mask=torch.arange(11) < torch.tensor([[9], [4], [1]]))
    cache.reserve(batch=BATCH, n_new=3, attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]]).bool())
    with pytest.raises(KVCacheError, match=r"\b11\b.*\b12\b"):
        cache.reserve(batch=BATCH, n_new=1)


def test_another_batch_is_rejected():
    with pytest.raises(KVCacheError, match=r"batch=3\b.*batch=2\b"):
        new_cache().reserve(batch=2, n_new=1)


def test_an_empty_batch_or_capacity_is_rejected():
    with pytest.raises(KVCacheError, match=r"batch=0\b.*capacity=11\b"):
        new_cache(batch=0)


def test_append_without_reserve_is_rejected():
    with pytest.raises(KVCacheError, match=r"KVCache\.reserve"):
        new_cache().layers[0].append(*random_keys_values(1))


def test_keys_of_another_model_are_rejected():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=1)
    keys, values = random_keys_values(1)
    # Broadcasting would silently write one head to all five.
    with pytest.raises(KVCacheError, match=r"keys\b.*\b5\b.*\b7\b.*\b1\b.*\b7\b"):
        cache.layers[0].append(keys[:, :1], values[:, :1])
    with pytest.raises(KVCacheError, match=r"values\b.*\b5\b.*\b4\b.*\b5\b.*\b3\b"):
        cache.layers[0].append(keys, values[..., :3])


def cache_filled_from(states: torch.Tensor) -> KVCache:
    cache = new_cache()
    cache.check_and_store_source(states)
    cache.sources[0].get_or_compute(lambda: random_keys_values(states.shape[1], batch=len(states)))
    return cache


def test_a_different_source_is_rejected_once_the_cache_is_filled():
    states = torch.randn(2, 3, 13)
    cache = cache_filled_from(states)
    with pytest.raises(KVCacheError, match=r"2 × 3\b.*2 × 5\b"):
        cache.check_and_store_source(torch.randn(2, 5, 13))
    with pytest.raises(KVCacheError, match=r"2 × 3\b"):
        cache.check_and_store_source(torch.randn(2, 3, 13))
    cache.check_and_store_source(states)
    cache.check_and_store_source(states.clone())


def test_a_reordered_source_is_accepted():
    states, rows = torch.randn(3, 5, 13), torch.tensor([0, 2])
    cache = cache_filled_from(states)
    keys, values = cache.sources[0].keys_values
    cache.sources[0].keys_values = keys[rows], values[rows]
    cache.check_and_store_source(states[rows])
    cache.check_and_store_source(states[rows])


def test_a_growing_cache_equals_a_preallocated_one():
    """It also allocates no more than necessary."""
    preallocated, growing = new_cache(), new_cache(growth_step=2)
    n_slots = []
    for n in (1, 1, 2, 3, 1, 3):
        keys, values = random_keys_values(n)
        for cache in (preallocated, growing):
            cache.reserve(batch=BATCH, n_new=n)
            for layer in cache.layers:
                layer.append(keys, values)
        n_slots.append(growing.keys.shape[3])
        for expected, actual in zip(preallocated.layers, growing.layers, strict=True):
            assert torch.equal(expected.keys[:, :, : growing.n_filled], actual.keys[:, :, : growing.n_filled])
            assert torch.equal(expected.values[:, :, : growing.n_filled], actual.values[:, :, : growing.n_filled])
    assert n_slots == [2, 2, 4, 7, 10, 11]
    with pytest.raises(KVCacheError, match=r"\b11\b.*\b12\b"):
        growing.reserve(batch=BATCH, n_new=1)


def test_a_cache_is_freed_immediately_without_garbage_collection():
    gc.disable()
    try:
        cache = new_cache()
        keys_ref = ref(cache.keys)
        del cache
        assert keys_ref() is None, "it waits for Python to look for cycles"
    finally:
        gc.enable()
