"""Packed texts have the same states as single texts, and padding changes nothing."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from qkv.accel.cuda import packed_encoder
from qkv.accel.cuda.backend import reason_varlen_is_unsupported
from qkv.accel.cuda.packed_encoder import PackedEncoder, pack_by_length
from qkv.config import BERTConfig
from qkv.engines import encode_engine
from qkv.errors import ContextLengthError, InputError
from qkv.models import BERT

N_WORDS, LONGEST, D_MODEL = 31, 13, 32
CONFIG = BERTConfig(vocab_size=N_WORDS, context_length=LONGEST, d_model=D_MODEL, n_heads=2, n_layers=2)


def texts(lengths, n_values=N_WORDS):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(n_values, (n,), generator=generator).tolist() for n in lengths]


def attend_to_each_text(queries, keys, values, mask):
    """Reference for `varlen_attention`, whose kernel in PyTorch requires a GPU."""
    outputs = torch.zeros_like(queries)
    for start, end in zip(mask.cu_seqlens[:-1].tolist(), mask.cu_seqlens[1:].tolist(), strict=True):
        if end > start:
            text_qkv = (part[start:end].transpose(0, 1) for part in (queries, keys, values))
            outputs[start:end] = F.scaled_dot_product_attention(*text_qkv).transpose(0, 1)
    return outputs


@contextmanager
def reference_attention_on_cpu(device):
    """PyTorch's kernel for texts of different lengths requires a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(packed_encoder, "varlen_attention", attend_to_each_text)
        yield


def small_bert(device):
    """A BERT in bfloat16 on a GPU, as PyTorch's kernel requires, and in float32 on a CPU."""
    return BERT(CONFIG, seed=3).eval().to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


@pytest.fixture(scope="module")
def model(device):
    return small_bert(device)


@torch.no_grad()
def assert_equals_single_texts(model, states, rows, segments, assert_agree):
    device = model.embedding.token.weight.device
    assert states.shape == (len(rows), max(map(len, rows)), D_MODEL)
    for i, (row, packed) in enumerate(zip(rows, states, strict=True)):
        row_segments = None if segments is None else torch.tensor([segments[i]], device=device)
        expected = model(torch.tensor([row], device=device), segments=row_segments)[0]
        assert_agree(packed[: len(row)], expected)
        assert not packed[len(row) :].any()


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=7), has_pairs=st.booleans(), rounds=st.booleans())
def test_packed_states_equal_those_of_single_texts(model, device, assert_agree, lengths, has_pairs, rounds):
    encoder = PackedEncoder(model)
    encoder.compiled = rounds  # use the padded sizes of compiled graphs without compiling
    rows, segments = texts(lengths), texts(lengths, 2) if has_pairs else None
    with reference_attention_on_cpu(device):
        states = encoder.encode(rows, segments)
    assert_equals_single_texts(model, states, rows, segments, assert_agree)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
def test_a_compiled_encoder_with_the_kernel_for_short_texts_equals_single_texts(
    kernel_device, assert_agree, monkeypatch
):
    model, rows = small_bert(kernel_device), texts([LONGEST, 1, 2])
    encoder = PackedEncoder(model, compiled=kernel_device.type == "cuda")
    if kernel_device.type == "cpu":  # run as if the model were compiled for a GPU
        encoder.compiled = True
        monkeypatch.setattr(packed_encoder, "is_compiled_for_inference", lambda _: True)
    for _ in range(3):  # on a GPU, later calls replay a CUDA graph
        assert_equals_single_texts(model, encoder.encode(rows), rows, None, assert_agree)


@pytest.mark.parametrize(
    ("d_head", "max_short", "compiled", "expected"),
    [
        (16, LONGEST, True, "short"),
        (16, LONGEST - 1, True, "torch"),
        (8, LONGEST, True, "torch"),
        (16, LONGEST, False, "torch"),
    ],
)
def test_longer_texts_other_widths_and_eager_code_use_the_torch_kernel(
    kernel_device, d_head, max_short, compiled, expected, monkeypatch
):
    from torch.nn.attention import varlen

    from qkv.accel.cuda import varlen_kernel

    monkeypatch.setattr(packed_encoder, "MAX_SHORT_SEQLEN", max_short)
    monkeypatch.setattr(packed_encoder, "is_compiled_for_inference", lambda _: compiled)
    monkeypatch.setattr(varlen_kernel, "short_varlen_attention", lambda *_: "short")
    monkeypatch.setattr(varlen, "varlen_attn", lambda queries, *_: calls.append("torch") or queries)
    calls = []
    queries = torch.zeros(LONGEST, 2, d_head)
    mask = packed_encoder.VarlenMask(cu_seqlens=torch.tensor([0, LONGEST]), max_seqlen=LONGEST)
    result = packed_encoder.varlen_attention(queries, queries, queries, mask)
    assert (calls or [result]) == [expected]


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 2, 3]])
def test_the_result_is_a_copy_of_the_graph_output(model, device, lengths, monkeypatch):
    encoder, output = PackedEncoder(model), torch.randn(128, D_MODEL, device=device)
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_kv_heads": 1}, "key/value heads"),
        ({"d_value": 5}, "equal width"),
        ({"sliding_window": 3}, "sliding_window"),
        ({"scale_scores": False}, "scale_scores"),
        ({"positions": "rotary"}, "'rotary'"),
        ({"d_head": 12}, "multiple of 8"),
        ({"d_head": 264}, "at most 256"),
    ],
    ids=str,
)
def test_packing_requires_a_supported_model(changes, reason):
    model = BERT(CONFIG).eval()
    assert "16-bit" in reason_varlen_is_unsupported(model)
    assert reason_varlen_is_unsupported(model.bfloat16()) is None
    assert "evaluation mode" in reason_varlen_is_unsupported(model.train())
    assert reason in reason_varlen_is_unsupported(BERT(CONFIG.replace(**changes)).eval().bfloat16())


def test_a_cpu_does_not_support_compilation():
    with torch.no_grad(), pytest.raises(InputError, match="device='cuda', dtype='bfloat16'"):
        encode_engine(BERT(CONFIG).eval(), compile=True)


def test_a_text_longer_than_the_context_is_rejected(model):
    with pytest.raises(ContextLengthError, match=r"\b14 tokens.*context_length.*\b13\b"):
        PackedEncoder(model).encode(texts([LONGEST + 1]))
