"""Token batches are functions of (seed, t), and each token is a target once per epoch."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.data.token_batches import EvalTokenBatches, TokenBatches
from qkv.data.token_store import TokenStoreSlice
from qkv.errors import ConfigError, InputError
from qkv.tensors import IGNORE_INDEX
from tests.data.stores import ComputedTokens, small_store

sizes = st.tuples(st.integers(1, 200), st.integers(1, 23), st.integers(1, 31), st.integers(1, 11))


class NumberedTokens:
    """A token source in which token i is i + 1, with documents of equal length."""

    end_id = 0

    def __init__(self, n_tokens, length):
        self.n_tokens, self.length = n_tokens, length
        self.n_documents = -(-n_tokens // length)

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.n_tokens
        return np.arange(start, stop, dtype=np.int64) + 1

    def document_ids(self, start, stop):
        return np.arange(start, stop, dtype=np.int64) // self.length


def is_equal(first, second):
    pairs = [(first.ids, second.ids), (first.targets, second.targets), (first.counts, second.counts)]
    if first.document_ids is not None or second.document_ids is not None:
        pairs.append((first.document_ids, second.document_ids))
    return all(torch.equal(a, b) for a, b in pairs)


def concatenate_batches(parts):
    fields = ["ids", "targets", "counts", *(["document_ids"] if parts[0].document_ids is not None else [])]
    return {field: torch.cat([getattr(part, field) for part in parts]) for field in fields}


@pytest.mark.parametrize("cross_documents", [True, False])
@given(sizes=sizes, seed=st.integers(0, 99))
def test_each_token_is_a_target_once_per_epoch(cross_documents, sizes, seed):
    n_tokens, length, context, batch_size = sizes
    batches = TokenBatches(
        source=NumberedTokens(n_tokens, length),
        seq_len=context,
        batch_size=batch_size,
        seed=seed,
        cross_documents=cross_documents,
    )
    n_batches = -(-2 * batches.n_windows // batch_size)
    rows = concatenate_batches([batches.batch(t) for t in range(n_batches)])["targets"]
    for epoch in (0, 1):
        targets = rows[epoch * batches.n_windows : (epoch + 1) * batches.n_windows]
        targets = targets[targets != IGNORE_INDEX]
        assert Counter(targets.tolist()) == Counter(range(1, n_tokens + 1))


@given(sizes=sizes, t=st.integers(0, 50), seed=st.integers(0, 99))
def test_a_target_follows_its_input(sizes, t, seed):
    n_tokens, length, context, batch_size = sizes
    batch = TokenBatches(
        source=NumberedTokens(n_tokens, length), seq_len=context, batch_size=batch_size, seed=seed
    ).batch(t)
    assert batch.ids.shape == batch.targets.shape == (batch_size, context)
    assert batch.ids.dtype == batch.targets.dtype == torch.int64
    has_target = batch.targets != IGNORE_INDEX
    assert torch.equal(batch.targets[has_target], batch.ids[has_target] % n_tokens + 1)
    assert torch.equal(has_target.sum(1), batch.counts)
    assert batch.n_targets == int(has_target.sum())


@given(sizes=sizes, t=st.integers(0, 50), world_size=st.sampled_from([1, 2, 4]), cross_documents=st.booleans())
def test_the_concatenated_rows_of_all_ranks_are_the_full_batch(sizes, t, world_size, cross_documents):
    n_tokens, length, context, batch_size = sizes
    batches = TokenBatches(
        source=NumberedTokens(n_tokens, length),
        seq_len=context,
        batch_size=batch_size * world_size,
        seed=3,
        cross_documents=cross_documents,
    )
    tensors = concatenate_batches([batches.batch(t, rank=rank, world_size=world_size) for rank in range(world_size)])
    full_batch = batches.batch(t)
    assert all(torch.equal(tensor, getattr(full_batch, field)) for field, tensor in tensors.items())


def test_a_batch_does_not_depend_on_earlier_batches():
    batches = [TokenBatches(source=NumberedTokens(997, 13), seq_len=7, batch_size=5, seed=11) for _ in range(2)]
    forwards = [batches[0].batch(t) for t in range(60)]
    assert all(is_equal(forwards[t], batches[1].batch(t)) for t in reversed(range(60)))


def test_seeds_and_epochs_change_the_windows():
    def starts(seed, t):
        source = NumberedTokens(10_007, 13)
        batch = TokenBatches(source=source, seq_len=7, batch_size=1430, seed=seed).batch(t)
        return batch.ids[:, 0]

    first, second, other = starts(0, 0), starts(0, 1), starts(1, 0)
    # The offset of the windows changes, not only their order. One in seven starts is equal by chance.
    assert len(set(first.tolist()) & set(second.tolist())) < 700
    assert not torch.equal(first, other)
    assert (first.diff() == 7).float().mean() < 0.01


@given(sizes=sizes, t=st.integers(0, 50))
def test_positions_have_the_document_id_of_their_target(sizes, t):
    n_tokens, length, context, batch_size = sizes
    batch = TokenBatches(
        source=NumberedTokens(n_tokens, length),
        seq_len=context,
        batch_size=batch_size,
        seed=5,
        cross_documents=False,
    ).batch(t)
    for ids, targets, documents in zip(batch.ids, batch.targets, batch.document_ids, strict=True):
        for position in range(context):
            if targets[position] == IGNORE_INDEX:
                continue
            number = (int(targets[position]) - 1) // length
            assert documents[position] % -(-n_tokens // length) == number
            if position and documents[position] == documents[position - 1]:
                assert targets[position - 1] == ids[position]
                assert (int(ids[position]) - 1) // length == number
            elif position:  # the first token of a document is predicted from the end token of the previous one
                assert int(targets[position] - 1) % length == 0


def test_document_ids_continue_past_the_end_of_the_text():
    source = NumberedTokens(100, 13)
    batches = TokenBatches(source=source, seq_len=10, batch_size=10, seed=0, cross_documents=False)
    batch = batches.batch(0)
    outside = (batch.document_ids >= source.n_documents) & (batch.targets != IGNORE_INDEX)
    wrapped = (batch.targets[:, :1] > batch.targets) & (batch.targets != IGNORE_INDEX)
    assert torch.equal(outside, wrapped)
    assert wrapped.any()
    assert batch.document_ids.min() == 0


def test_documents_start_and_end_with_the_end_token(tmp_path):
    store = small_store(tmp_path)
    batch = TokenBatches(source=store, seq_len=211, batch_size=3, seed=0, cross_documents=False).batch(0)
    for ids, targets, documents in zip(batch.ids, batch.targets, batch.document_ids, strict=True):
        changes = torch.nonzero(documents.diff()).flatten()
        assert len(changes) > 1
        assert (ids[changes + 1] == store.end_id).all()
        assert (targets[changes] == store.end_id).all()
        assert (ids[1:] == targets[:-1]).all()


@pytest.mark.parametrize("cross_documents", [True, False])
@given(sizes=sizes, world_size=st.sampled_from([1, 2, 4]))
def test_evaluation_batches_contain_each_token_once_and_in_order(cross_documents, sizes, world_size):
    n_tokens, length, context, batch_size = sizes
    source = NumberedTokens(n_tokens, length)
    batches = EvalTokenBatches(source=source, seq_len=context, batch_size=batch_size, cross_documents=cross_documents)
    parts = [
        batches.batch(t, rank=rank, world_size=world_size) for t in range(len(batches)) for rank in range(world_size)
    ]
    tensors = concatenate_batches(parts)
    has_target = tensors["targets"] != IGNORE_INDEX
    targets = tensors["targets"][has_target]
    assert targets.tolist() == list(range(1, n_tokens + 1))
    assert torch.equal(tensors["ids"][has_target], targets - 1)  # the first token is predicted from the end token, 0
    assert sum(part.n_targets for part in parts) == n_tokens
    if not cross_documents:
        assert torch.equal(tensors["document_ids"][has_target], (targets - 1) // length)
    assert len(list(batches)) == len(batches)


def test_a_slice_of_a_store_can_be_batched():
    store_slice = TokenStoreSlice(NumberedTokens(500, 13), 100, 300)
    batches = TokenBatches(source=store_slice, seq_len=7, batch_size=29, seed=1, cross_documents=False)
    assert set(batches.batch(0).ids.flatten().tolist()) <= set(range(101, 301))
    assert batches.n_windows == 29


def test_a_trillion_tokens_take_no_more_memory_than_a_million():
    def peak_memory(n_tokens):
        tracemalloc.start()
        batches = TokenBatches(
            source=ComputedTokens(n_tokens, 997), seq_len=128, batch_size=16, seed=7, cross_documents=False
        )
        for t in (0, 1, batches.n_windows // 16, 10 * batches.n_windows):
            batches.batch(t)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_memory(10**4)  # the first call also allocates caches of the interpreter
    assert peak_memory(10**12) < 1.2 * peak_memory(10**6) + 20_000


def test_the_epoch_is_a_fraction():
    batches = TokenBatches(source=NumberedTokens(100, 7), seq_len=10, batch_size=5, seed=0)
    assert [batches.epoch(t) for t in (0, 1, 2, 5)] == [0.0, 0.5, 1.0, 2.5]


def test_all_tensors_of_a_batch_except_counts_are_moved():
    batch = TokenBatches(source=NumberedTokens(100, 7), seq_len=10, batch_size=5, seed=0, cross_documents=False).batch(
        0
    )
    assert batch.to("meta").ids.is_meta
    assert batch.to("meta").targets.is_meta
    assert batch.to("meta").document_ids.is_meta
    assert batch.to("meta").n_targets == 50  # counts stay on the CPU, so that reading them does not synchronize


def test_the_error_for_invalid_settings_contains_the_values():
    source = NumberedTokens(100, 7)
    with pytest.raises(ConfigError, match=r"\bseq_len=0\b.*\bbatch_size=3\b"):
        TokenBatches(source=source, seq_len=0, batch_size=3, seed=0)
    batches = TokenBatches(source=source, seq_len=5, batch_size=3, seed=0)
    with pytest.raises(ConfigError, match=r"\brank=2\b.*\bworld_size=2\b"):
        batches.batch(0, rank=2, world_size=2)
    with pytest.raises(InputError, match=r"-1\b"):
        batches.batch(-1)
    with pytest.raises(InputError, match=r"\b7\b.*\b7\b"):
        EvalTokenBatches(source=source, seq_len=5, batch_size=3).batch(7)
