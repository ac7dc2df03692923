"""A pass cut into pieces, with a cache, gives what one pass gives."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.tasks.verification.implementations import forward_in_chunks
from tests.agreement.families import close, gpts, rnns, seeds, seq2seqs, shaken, some_ids, some_source

LENGTH = 11
cuts = st.sets(st.integers(1, LENGTH - 1)).map(sorted)


@given(gpts(), seeds, cuts)
def test_gpt_in_pieces_equals_gpt_at_once(config, seed, cuts):
    model, ids = shaken(config, seed), some_ids(seed, 3, LENGTH)
    close(forward_in_chunks(model, ids, cuts), model(ids))


@given(seq2seqs(), seeds, cuts)
def test_seq2seq_in_pieces_equals_seq2seq_at_once(config, seed, cuts):
    model, ids, source = shaken(config, seed), some_ids(seed, 3, LENGTH), some_source(seed, 3, 5)
    close(forward_in_chunks(model, ids, cuts, source=source), model(source, ids))


@given(rnns(), seeds, cuts)
def test_rnn_in_pieces_equals_rnn_at_once(config, seed, cuts):
    model, ids, source = shaken(config, seed), some_ids(seed, 3, LENGTH), some_source(seed, 3, 5)
    close(forward_in_chunks(model, ids, cuts, source=source), model(source, ids))


@st.composite
def ragged_passes(draw):
    """For each pass, which columns of each of 3 rows hold a token; every row has one or more in the first."""
    passes = []
    for i in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 5))
        rows = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for _ in range(3)]
        if i == 0:
            for row in rows:
                row[draw(st.integers(0, n - 1))] = True
        passes.append(torch.tensor(rows))
    return passes


@given(gpts(), seeds, ragged_passes())
def test_rows_of_different_lengths_share_a_cache(config, seed, passes):
    """Padding anywhere, in any pass: each row's tokens get the logits they get alone."""
    model = shaken(config, seed)
    ids = [some_ids(seed + i, 3, attention_mask.shape[1]) for i, attention_mask in enumerate(passes)]
    cache = model.new_cache(batch=3)
    logits = [model(one, attention_mask=attention_mask, cache=cache) for one, attention_mask in zip(ids, passes, strict=True)]
    for row in range(3):
        own = [one[row, attention_mask[row]] for one, attention_mask in zip(ids, passes, strict=True)]
        got = [one[row, attention_mask[row]] for one, attention_mask in zip(logits, passes, strict=True)]
        close(torch.cat(got), model(torch.cat(own)[None])[0])
    assert cache.lengths.tolist() == [sum(int(attention_mask[row].sum()) for attention_mask in passes) for row in range(3)]


@given(gpts(), seeds, st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_selected_rows_go_on_as_if_they_had_been_there_from_the_start(config, seed, rows):
    model = shaken(config, seed)
    ids, more = some_ids(seed, 3, 5), some_ids(seed + 1, len(rows), 2)
    cache = model.new_cache(batch=3)
    model(ids, cache=cache)
    cache.reorder(torch.tensor(rows))
    close(model(more, cache=cache), model(torch.cat((ids[rows], more), dim=1))[:, 5:])


def test_a_ragged_cache_is_selected_with_its_lengths():
    model = shaken(GPTConfig(vocab_size=23, context_length=29, d_model=12, n_heads=3, n_layers=2,
                             positions=PositionKind.ROTARY))  # fmt: skip
    ids, more = some_ids(1, 2, 5), some_ids(2, 2, 3)
    attention_mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    cache = model.new_cache(batch=2)
    model(ids, attention_mask=attention_mask, cache=cache)
    cache.reorder(torch.tensor([1, 0]))
    logits = model(more, cache=cache)
    close(logits[0], model(torch.cat((ids[1, :2], more[0]))[None])[0, 2:])
    close(logits[1], model(torch.cat((ids[0], more[1]))[None])[0, 5:])
