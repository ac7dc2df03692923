"""Masked batches have the configured fractions and correct next-sentence labels, and are functions of (seed, t)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.config.recipe import MaskingConfig
from qkv.data import prefetch
from qkv.data.masked_batches import TokenMasker
from qkv.data.sampler import keyed_uint64, keyed_uniform
from qkv.data.sentence_store import SentenceStore
from qkv.errors import ConfigError, InputError
from qkv.text import train_tokenizer
from tests.data.sentence_stores import batches, document, small_store, store_of, tokenizer, unmasked


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> SentenceStore:
    return small_store(tmp_path_factory.mktemp("sentences"))


def is_equal(first, second):
    names = ("ids", "segments", "attention_mask", "masked_positions", "targets", "next_sentence_labels")
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)


@pytest.mark.parametrize(("whole_word_masking", "n_batches"), [(False, 116), (True, 20)])
def test_the_fractions_of_a_million_masked_tokens_are_correct(source, whole_word_masking, n_batches):
    n_text_tokens = n_masked = n_mask_token = n_unchanged = n_random_next = n_rows = 0
    masked_batches = batches(source, seq_len=128, batch_size=500, whole_word_masking=whole_word_masking)
    for t in range(n_batches):
        batch = masked_batches.batch(t)
        used = batch.targets >= 0
        replacements = batch.ids.gather(1, batch.masked_positions)[used]
        n_text_tokens += int(batch.attention_mask.sum()) - 3 * len(batch.ids)
        n_masked += int(used.sum())
        n_mask_token += int((replacements == tokenizer().special_id(SpecialToken.MASK)).sum())
        n_unchanged += int((replacements == batch.targets[used]).sum())
        n_random_next += int(batch.next_sentence_labels.sum())
        n_rows += len(batch.ids)
    equal_by_chance = 0.1 / (tokenizer().vocab_size - 5)  # a random token may equal the original
    assert n_masked > (10**5 if whole_word_masking else 10**6)
    assert n_masked / n_text_tokens == pytest.approx(0.15, abs=0.001)
    assert n_mask_token / n_masked == pytest.approx(0.8, abs=0.003)
    assert n_unchanged / n_masked == pytest.approx(0.1 + equal_by_chance, abs=0.003)
    assert n_random_next * 2 == n_rows


def test_all_positions_are_masked_equally_often(source):
    masked_batches = batches(source, seq_len=23, batch_size=1000, short_sequence_fraction=0.0)
    n_masked, n_mask_token = torch.zeros(23), torch.zeros(23)
    for t in range(20):
        batch = masked_batches.batch(t)
        used = batch.targets >= 0
        is_mask_token = batch.ids.gather(1, batch.masked_positions) == tokenizer().special_id(SpecialToken.MASK)
        n_masked += torch.bincount(batch.masked_positions[used], minlength=23)
        n_mask_token += torch.bincount(batch.masked_positions[used & is_mask_token], minlength=23)
    middle = slice(3, 9)  # positions that are not special tokens in any row
    assert (n_masked[middle] / 20_000 - 0.15).abs().max() < 0.02
    assert (n_mask_token[middle] / n_masked[middle] - 0.8).abs().max() < 0.03


def test_special_tokens_are_never_masked_and_rows_have_equally_many_slots(source):
    batch = batches(source, seq_len=61, batch_size=211).batch(3)
    assert batch.masked_positions.shape == batch.targets.shape == (211, 9)  # ⌈0.15 · 58⌉
    special_ids = torch.tensor(sorted(tokenizer().special_ids))
    assert not torch.isin(batch.targets, special_ids).any()
    assert (batch.masked_positions[batch.targets >= 0] > 0).all()
    used = batch.targets >= 0
    assert (batch.masked_positions.diff(dim=1)[used[:, 1:]] > 0).all()
    assert batch.n_targets == int(used.sum())


def test_a_row_is_cls_a_sep_b_sep_and_padding(source):
    batch = batches(source, seq_len=61, batch_size=101).batch(1)
    pad_id, cls_id, sep_id = (
        tokenizer().special_id(role) for role in (SpecialToken.PAD, SpecialToken.CLS, SpecialToken.SEP)
    )
    for ids, segments, attention_mask in zip(unmasked(batch), batch.segments, batch.attention_mask, strict=True):
        n = int(attention_mask.sum())
        first, last = np.flatnonzero(ids == sep_id)
        assert ids[0] == cls_id
        assert last == n - 1
        assert (ids[n:] == pad_id).all()
        assert not attention_mask[n:].any()
        assert segments.tolist() == [0] * (first + 1) + [1] * (n - first - 1) + [0] * (61 - n)
        assert 1 < first < last - 1


def test_true_pairs_are_consecutive_and_random_pairs_are_from_different_documents(source):
    masked_batches = batches(source, seq_len=61, batch_size=500, short_sequence_fraction=0.0)
    for t in (0, 7):
        examples = masked_batches.rank_example_numbers(t)
        pairs, batch = masked_batches.pair_sampler(examples), masked_batches.batch(t)
        in_a, in_b = source.document_at(pairs.a_starts), source.document_at(pairs.b_starts)
        assert (in_a == source.document_at(pairs.a_starts + pairs.a_lengths - 1)).all()
        assert (in_b == source.document_at(pairs.b_starts + pairs.b_lengths - 1)).all()
        assert ((in_a != in_b) == pairs.is_random_next).all()
        is_true_next = ~pairs.is_random_next
        assert (pairs.a_starts + pairs.a_lengths == pairs.b_starts)[is_true_next].all()
        assert np.isin(pairs.b_starts, source.boundaries).all()
        assert batch.next_sentence_labels.tolist() == pairs.is_random_next.tolist()
        # The row contains the tokens of both segments.
        for row, ids in enumerate(unmasked(batch)):
            a = source.read_spans_without_separators(
                pairs.a_starts[row : row + 1], pairs.a_lengths[row : row + 1]
            ).tolist()
            b = source.read_spans_without_separators(
                pairs.b_starts[row : row + 1], pairs.b_lengths[row : row + 1]
            ).tolist()
            assert ids[1 : len(a) + 1].tolist() == a
            assert ids[len(a) + 2 : len(a) + 2 + len(b)].tolist() == b


def test_random_and_true_pairs_have_the_same_length_distribution(source):
    masked_batches = batches(source, seq_len=61, batch_size=4000)
    pairs = masked_batches.pair_sampler(masked_batches.rank_example_numbers(0))
    n = pairs.a_lengths + pairs.b_lengths
    true_lengths, random_lengths = n[~pairs.is_random_next], n[pairs.is_random_next]
    assert abs(true_lengths.mean() - random_lengths.mean()) < 2
    assert (n == 58).mean() > 0.6
    assert 0.05 < (n < 50).mean() < 0.35


def test_a_random_next_segment_of_a_duplicate_document_is_not_the_true_continuation(tmp_path):
    source = store_of(tmp_path, [*[document(1)] * 5, document(2)])
    masked_batches = batches(source, seq_len=61, batch_size=600)
    pairs = masked_batches.pair_sampler(masked_batches.rank_example_numbers(0))
    is_duplicate = (
        pairs.is_random_next & (source.document_at(pairs.a_starts) < 5) & (source.document_at(pairs.b_starts) < 5)
    )
    assert is_duplicate.any()
    length = source.clipped_document_spans(np.array([0]))[1][0]
    assert ((pairs.a_starts + pairs.a_lengths) % length != pairs.b_starts % length)[is_duplicate].all()


def test_identical_documents_are_an_error(tmp_path):
    source = store_of(tmp_path, ["Ab. Cd."] * 7)
    with pytest.raises(InputError, match=r"\b16\b"):
        batches(source).batch(0)


@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_batches_do_not_depend_on_the_number_of_workers(source, n_workers):
    expected = [batches(source).batch(t) for t in range(5, 13)]
    prefetched = list(prefetch(batches(source).batch, 5, stop=13, n_ahead=3, n_workers=n_workers))
    assert all(is_equal(a, b) for a, b in zip(prefetched, expected, strict=True))


@given(t=st.integers(0, 10**6), world_size=st.sampled_from([1, 2, 4, 7]))
def test_the_concatenated_rows_of_all_ranks_are_the_full_batch(source, t, world_size):
    full_batch = batches(source).batch(t)
    parts = [batches(source).batch(t, rank=rank, world_size=world_size) for rank in range(world_size)]
    for name in ("ids", "segments", "masked_positions", "targets", "next_sentence_labels"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(full_batch, name))


def test_seeds_steps_and_epochs_change_pairs_and_masks(source):
    first = batches(source, batch_size=211)
    n_examples = first.pair_sampler.n_examples
    second_epoch = batches(source, batch_size=n_examples).batch(1)
    assert n_examples > 60
    assert not is_equal(first.batch(0), first.batch(1))
    assert not torch.equal(first.batch(0).ids, batches(source, batch_size=211, seed=1).batch(0).ids)
    assert not torch.equal(second_epoch.ids, batches(source, batch_size=n_examples).batch(0).ids)
    # Different examples mask different positions of the same rows.
    ids = unmasked(first.batch(0))
    masker = TokenMasker(tokenizer(), MaskingConfig(), seq_len=61)
    rows = np.arange(len(ids))
    first_positions, second_positions = (masker(ids, rows + offset, seed=0).masked_positions for offset in (0, 10**6))
    assert (first_positions != second_positions).any(1).mean() > 0.95


def test_an_epoch_contains_nearly_all_tokens(source):
    masked_batches = batches(source, seq_len=61, next_sentence=False, short_sequence_fraction=0.0)
    n = masked_batches.pair_sampler.n_examples
    counts = np.zeros(source.n_text_tokens, int)
    for epoch in range(8):
        pairs = masked_batches.pair_sampler(np.arange(n) + epoch * n)
        assert (pairs.b_lengths == 0).all()
        for a, length in zip(pairs.a_starts, pairs.a_lengths, strict=True):
            counts[a : a + length] += 1
    assert (counts > 0).mean() > 0.99
    assert counts.mean() == pytest.approx(8, rel=0.05)


def test_whole_word_masking_masks_all_tokens_of_a_word(source):
    tokens = [tokenizer().id_to_token(token_id) for token_id in range(tokenizer().vocab_size)]
    is_continuation = np.array([token.startswith("##") for token in tokens])
    batch = batches(source, seq_len=61, batch_size=211, whole_word_masking=True, short_sequence_fraction=0.0).batch(0)
    n_continuations = 0
    for ids, masked_positions, targets in zip(
        unmasked(batch), batch.masked_positions.numpy(), batch.targets.numpy(), strict=True
    ):
        is_masked = np.zeros(61, bool)
        is_masked[masked_positions[targets >= 0]] = True
        for position in range(1, 61):
            if is_continuation[ids[position]]:
                assert is_masked[position] == is_masked[position - 1]
                n_continuations += is_masked[position]
    assert n_continuations > 300


def test_whole_word_masking_requires_tokens_that_mark_words(source):
    characters = train_tokenizer(TokenizerKind.CHARACTER, ["abc"], vocab_size=23, style=SpecialTokenStyle.BERT)
    with pytest.raises(InputError, match="whole_word_masking"):
        TokenMasker(characters, MaskingConfig(whole_word_masking=True), seq_len=61)


def test_batches_without_next_sentences_have_one_segment(source):
    batch = batches(source, next_sentence=False).batch(0)
    assert batch.next_sentence_labels is None
    assert not batch.segments.any()
    assert ((batch.ids == tokenizer().special_id(SpecialToken.SEP)).sum(1) == 1).all()
    assert next(batch.split(7)).next_sentence_labels is None


def test_micro_batches_keep_the_counts_of_the_batch(source):
    batch = batches(source, batch_size=23).batch(0)
    parts = list(batch.split(7))
    assert [len(part.ids) for part in parts] == [7, 7, 7, 2]
    assert sum(part.n_targets for part in parts) == batch.n_targets
    assert {part.full_batch_targets_per_row for part in parts} == {batch.n_targets / 23}
    assert batch.to("meta").masked_positions.is_meta


def test_a_single_document_is_an_error_with_next_sentences(tmp_path):
    source = store_of(tmp_path, [document(1)])
    with pytest.raises(InputError, match=r"\b2\b.*\b1\b.*--no-next-sentence.*masking\.next_sentence=false"):
        batches(source)
    assert batches(source, next_sentence=False).batch(0).n_targets > 0


def test_documents_that_cannot_be_split_are_skipped(tmp_path):
    texts = ["w", "Word1x. Yy1.", "x", "Word2x. Yy2.", "y", "Word3x. Yy3.", "d", "Word4x. Yy4."]
    source = store_of(tmp_path, texts)
    pairs = batches(source, batch_size=97).pair_sampler(np.arange(97))
    assert set(source.document_at(pairs.a_starts)) == {1, 3, 5, 7}
    with pytest.raises(InputError, match=r"\b2 tokens"):
        batches(store_of(tmp_path / "none", list("wx")))


def test_a_text_without_periods_is_sampled_everywhere(tmp_path):
    source = store_of(tmp_path, [document(1).replace(".", " ") * 9, document(2)])
    masked_batches = batches(source, batch_size=400)
    pairs = masked_batches.pair_sampler(masked_batches.rank_example_numbers(0))
    in_first = source.document_at(pairs.a_starts) == 0
    assert len(np.unique(pairs.a_starts[in_first])) > 200
    assert (pairs.a_lengths > 0).all()
    assert (pairs.b_lengths > 0).all()


def test_invalid_settings_and_batch_numbers_are_errors(source):
    with pytest.raises(ConfigError, match=r"\bseq_len .*\b5\b.*\b4$"):
        batches(source, seq_len=4)
    with pytest.raises(InputError, match=r"-1\b"):
        batches(source).batch(-1)
    with pytest.raises(ConfigError, match=r"mask_token_fraction=0\.95 .*random_token_fraction=0\.1\b"):
        MaskingConfig(mask_token_fraction=0.95)


@pytest.mark.parametrize("seq_len", [5, 6, 7, 11])
def test_the_shortest_rows_have_two_text_tokens_and_a_target(source, seq_len):
    batch = batches(source, seq_len=seq_len, batch_size=101, short_sequence_fraction=0.5).batch(0)
    assert (batch.attention_mask.sum(1) >= 5).all()
    assert ((batch.targets >= 0).sum(1) >= 1).all()


def test_keyed_random_numbers_are_uniform_and_uncorrelated():
    fractions = keyed_uniform(np.arange(10**5), 0, 1)
    assert np.histogram(fractions, bins=10, range=(0, 1))[0] == pytest.approx(10**4, rel=0.05)
    other = keyed_uniform(np.arange(10**5), 0, 2)
    assert abs(np.corrcoef(fractions, other)[0, 1]) < 0.015
    assert abs(np.corrcoef(fractions[1:], fractions[:-1])[0, 1]) < 0.015
    bits = np.unpackbits(keyed_uint64(np.arange(1000), 7).view(np.uint8))
    assert bits.mean() == pytest.approx(0.5, abs=0.01)
