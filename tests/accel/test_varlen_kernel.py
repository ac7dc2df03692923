"""Tests of the short-sequence attention kernel in Triton's interpreter, compared with separate sequences."""

import pytest
import torch
from torch.nn import functional as F

from qkv.accel.cuda.packed_encoder import PackedEncoder
from qkv.config import BERTConfig
from qkv.models import BERT
from qkv.nn import dot_product_attention
from tests.triton_marks import TRITON_INTERPRETER_MARKS

pytestmark = TRITON_INTERPRETER_MARKS


@pytest.mark.parametrize("longest", [5, 13, 128])
@pytest.mark.parametrize("n_heads", [1, 3])
def test_each_sequence_attends_only_to_itself(longest, n_heads, monkeypatch):
    from qkv.nn import varlen_kernel

    monkeypatch.setattr(varlen_kernel, "QUERIES", 16)
    lengths = [longest, 1, 0, min(17, longest), 3, 0, 0]
    generator = torch.Generator().manual_seed(longest)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    # Views of one tensor, as a fused QKV projection produces them.
    fused_qkv = torch.randn(sum(lengths), 3 * n_heads * 16, generator=generator)
    queries, keys, values = (part.unflatten(1, (n_heads, 16)) for part in fused_qkv.chunk(3, dim=1))
    got = varlen_kernel.short_varlen_attention(queries, keys, values, starts, longest)
    assert got.shape == queries.shape
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        sequence_qkv = (part[start:end].transpose(0, 1) for part in (queries, keys, values))
        torch.testing.assert_close(got[start:end].transpose(0, 1), F.scaled_dot_product_attention(*sequence_qkv))


ROWS = [[5, 7, 11] * 4 + [2], [3], [1, 2]]


def read(monkeypatch, d_model=32):
    """Returns a BERT and its hidden states of ROWS, packed as for a compiled graph on a GPU."""
    config = BERTConfig(vocab_size=31, context_length=13, d_model=d_model, n_heads=2, n_layers=2)
    model = BERT(config, seed=3).eval()
    encoder = PackedEncoder(model)
    encoder.compiled = True
    with monkeypatch.context() as changed:
        changed.setattr(dot_product_attention, "_can_use_varlen_kernel", lambda _: True)
        changed.setattr(dot_product_attention, "is_compiled_for_inference", lambda _: True)
        return model, encoder.encode(ROWS)


def test_a_bert_with_the_kernel_equals_each_text_run_separately(monkeypatch):
    model, states = read(monkeypatch)
    for row, found in zip(ROWS, states, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(found[: len(row)], model(torch.tensor([row]))[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("d_model", "short", "wanted"), [(32, 13, "own"), (32, 12, "torch"), (22, 13, "torch")])
def test_longer_sequences_and_other_widths_use_the_torch_kernel(d_model, short, wanted, monkeypatch):
    from torch.nn.attention import varlen

    from qkv.nn import varlen_kernel

    calls = []
    monkeypatch.setattr(dot_product_attention, "MAX_SHORT_SEQLEN", short)
    monkeypatch.setattr(varlen_kernel, "short_varlen_attention", lambda queries, *_: calls.append("own") or queries)
    monkeypatch.setattr(varlen, "varlen_attn", lambda queries, *_: calls.append("torch") or queries)
    read(monkeypatch, d_model)
    assert calls == [wanted] * 2
