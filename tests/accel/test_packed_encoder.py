"""Packed texts have the same states as single texts, and padding changes nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.accel.cuda.packed_encoder import PackedEncoder, pack_by_length, supports_varlen_attention
from qkv.config import BERTConfig
from qkv.errors import ConfigError, ContextLengthError, InputError
from qkv.models import BERT
from qkv.nn import Varlen
from qkv.tasks import packed_encoder
from qkv.tasks.batch_encoder import BERTBatchEncoder

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
def test_packed_states_equal_those_of_single_texts(model, lengths, has_pairs, rounds):
    encoder = PackedEncoder(model)
    encoder.compiled = rounds  # use the padded sizes of compiled graphs without compiling
    rows, segments = texts(lengths), texts(lengths, 2)
    states = encoder.encode(rows, segments if has_pairs else None)
    assert states.shape == (len(rows), max(lengths), 14)
    for row, segment_ids, packed in zip(rows, segments, states, strict=True):
        expected = model(torch.tensor([row]), segments=torch.tensor([segment_ids]) if has_pairs else None)[0]
        torch.testing.assert_close(packed[: len(row)], expected, rtol=1e-4, atol=1e-5)
        assert not packed[len(row) :].any()


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 2, 3]])
def test_the_result_is_a_copy_of_the_graph_output(model, lengths, monkeypatch):
    encoder, output = PackedEncoder(model), torch.randn(128, 14)
    monkeypatch.setattr(encoder, "_run", lambda *_: output)
    states = encoder.encode(texts(lengths))
    before = states.clone()
    output.zero_()
    assert torch.equal(states, before)
    assert before.any()


def test_arrays_are_copied_in_one_transfer_with_16_byte_alignment(model):
    arrays = [np.arange(7, dtype=np.int32), np.arange(3), np.arange(0), np.arange(11)]
    copies = PackedEncoder(model)._copy_to_device(*arrays)
    assert [copy.tolist() for copy in copies] == [array.tolist() for array in arrays]
    assert [copy.dtype for copy in copies] == [torch.int32, torch.int64, torch.int64, torch.int64]
    starts = [copy.storage_offset() * copy.element_size() for copy in copies]
    assert starts == [0, 32, 64, 64]
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


def test_packing_uses_every_text_once_within_the_limits(monkeypatch):
    monkeypatch.setattr(packed_encoder, "MAX_TOKENS_PER_ROW", 20)
    monkeypatch.setattr(packed_encoder, "MAX_TEXTS_PER_ROW", 3)
    lengths = [7, 1, 25, 3, 2, 1, 13, 5]
    rows = list(pack_by_length(lengths))
    assert sorted(index for row in rows for index in row) == list(range(8))
    assert all(len(row) <= 3 and (len(row) == 1 or sum(lengths[i] for i in row) <= 20) for row in rows)


def test_packed_batches_equal_padded_batches(model, monkeypatch):
    rows = texts([5, 13, 2, 7, 7, 11])
    expected = {
        index: batch.states[i, : len(rows[index])]
        for batch in BERTBatchEncoder(model).encode_batches(rows, None)
        for i, index in enumerate(batch.indices)
    }
    monkeypatch.setattr("qkv.tasks.batch_encoder.supports_varlen_attention", lambda _: True)
    monkeypatch.setattr(packed_encoder, "MAX_TOKENS_PER_ROW", 20)
    for batch in BERTBatchEncoder(model).encode_batches(rows, None):
        for i, index in enumerate(batch.indices):
            n = len(rows[index])
            assert batch.ids[i, :n].tolist() == rows[index]
            assert batch.attention_mask[i].sum() == n
            torch.testing.assert_close(batch.states[i, :n], expected.pop(index), rtol=1e-4, atol=1e-5)
    assert not expected


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    "other", [{"n_kv_heads": 1}, {"d_value": 5}, {"sliding_window": 3}, {"scale_scores": False}], ids=str
)
def test_packing_requires_a_supported_model(model, other):
    def packs(config, kind=torch.bfloat16):
        model = BERT(config, seed=3)
        model.embedding.token.weight = torch.nn.Parameter(
            model.embedding.token.weight.detach().to(kind).as_subclass(OnGPU)
        )
        return supports_varlen_attention(model)

    assert packs(model.config)
    assert not packs(model.config, torch.float32)
    assert not packs(model.config.replace(**other))


def test_a_cpu_supports_neither_packing_nor_compilation(model):
    assert not supports_varlen_attention(model)
    with pytest.raises(InputError, match="device='cuda', dtype='bfloat16'"):
        BERTBatchEncoder(model).compile()


def test_invalid_packed_inputs_raise(model):
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"\b2\b"):
        model(torch.ones(2, 7, dtype=torch.long), documents=Varlen(cu_seqlens=starts, max_seqlen=4))
    row = torch.ones(1, 7, dtype=torch.long)
    with pytest.raises(ConfigError, match="attention_mask"):
        model(row, attention_mask=row.bool(), documents=Varlen(cu_seqlens=starts, max_seqlen=4))
    with pytest.raises(ContextLengthError, match=r"\b14 tokens.*context_length.*\b13\b"):
        model(torch.ones(1, 7, dtype=torch.long), documents=Varlen(cu_seqlens=starts, max_seqlen=14))
