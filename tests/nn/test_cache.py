"""Does a cache hold what was written, where it was written, and refuse what does not fit?"""

import gc
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import GPTConfig
from qkv.errors import CacheError
from qkv.models import GPT
from qkv.nn import KVCache, SourceCache

LAYERS, BATCH, CAPACITY, KV_HEADS, D_HEAD, D_VALUE = 2, 3, 11, 5, 7, 4


def new_cache(dtype: torch.dtype = torch.float32, batch: int = BATCH, chunk: int | None = None) -> KVCache:
    return KVCache(
        n_layers=LAYERS,
        batch=batch,
        capacity=CAPACITY,
        key_shape=(KV_HEADS, D_HEAD),
        value_shape=(KV_HEADS, D_VALUE),
        like=torch.zeros(1, dtype=dtype),
        chunk=chunk,
    )


def drawn(n: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, KV_HEADS, n, D_HEAD), torch.randn(batch, KV_HEADS, n, D_VALUE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bytes_are_2_n_d_layers_bytes(dtype):
    """Batch × 2 (keys and values) × n × d × L × bytes a number, d = n_heads · d_head."""
    config = GPTConfig(vocab_size=11, context_length=13, d_model=6, n_heads=3, n_layers=5)
    cache = GPT(config).to(dtype).new_cache(batch=7, capacity=9)
    assert cache.n_bytes == 7 * 2 * 9 * 6 * 5 * dtype.itemsize


def test_grouped_heads_and_other_value_widths_are_counted_as_they_are():
    expected = LAYERS * BATCH * CAPACITY * KV_HEADS * (D_HEAD + D_VALUE) * 4
    assert new_cache().n_bytes == expected
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in new_cache().layers) == expected


def test_the_sources_share_counts_once_it_is_there():
    cache = new_cache()
    before = cache.n_bytes
    keys, values = drawn(3)
    cache.sources[0].fetch(lambda: (keys, values))
    assert cache.n_bytes == before + BATCH * KV_HEADS * 3 * (D_HEAD + D_VALUE) * 4


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda steps: sum(steps) <= CAPACITY))
def test_what_was_appended_in_steps_comes_back_whole(steps):
    cache = new_cache()
    keys, values = drawn(sum(steps))
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
    keys, values = drawn(4)
    attention_mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]]).bool()
    positions = cache.reserve(batch=BATCH, n_new=4, attention_mask=attention_mask)
    assert positions[attention_mask].tolist() == [0, 1, 2, 3, 0, 1, 0]
    cache.layers[0].append(keys, values)
    assert cache.lengths.tolist() == [4, 2, 1]
    more_keys, more_values = drawn(2)
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


def test_once_ragged_a_step_without_padding_goes_on_at_each_rows_end():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=2, attention_mask=torch.tensor([[1, 1], [0, 1], [1, 1]]).bool())
    assert cache.reserve(batch=BATCH, n_new=1).tolist() == [[2], [1], [2]]
    assert cache.lengths.tolist() == [3, 2, 3]


@pytest.mark.parametrize("n_new", [1, 3])
def test_once_ragged_new_tokens_are_written_at_each_rows_end(n_new):
    cache = new_cache()
    attention_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    cache.reserve(batch=BATCH, n_new=4, attention_mask=attention_mask)
    keys, values = drawn(4)
    cache.layers[0].append(keys, values)
    more_keys, more_values = drawn(n_new)
    positions = cache.reserve(batch=BATCH, n_new=n_new)
    assert positions.tolist() == [list(range(n, n + n_new)) for n in (4, 2, 1)]
    got_keys, got_values = cache.layers[0].append(more_keys, more_values)
    assert got_keys.shape[2] == 4 + n_new
    for row, n in enumerate((4, 2, 1)):
        assert torch.equal(got_keys[row, :, : n + n_new], torch.cat((keys[row, :, :n], more_keys[row]), dim=1))
        assert torch.equal(got_values[row, :, : n + n_new], torch.cat((values[row, :, :n], more_values[row]), dim=1))
        assert not got_keys[row, :, n + n_new :].any()


def test_when_the_longest_row_leaves_the_others_have_its_room():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=9, attention_mask=torch.arange(9) < torch.tensor([[9], [4], [1]]))
    cache.reorder(torch.tensor([1, 2]))
    assert cache.n_filled == 4
    cache.reserve(batch=2, n_new=7)
    with pytest.raises(CacheError, match="the cache holds 11 tokens a row, 12 are needed"):
        cache.reserve(batch=2, n_new=1)


