"""Pair batches are functions of (seed, t), and each epoch contains each pair the specified number of times."""

from collections import Counter

import pytest
import torch

from qkv.choices import SpecialToken
from qkv.data import prefetch
from qkv.data.pair_batches import PairBatches
from qkv.errors import ConfigError, InputError
from qkv.tensors import IGNORE_INDEX
from tests.data.pair_corpus import pair_store, pair_tokenizer, reversed_pairs

FILES = {"a": list(dict.fromkeys(reversed_pairs(311, longest=13))), "b": [("a a", "A A"), ("h " * 29, "H " * 29)]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return pair_store(tmp_path_factory.mktemp("pairs"), FILES)


def batches(store, **changes):
    settings = {"repeats": store.pair_repeats({}), "seq_len": 32, "batch_size": 5, "seed": 7, "join_fraction": 0.4}
    return PairBatches(store=store, **(settings | changes))


def decode_rows(batch) -> list[tuple[str, str]]:
    """Source and target texts of the rows that have targets."""
    decode = pair_tokenizer().decode
    rows = zip(batch.source.tolist(), batch.source_lengths.tolist(), batch.targets.tolist(), strict=True)
    return [
        (decode(source[:n]), decode([i for i in targets if i != IGNORE_INDEX]))
        for source, n, targets in rows
        if targets[0] != IGNORE_INDEX
    ]


def is_equal(first, second) -> bool:
    names = ("source", "source_lengths", "ids", "targets", "counts")
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)


def test_a_batch_does_not_depend_on_the_number_of_workers(store):
    source = batches(store)
    expected = [source.batch(t) for t in range(23)]
    for n_workers in (1, 2, 4):
        prefetched = prefetch(batches(store).batch, 0, stop=23, n_workers=n_workers)
        for t, batch in enumerate(prefetched):
            assert is_equal(batch, expected[t])
    assert is_equal(batches(store).batch(22), expected[22])
    assert not is_equal(batches(store, seed=8).batch(0), expected[0])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_concatenated_rows_of_all_ranks_are_the_full_batch(store, world_size):
    source = batches(store)
    for t in range(11):
        parts = [source.batch(t, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat([part.targets for part in parts]), source.batch(t).targets)


@pytest.mark.parametrize("join_fraction", [0.0, 0.5])
def test_an_epoch_contains_each_pair_the_specified_number_of_times(store, join_fraction):
    pair_batches = batches(store, join_fraction=join_fraction, repeats=store.pair_repeats({"b": 3}))
    word_counts = Counter()
    for epoch in (0, 1):
        word_counts.clear()
        for t in range(pair_batches.n_batches):
            for source, target in decode_rows(pair_batches.batch(epoch * pair_batches.n_batches + t)):
                word_counts.update(Counter(source.split()))
                assert target == " ".join(reversed(source.upper().split())) or join_fraction
        expected = Counter()
        for name, pairs in FILES.items():
            for source, _ in pairs:
                n = 3 if name == "b" else 1
                if len(source.split()) <= 30:
                    expected.update({word: n * count for word, count in Counter(source.split()).items()})
        assert word_counts == expected


def epoch_pairs(pair_batches, epoch):
    first = epoch * pair_batches.n_batches
    return [pair for t in range(pair_batches.n_batches) for pair in decode_rows(pair_batches.batch(first + t))]


def test_epochs_without_concatenated_pairs_contain_the_pairs_in_different_orders(store):
    pair_batches = batches(store, join_fraction=0.0)
    epochs = [epoch_pairs(pair_batches, epoch) for epoch in (0, 1)]
    expected = sorted((source.strip(), target.strip()) for pairs in FILES.values() for source, target in pairs)
    assert sorted(epochs[0]) == sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1]


def test_batches_of_different_epochs_contain_different_pairs(store):
    pair_batches = batches(store, join_fraction=0.0)
    n = pair_batches.n_batches
    first, second = ({frozenset(decode_rows(pair_batches.batch(epoch * n + t))) for t in range(n)} for epoch in (0, 1))
    assert len(first & second) < len(first) / 2


def test_concatenated_pairs_have_the_same_order_on_both_sides(store):
    pair_batches = batches(store, join_fraction=0.9)
    translations = {source.strip(): target.strip() for pairs in FILES.values() for source, target in pairs}
    n_joined = 0
    for t in range(pair_batches.n_batches):
        for source, target in decode_rows(pair_batches.batch(t)):
            if translations.get(source) == target:
                continue
            n_joined += 1
            source_words, target_words = source.split(), target.split()
            lengths = [n for n in range(1, len(source_words)) if " ".join(source_words[:n]) in translations]
            assert any(translations[" ".join(source_words[:n])].split() == target_words[:n] for n in lengths)
    assert n_joined > 20


def test_rows_have_bos_eos_and_padding_and_targets_are_shifted_by_one(store):
    bos_id, eos_id, pad_id = (
        pair_tokenizer().special_id(role) for role in (SpecialToken.BOS, SpecialToken.EOS, SpecialToken.PAD)
    )
    batch = batches(store).batch(3)
    for row in range(len(batch.ids)):
        n_source, n = int(batch.source_lengths[row]), int(batch.counts[row])
        source = batch.source[row].tolist()
        assert (source[0], source[n_source - 1], set(source[n_source:]) <= {pad_id}) == (bos_id, eos_id, True)
        if n == 0:
            continue
        ids, targets = batch.ids[row].tolist(), batch.targets[row].tolist()
        assert ids[0] == bos_id
        assert ids[1:n] == targets[: n - 1]
        assert (targets[n - 1], set(targets[n:]) <= {IGNORE_INDEX}) == (eos_id, True)
    assert batch.source_attention_mask.sum(1).tolist() == batch.source_lengths.tolist()


def test_there_are_few_shapes_of_limited_size(store):
    pair_batches = batches(store, batch_size=8)
    shapes = Counter(tuple(pair_batches.batch(t).ids.shape) for t in range(3 * pair_batches.n_batches))
    assert len(shapes) <= 3 * len(pair_batches.buckets)
    assert max(rows * length for rows, length in shapes) <= 8 * 32


def test_concatenated_micro_batches_are_the_batch(store):
    batch = batches(store, batch_size=6).batch(1)
    parts = list(batch.split(2))
    assert len(parts) == 3
    assert sum(part.n_targets for part in parts) == batch.n_targets
    assert torch.equal(torch.cat([part.source for part in parts]), batch.source)


def test_evaluation_batches_contain_each_pair_once(store):
    pair_batches = batches(store)
    pairs = [pair for t in range(pair_batches.n_batches) for pair in decode_rows(pair_batches.eval_batch(t))]
    assert sorted(pairs) == sorted((s.strip(), t.strip()) for pairs in FILES.values() for s, t in pairs)


def test_pairs_that_are_too_long_are_skipped_and_counted(store):
    assert batches(store, seq_len=16).n_too_long == 1
    with pytest.raises(InputError, match=r"\bseq_len=8\b"):
        batches(store, seq_len=8, repeats=0 * store.pair_repeats({}))
    with pytest.raises(ConfigError, match=r"\b8\b.*\bseq_len=7\b"):
        batches(store, seq_len=7)
