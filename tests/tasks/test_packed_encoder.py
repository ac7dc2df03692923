"""Texts read one after another in one row are what they are alone; what fills the row up changes nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.config import BERTConfig
from qkv.errors import ConfigError, ContextLengthError, InputError
from qkv.models import BERT
from qkv.nn import Varlen
from qkv.tasks import packed_encoder
from qkv.tasks.batch_encoder import BatchEncoder
from qkv.tasks.packed_encoder import PackedEncoder, can_pack, pack_by_length

N_WORDS, LONGEST = 31, 13


@pytest.fixture(scope="module")
def model():
    config = BERTConfig(vocab_size=N_WORDS, context_length=LONGEST, d_model=14, n_heads=2, n_layers=2)
    return BERT(config, seed=3).eval()


def texts(lengths, n_values=N_WORDS):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(n_values, (n,), generator=generator).tolist() for n in lengths]


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=7), has_pairs=st.booleans(), rounds=st.booleans())
def test_states_are_those_of_each_text_alone(model, lengths, has_pairs, rounds):
    reader = PackedEncoder(model)
    reader.compiled = rounds  # the sizes that a compiled graph is made for, without the graph
    rows, segments = texts(lengths), texts(lengths, 2)
    states = reader.states(rows, segments if has_pairs else None)
    assert states.shape == (len(rows), max(lengths), 14)
    for row, parts, found in zip(rows, segments, states, strict=True):
        alone = model(torch.tensor([row]), segments=torch.tensor([parts]) if has_pairs else None)[0]
        torch.testing.assert_close(found[: len(row)], alone, rtol=1e-4, atol=1e-5)
        assert not found[len(row) :].any()


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 2, 3]])
def test_what_the_next_run_writes_over_was_copied(model, lengths, monkeypatch):
    reader, given = PackedEncoder(model), torch.randn(128, 14)
    monkeypatch.setattr(reader, "_run", lambda *_: given)
    states = reader.states(texts(lengths))
    before = states.clone()
    given.zero_()
    assert torch.equal(states, before)
    assert before.any()


def test_what_is_sent_begins_at_multiples_of_16_bytes_in_one_piece(model):
    given = [np.arange(7, dtype=np.int32), np.arange(3), np.arange(0), np.arange(11)]
    sent = PackedEncoder(model)._sent(*given)
    assert [part.tolist() for part in sent] == [part.tolist() for part in given]
    assert [part.dtype for part in sent] == [torch.int32, torch.int64, torch.int64, torch.int64]
    starts = [part.storage_offset() * part.element_size() for part in sent]
    assert starts == [0, 32, 64, 64]
    assert len({part.untyped_storage().data_ptr() for part in sent}) == 1


def test_rows_have_every_text_once_and_no_more_than_fits(monkeypatch):
    monkeypatch.setattr(packed_encoder, "MAX_TOKENS_PER_ROW", 20)
    monkeypatch.setattr(packed_encoder, "MAX_TEXTS_PER_ROW", 3)
    lengths = [7, 1, 25, 3, 2, 1, 13, 5]
    rows = list(pack_by_length(lengths))
    assert sorted(place for row in rows for place in row) == list(range(8))
    assert all(len(row) <= 3 and (len(row) == 1 or sum(lengths[i] for i in row) <= 20) for row in rows)


def test_the_batches_of_a_gpu_are_those_of_a_cpu(model, monkeypatch):
    rows = texts([5, 13, 2, 7, 7, 11])
    plain = {
        place: batch.states[i, : len(rows[place])]
        for batch in BatchEncoder(model).batches(rows, None)
        for i, place in enumerate(batch.indices)
    }
    monkeypatch.setattr("qkv.tasks.batch_encoder.can_pack", lambda _: True)
    monkeypatch.setattr(packed_encoder, "MAX_TOKENS_PER_ROW", 20)
    for batch in BatchEncoder(model).batches(rows, None):
        for i, place in enumerate(batch.indices):
            n = len(rows[place])
            assert batch.ids[i, :n].tolist() == rows[place]
            assert batch.attention_mask[i].sum() == n
            torch.testing.assert_close(batch.states[i, :n], plain.pop(place), rtol=1e-4, atol=1e-5)
    assert not plain


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    "other", [{"n_kv_heads": 1}, {"d_value": 5}, {"sliding_window": 3}, {"scale_scores": False}], ids=str
)
def test_a_gpu_packs_where_torch_has_the_kernel_alone(model, other):
    def packs(config, kind=torch.bfloat16):
        made = BERT(config, seed=3)
        made.embedding.token.weight = torch.nn.Parameter(
            made.embedding.token.weight.detach().to(kind).as_subclass(OnGPU)
        )
        return can_pack(made)

    assert packs(model.config)
    assert not packs(model.config, torch.float32)
    assert not packs(model.config.replace(**other))


def test_a_cpu_packs_nothing_and_compiles_nothing(model):
    assert not can_pack(model)
    with pytest.raises(InputError, match="device='cuda', dtype='bfloat16'"):
        BatchEncoder(model).compile()


def test_packed_texts_are_one_row_and_none_longer_than_the_context(model):
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"\b2\b"):
        model(torch.ones(2, 7, dtype=torch.long), documents=Varlen(cu_seqlens=starts, max_seqlen=4))
    row = torch.ones(1, 7, dtype=torch.long)
    with pytest.raises(ConfigError, match="attention_mask"):
        model(row, attention_mask=row.bool(), documents=Varlen(cu_seqlens=starts, max_seqlen=4))
    with pytest.raises(ContextLengthError, match=r"\b14 tokens.*context_length.*\b13\b"):
        model(torch.ones(1, 7, dtype=torch.long), documents=Varlen(cu_seqlens=starts, max_seqlen=14))
