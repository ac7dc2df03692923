"""Shares are what they are said to be; a wrong next sentence is wrong; batch t is a pure function of (seed, t)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.config.masking import MaskingConfig
from qkv.data import prefetch
from qkv.data.keyed_random import keyed_uint64, keyed_uniform
from qkv.data.masking import TokenMasker
from qkv.data.sentence_store import SentenceStore
from qkv.errors import ConfigError, InputError
from qkv.text import train_tokenizer
from tests.data.sentence_stores import batches, document, small_store, store_of, tokenizer, unmasked


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> SentenceStore:
    return small_store(tmp_path_factory.mktemp("sentences"))


def same(first, second):
    names = ("ids", "segments", "attention_mask", "masked_positions", "targets", "next_sentence_labels")
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)


@pytest.mark.parametrize(("whole_word_masking", "n_batches"), [(False, 116), (True, 20)])
def test_a_million_hidden_words_have_the_shares_they_should(source, whole_word_masking, n_batches):
    n_text_tokens = n_hidden = n_mask = n_itself = n_wrong = n_rows = 0
    maker = batches(source, seq_len=128, batch_size=500, whole_word_masking=whole_word_masking)
    for t in range(n_batches):
        batch = maker.batch(t)
        used = batch.targets >= 0
        shown = batch.ids.gather(1, batch.masked_positions)[used]
        n_text_tokens += int(batch.attention_mask.sum()) - 3 * len(batch.ids)
        n_hidden += int(used.sum())
        n_mask += int((shown == tokenizer().special_id(SpecialToken.MASK)).sum())
        n_itself += int((shown == batch.targets[used]).sum())
        n_wrong += int(batch.next_sentence_labels.sum())
        n_rows += len(batch.ids)
    by_chance = 0.1 / (tokenizer().vocab_size - 5)  # a random word may be the word itself
    assert n_hidden > (10**5 if whole_word_masking else 10**6)
    assert n_hidden / n_text_tokens == pytest.approx(0.15, abs=0.001)
    assert n_mask / n_hidden == pytest.approx(0.8, abs=0.003)
    assert n_itself / n_hidden == pytest.approx(0.1 + by_chance, abs=0.003)
    assert n_wrong * 2 == n_rows


def test_every_place_and_word_is_hidden_equally_often(source):
    maker = batches(source, seq_len=23, batch_size=1000, short_sequence_fraction=0.0)
    n_hidden, n_masked = torch.zeros(23), torch.zeros(23)
    for t in range(20):
        batch = maker.batch(t)
        used = batch.targets >= 0
        is_mask = batch.ids.gather(1, batch.masked_positions) == tokenizer().special_id(SpecialToken.MASK)
        n_hidden += torch.bincount(batch.masked_positions[used], minseq_len=23)
        n_masked += torch.bincount(batch.masked_positions[used & is_mask], minseq_len=23)
    middle = slice(3, 9)  # where no row has its separators yet
    assert (n_hidden[middle] / 20_000 - 0.15).abs().max() < 0.02
    assert (n_masked[middle] / n_hidden[middle] - 0.8).abs().max() < 0.03


def test_specials_are_never_hidden_and_slots_stay_the_same(source):
    batch = batches(source, seq_len=61, batch_size=211).batch(3)
    assert batch.masked_positions.shape == batch.targets.shape == (211, 9)  # ⌈0.15 · 58⌉
    specials = torch.tensor(sorted(tokenizer().special_ids))
    assert not torch.isin(batch.targets, specials).any()
    places = batch.masked_positions[batch.targets >= 0]
    assert (places > 0).all()
    used = batch.targets >= 0
    assert (batch.masked_positions.diff(dim=1)[used[:, 1:]] > 0).all()
    assert batch.n_targets == int(used.sum())


def test_a_row_is_cls_a_sep_b_sep_and_padding(source):
    batch = batches(source, seq_len=61, batch_size=101).batch(1)
    pad, classify, separate = (
        tokenizer().special_id(role) for role in (SpecialToken.PAD, SpecialToken.CLS, SpecialToken.SEP)
    )
    for ids, segments, attention_mask in zip(unmasked(batch), batch.segments, batch.attention_mask, strict=True):
        n = int(attention_mask.sum())
        first, last = np.flatnonzero(ids == separate)
        assert ids[0] == classify
        assert last == n - 1
        assert (ids[n:] == pad).all()
        assert not attention_mask[n:].any()
        assert segments.tolist() == [0] * (first + 1) + [1] * (n - first - 1) + [0] * (61 - n)
        assert 1 < first < last - 1


def test_right_pairs_go_on_and_wrong_ones_are_from_another_document(source):
    maker = batches(source, seq_len=61, batch_size=500, short_sequence_fraction=0.0)
    for t in (0, 7):
        examples = maker.example_indices(t)
        pairs, batch = maker.pair_sampler(examples), maker.batch(t)
        in_a, in_b = source.document_at(pairs.a), source.document_at(pairs.b)
        assert (in_a == source.document_at(pairs.a + pairs.n_a - 1)).all()
        assert (in_b == source.document_at(pairs.b + pairs.n_b - 1)).all()
        assert ((in_a != in_b) == pairs.is_random_next).all()
        right = ~pairs.is_random_next
        assert (pairs.a + pairs.n_a == pairs.b)[right].all()
        assert np.isin(pairs.b, source.boundaries).all()
        assert batch.next_sentence_labels.tolist() == pairs.is_random_next.tolist()
        # The row holds those words.
        for row, ids in enumerate(unmasked(batch)):
            a = source.read_spans(pairs.a[row : row + 1], pairs.n_a[row : row + 1]).tolist()
            b = source.read_spans(pairs.b[row : row + 1], pairs.n_b[row : row + 1]).tolist()
            assert ids[1 : len(a) + 1].tolist() == a
            assert ids[len(a) + 2 : len(a) + 2 + len(b)].tolist() == b


def test_length_does_not_tell_right_from_wrong(source):
    maker = batches(source, seq_len=61, batch_size=4000)
    pairs = maker.pair_sampler(maker.example_indices(0))
    n = pairs.n_a + pairs.n_b
    right, wrong = n[~pairs.is_random_next], n[pairs.is_random_next]
    assert abs(right.mean() - wrong.mean()) < 2
    assert (n == 58).mean() > 0.6
    assert 0.05 < (n < 50).mean() < 0.35


def test_a_document_that_is_there_twice_gives_no_wrong_sentence_that_is_right(tmp_path):
    source = store_of(tmp_path, [*[document(1)] * 5, document(2)])
    maker = batches(source, seq_len=61, batch_size=600)
    pairs = maker.pair_sampler(maker.example_indices(0))
    is_twice = pairs.is_random_next & (source.document_at(pairs.a) < 5) & (source.document_at(pairs.b) < 5)
    assert is_twice.any()  # another document, but of the same text: not what follows, then
    length = source.document_span(np.array([0]))[1][0]
    assert ((pairs.a + pairs.n_a) % length != pairs.b % length)[is_twice].all()


def test_documents_that_are_all_alike_are_said(tmp_path):
    source = store_of(tmp_path, ["Ab. Cd."] * 7)
    with pytest.raises(InputError, match="16 draws from other documents all gave the very sentence that follows"):
        batches(source).batch(0)


@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_batches(source, n_workers):
    expected = [batches(source).batch(t) for t in range(5, 13)]
    maker = batches(source)
    made = list(prefetch(maker.batch, 5, stop=13, n_ahead=3, n_workers=n_workers))
    assert all(same(a, b) for a, b in zip(made, expected, strict=True))


@given(t=st.integers(0, 10**6), world_size=st.sampled_from([1, 2, 4, 7]))
def test_the_ranks_rows_are_the_batch_of_one(source, t, world_size):
    whole = batches(source).batch(t)
    parts = [batches(source).batch(t, rank=rank, world_size=world_size) for rank in range(world_size)]
    for name in ("ids", "segments", "masked_positions", "targets", "next_sentence_labels"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_seeds_steps_and_epochs_change_pairs_and_masks(source):
    first = batches(source, batch_size=211)
    n_examples = first.pair_sampler.n_examples
    again = batches(source, batch_size=n_examples).batch(1)  # the second epoch whole
    assert n_examples > 60
    assert not same(first.batch(0), first.batch(1))
    assert not torch.equal(first.batch(0).ids, batches(source, batch_size=211, seed=1).batch(0).ids)
    assert not torch.equal(again.ids, batches(source, batch_size=n_examples).batch(0).ids)
    # One row, two epochs: other words hidden.
    ids = unmasked(first.batch(0))
    masking = TokenMasker(tokenizer(), MaskingConfig(), seq_len=61)
    rows = np.arange(len(ids))
    assert (masking(ids, rows, seed=0).masked_positions != masking(ids, rows + 10**6, seed=0).masked_positions).any(
        1
    ).mean() > 0.95


def test_an_epoch_sees_nearly_every_word(source):
    maker = batches(source, seq_len=61, next_sentence=False, short_sequence_fraction=0.0)
    n = maker.pair_sampler.n_examples
    seen = np.zeros(source.n_text_tokens, int)
    for epoch in range(8):
        pairs = maker.pair_sampler(np.arange(n) + epoch * n)
        assert (pairs.n_b == 0).all()
        for a, length in zip(pairs.a, pairs.n_a, strict=True):
            seen[a : a + length] += 1
    assert (seen > 0).mean() > 0.99
    assert seen.mean() == pytest.approx(8, rel=0.05)


def test_whole_words_are_hidden_whole(source):
    tokens = [tokenizer().id_to_token(number) for number in range(tokenizer().vocab_size)]
    goes_on = np.array([token.startswith("##") for token in tokens])
    batch = batches(source, seq_len=61, batch_size=211, whole_word_masking=True, short_sequence_fraction=0.0).batch(0)
    n_long = 0
    for ids, places, targets in zip(
        unmasked(batch), batch.masked_positions.numpy(), batch.targets.numpy(), strict=True
    ):
        hidden = np.zeros(61, bool)
        hidden[places[targets >= 0]] = True
        for place in range(1, 61):
            if goes_on[ids[place]]:
                assert hidden[place] == hidden[place - 1]
                n_long += hidden[place]
    assert n_long > 300


def test_whole_words_need_pieces_that_show_words(source):
    letters = train_tokenizer(TokenizerKind.CHARACTER, ["abc"], vocab_size=23, style=SpecialTokenStyle.BERT)
    with pytest.raises(InputError, match="do not show where a word begins"):
        TokenMasker(letters, MaskingConfig(whole_word_masking=True), seq_len=61)


def test_without_next_sentences_there_is_one_segment(source):
    batch = batches(source, next_sentence=False).batch(0)
    assert batch.next_sentence_labels is None
    assert not batch.segments.any()
    assert ((batch.ids == tokenizer().special_id(SpecialToken.SEP)).sum(1) == 1).all()
    assert next(batch.split(7)).next_sentence_labels is None


def test_parts_of_a_batch_keep_its_counts(source):
    batch = batches(source, batch_size=23).batch(0)
    parts = list(batch.split(7))
    assert [len(part.ids) for part in parts] == [7, 7, 7, 2]
    assert sum(part.n_targets for part in parts) == batch.n_targets
    assert {part.targets_per_row for part in parts} == {batch.n_targets / 23}
    assert batch.to("meta").masked_positions.is_meta


def test_one_document_is_refused_with_a_way_out(tmp_path):
    source = store_of(tmp_path, [document(1)])
    with pytest.raises(InputError, match=r"there is 1: give several files.*masking.next_sentence=false"):
        batches(source)
    assert batches(source, next_sentence=False).batch(0).n_targets > 0


def test_documents_too_short_to_part_are_passed_over(tmp_path):
    texts = ["w", "Word1x. Yy1.", "x", "Word2x. Yy2.", "y", "Word3x. Yy3.", "d", "Word4x. Yy4."]
    source = store_of(tmp_path, texts)
    pairs = batches(source, batch_size=97).pair_sampler(np.arange(97))
    assert set(source.document_at(pairs.a)) == {1, 3, 5, 7}
    with pytest.raises(InputError, match="no document has two words"):
        batches(store_of(tmp_path / "none", list("wx")))


def test_a_text_without_full_stops_is_seen_everywhere(tmp_path):
    source = store_of(tmp_path, [document(1).replace(".", " ") * 9, document(2)])
    maker = batches(source, batch_size=400)
    pairs = maker.pair_sampler(maker.example_indices(0))
    in_first = source.document_at(pairs.a) == 0
    assert len(np.unique(pairs.a[in_first])) > 200
    assert (pairs.n_a > 0).all()
    assert (pairs.n_b > 0).all()


def test_what_cannot_be_is_refused(source):
    with pytest.raises(ConfigError, match="seq_len=4 must be 5 or more"):
        batches(source, seq_len=4)
    with pytest.raises(InputError, match="batch -1"):
        batches(source).batch(-1)
    with pytest.raises(
        ConfigError, match=r"mask_token_fraction=0.95 and random_token_fraction=0.1 together are more than 1"
    ):
        MaskingConfig(mask_token_fraction=0.95)


@pytest.mark.parametrize("length", [5, 6, 7, 11])
def test_the_shortest_rows_have_two_words_and_a_target(source, length):
    batch = batches(source, seq_len=length, batch_size=101, short_sequence_fraction=0.5).batch(0)
    assert (batch.attention_mask.sum(1) >= 5).all()
    assert ((batch.targets >= 0).sum(1) >= 1).all()


def test_draws_are_even_and_unrelated():
    fractions = keyed_uniform(np.arange(10**5), 0, 1)
    assert np.histogram(fractions, bins=10, range=(0, 1))[0] == pytest.approx(10**4, rel=0.05)
    other = keyed_uniform(np.arange(10**5), 0, 2)
    assert abs(np.corrcoef(fractions, other)[0, 1]) < 0.015
    assert abs(np.corrcoef(fractions[1:], fractions[:-1])[0, 1]) < 0.015
    bits = np.unpackbits(keyed_uint64(np.arange(1000), 7).view(np.uint8))
    assert bits.mean() == pytest.approx(0.5, abs=0.01)
