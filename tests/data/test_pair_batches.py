"""Batch t of pairs is a function of (seed, t), and an epoch takes every pair as often as it should."""

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
    given = {"repeats": store.pair_repeats({}), "seq_len": 32, "batch_size": 5, "seed": 7, "join_fraction": 0.4}
    return PairBatches(store=store, **(given | changes))


def texts(batch) -> list[tuple[str, str]]:
    """What each row says, its targets where it has any."""
    decode = pair_tokenizer().decode
    rows = zip(batch.source.tolist(), batch.source_lengths.tolist(), batch.targets.tolist(), strict=True)
    return [
        (decode(source[:n]), decode([i for i in targets if i != IGNORE_INDEX]))
        for source, n, targets in rows
        if targets[0] != IGNORE_INDEX
    ]


def is_same(one, other) -> bool:
    names = ("source", "source_lengths", "ids", "targets", "counts")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def test_a_batch_is_the_same_whenever_and_by_however_many_workers(store):
    made = batches(store)
    alone = [made.batch(t) for t in range(23)]
    for n_workers in (1, 2, 4):
        fresh = batches(store)
        for t, batch in enumerate(prefetch(fresh.batch, 0, stop=23, n_workers=n_workers)):
            assert is_same(batch, alone[t])
    assert is_same(batches(store).batch(22), alone[22])
    assert not is_same(batches(store, seed=8).batch(0), alone[0])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ranks_rows_in_order_are_the_whole_batch(store, world_size):
    made = batches(store)
    for t in range(11):
        parts = [made.batch(t, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat([part.targets for part in parts]), made.batch(t).targets)


@pytest.mark.parametrize("join", [0.0, 0.5])
def test_each_pair_is_taken_once_an_epoch_or_as_often_as_asked(store, join):
    made = batches(store, join_fraction=join, repeats=store.pair_repeats({"b": 3}))
    said = Counter()
    for epoch in (0, 1):
        said.clear()
        for t in range(made.n_batches):
            for source, target in texts(made.batch(epoch * made.n_batches + t)):
                said.update(Counter(source.split()))
                assert target == " ".join(reversed(source.upper().split())) or join
        expected = Counter()
        for name, pairs in FILES.items():
            for source, _ in pairs:
                n = 3 if name == "b" else 1
                if len(source.split()) <= 30:
                    expected.update({word: n * count for word, count in Counter(source.split()).items()})
        assert said == expected


def test_without_joining_an_epoch_is_the_very_pairs_in_another_order_each_time(store):
    made = batches(store, join_fraction=0.0)
    epochs = [
        [pair for t in range(made.n_batches) for pair in texts(made.batch(e * made.n_batches + t))] for e in (0, 1)
    ]
    everything = sorted((source.strip(), target.strip()) for pairs in FILES.values() for source, target in pairs)
    assert sorted(epochs[0]) == sorted(epochs[1]) == everything
    assert epochs[0] != epochs[1]


def test_another_epoch_puts_other_pairs_together(store):
    made = batches(store, join_fraction=0.0)
    first, second = (
        {frozenset(texts(made.batch(e * made.n_batches + t))) for t in range(made.n_batches)} for e in (0, 1)
    )
    assert len(first & second) < len(first) / 2


def test_joined_pairs_stand_one_after_the_other_on_both_sides(store):
    made = batches(store, join_fraction=0.9)
    known = {source.strip(): target.strip() for pairs in FILES.values() for source, target in pairs}
    n_joined = 0
    for t in range(made.n_batches):
        for source, target in texts(made.batch(t)):
            if known.get(source) == target:
                continue
            n_joined += 1
            words, capitals = source.split(), target.split()
            cuts = [n for n in range(1, len(words)) if " ".join(words[:n]) in known]
            assert any(known[" ".join(words[:n])].split() == capitals[:n] for n in cuts)
    assert n_joined > 20


def test_a_row_is_begun_ended_padded_and_shifted_by_one(store):
    begin, end, pad = (
        pair_tokenizer().special_id(role) for role in (SpecialToken.BOS, SpecialToken.EOS, SpecialToken.PAD)
    )
    batch = batches(store).batch(3)
    for row in range(len(batch.ids)):
        n_source, n = int(batch.source_lengths[row]), int(batch.counts[row])
        source = batch.source[row].tolist()
        assert (source[0], source[n_source - 1], set(source[n_source:]) <= {pad}) == (begin, end, True)
        if n == 0:
            continue
        ids, targets = batch.ids[row].tolist(), batch.targets[row].tolist()
        assert ids[0] == begin
        assert ids[1:n] == targets[: n - 1]
        assert (targets[n - 1], set(targets[n:]) <= {IGNORE_INDEX}) == (end, True)
    assert batch.source_attention_mask.sum(1).tolist() == batch.source_lengths.tolist()


def test_shapes_are_few_and_about_equally_costly(store):
    made = batches(store, batch_size=8)
    shapes = Counter(tuple(made.batch(t).ids.shape) for t in range(3 * made.n_batches))
    assert len(shapes) <= 3 * len(made.buckets)
    assert max(rows * length for rows, length in shapes) <= 8 * 32


def test_the_parts_of_a_batch_are_the_batch(store):
    batch = batches(store, batch_size=6).batch(1)
    parts = list(batch.split(2))
    assert len(parts) == 3
    assert sum(part.n_targets for part in parts) == batch.n_targets
    assert torch.equal(torch.cat([part.source for part in parts]), batch.source)


def test_a_sweep_takes_every_pair_once(store):
    made = batches(store)
    swept = [pair for t in range(made.n_batches) for pair in texts(made.eval_batch(t))]
    assert sorted(swept) == sorted((s.strip(), t.strip()) for pairs in FILES.values() for s, t in pairs)


def test_long_pairs_are_left_out_and_counted(store):
    made = batches(store, seq_len=16)
    assert made.n_too_long == 1
    with pytest.raises(InputError, match=r"none of .* pairs fits into length=8 tokens"):
        batches(store, seq_len=8, repeats=0 * store.pair_repeats({}))
    with pytest.raises(ConfigError, match="length=7 must be at least 8"):
        batches(store, seq_len=7)