def test_selected_rows_are_kept_in_their_order_with_repeats():
    cache = new_cache()
    keys, values = drawn(4)
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
        return drawn(3)

    source = SourceCache()
    first, second = source.fetch(compute), source.fetch(compute)
    assert calls == [1]
    assert torch.equal(first[0], second[0])


def test_a_full_cache_refuses_more_and_stays_as_it_was():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=9)
    with pytest.raises(CacheError, match="the cache holds 11 tokens a row, 12 are needed"):
        cache.reserve(batch=BATCH, n_new=3)
    assert cache.n_filled == 9
    assert cache.lengths.tolist() == [9] * BATCH
    cache.reserve(batch=BATCH, n_new=2)


def test_a_ragged_cache_is_full_when_its_longest_row_is():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=11, attention_mask=torch.arange(11) < torch.tensor([[9], [4], [1]]))
    cache.reserve(batch=BATCH, n_new=3, attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]]).bool())
    with pytest.raises(CacheError, match="the cache holds 11 tokens a row, 12 are needed"):
        cache.reserve(batch=BATCH, n_new=1)


def test_another_batch_is_refused_with_both_numbers():
    with pytest.raises(CacheError, match="made for batch=3, the ids have batch=2"):
        new_cache().reserve(batch=2, n_new=1)


def test_a_cache_of_nothing_is_refused():
    with pytest.raises(CacheError, match="batch=0 and capacity=11 of at least 1"):
        new_cache(batch=0)


def test_nothing_is_appended_where_nothing_was_reserved():
    with pytest.raises(CacheError, match="no room reserved"):
        new_cache().layers[0].append(*drawn(1))


def test_keys_of_another_model_are_refused_with_both_shapes():
    cache = new_cache()
    cache.reserve(batch=BATCH, n_new=1)
    keys, values = drawn(1)
    # One head would be written to all five without a word.
    with pytest.raises(CacheError, match="for 5 heads of keys of width 7, the layer gives 1 of width 7"):
        cache.layers[0].append(keys[:, :1], values[:, :1])
    with pytest.raises(CacheError, match="for 5 heads of values of width 4, the layer gives 5 of width 3"):
        cache.layers[0].append(keys, values[..., :3])


def filled_from(states: torch.Tensor) -> KVCache:
    cache = new_cache()
    cache.check_source(states)
    cache.sources[0].fetch(lambda: drawn(states.shape[1], batch=len(states)))
    return cache


def test_another_source_is_refused_once_one_is_kept():
    states = torch.randn(2, 3, 13)
    cache = filled_from(states)
    with pytest.raises(CacheError, match="a source of 2 × 3 tokens, it was now given one of 2 × 5"):
        cache.check_source(torch.randn(2, 5, 13))
    with pytest.raises(CacheError, match="another source of 2 × 3 tokens; make a new cache"):
        cache.check_source(torch.randn(2, 3, 13))
    cache.check_source(states)
    cache.check_source(states.clone())


def test_a_source_of_which_some_rows_are_left_is_still_the_same():
    states, rows = torch.randn(3, 5, 13), torch.tensor([0, 2])
    cache = filled_from(states)
    keys, values = cache.sources[0].keys_values
    cache.sources[0].keys_values = keys[rows], values[rows]
    cache.check_source(states[rows])
    cache.check_source(states[rows])


def test_a_cache_that_grows_holds_what_one_made_whole_holds():
    """And takes no more than it needs."""
    whole, growing = new_cache(), new_cache(chunk=2)
    n_slots = []
    for n in (1, 1, 2, 3, 1, 3):
        keys, values = drawn(n)
        for cache in (whole, growing):
            cache.reserve(batch=BATCH, n_new=n)
            for layer in cache.layers:
                layer.append(keys, values)
        n_slots.append(growing.keys.shape[3])
        for one, other in zip(whole.layers, growing.layers, strict=True):
            assert torch.equal(one.keys[:, :, : growing.n_filled], other.keys[:, :, : growing.n_filled])
            assert torch.equal(one.values[:, :, : growing.n_filled], other.values[:, :, : growing.n_filled])
    assert n_slots == [2, 2, 4, 7, 10, 11]
    with pytest.raises(CacheError, match="the cache holds 11 tokens a row, 12 are needed"):
        growing.reserve(batch=BATCH, n_new=1)


def test_a_cache_is_freed_at_once_when_nobody_holds_it():
    gc.disable()
    try:
        cache = new_cache()
        kept = ref(cache.keys)
        del cache
        assert kept() is None, "it waits for Python to look for cycles"
    finally:
        gc.enable()
