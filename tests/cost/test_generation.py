"""The cost of a generation is the exact sum of its prefill and its decode steps."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from qkv.choices import AttentionKernel
from qkv.config import preset
from qkv.cost import Phase, Workload, estimate, list_operations
from qkv.errors import ContextLengthError
from qkv.models import build
from qkv.nn import use_attention_kernel

CONFIGS = [
    preset("gpt-nano"),
    preset("gpt-nano", sliding_window=11),
    preset("llama-nano"),
    preset("transformer-nano"),
    preset("t5-small", sliding_window=7),
    preset("rnn-nano", attention="additive"),
]


@given(st.sampled_from(CONFIGS), st.integers(1, 23), st.integers(1, 29), st.sampled_from([1, 3]))
def test_a_generation_is_the_sum_of_its_steps(config, n, new, batch):
    source = None if config.family == "gpt" else 5
    workload = Workload(batch_size=batch, seq_len=n, n_new_tokens=new, mode="generate", source_len=source)
    steps = [workload.replace(mode="prefill", n_new_tokens=None, logits_to_keep=1)]
    steps += [workload.replace(mode="decode", n_new_tokens=None, seq_len=n + i) for i in range(1, new)]
    separate = list(itertools.chain.from_iterable(list_operations(config, step) for step in steps))
    combined = list_operations(config, workload)
    for field in ("flops", "useful_flops", "elementwise_flops"):
        assert sum(getattr(op, field) for op in combined) == sum(getattr(op, field) for op in separate)
    for fused in (True, False):
        assert sum(op.elements_moved(fused=fused) for op in combined) == sum(
            op.elements_moved(fused=fused) for op in separate
        )
    assert sum(op.kernels * op.runs for op in combined) == sum(op.kernels * op.runs for op in separate)
    assert len(combined) <= 3 * len(list_operations(config, steps[0]))


def test_a_generation_equals_the_count_of_torch():
    config, batch, n, new = preset("gpt-nano"), 3, 7, 5
    with torch.device("meta"):
        model = build(config)
        ids = torch.zeros(batch, n, dtype=torch.long)
    with use_attention_kernel(model, AttentionKernel.EAGER), torch.no_grad(), FlopCounterMode(display=False) as count:
        cache = model.new_cache(batch=batch, capacity=n + new)
        model.unembedding(model.hidden_states(ids, cache=cache)[:, -1:])
        for _ in range(new - 1):
            model(ids[:, :1], cache=cache)
    result = estimate(config, batch_size=batch, seq_len=n, n_new_tokens=new, mode="generate").flops
    assert result.forward == count.get_total_flops()


def test_an_encoder_decoder_encodes_its_source_once():
    """m²d + md² for the source, n²d + nd² + nmd for the target."""
    config = preset("transformer-nano", n_encoder_layers=1, n_decoder_layers=1, vocab_size=5)
    b, m, n, d = 2, 11, 7, config.d_model
    operations = list_operations(
        config, Workload(batch_size=b, seq_len=1, n_new_tokens=n, source_len=m, mode="generate")
    )

    def part_flops(part):
        return sum(op.flops for op in operations if op.part.startswith(part))

    assert part_flops("encoder.blocks") == b * (24 * m * d**2 + 4 * m**2 * d)
    assert part_flops("decoder.blocks.attention") == b * (8 * n * d**2 + 4 * d * n * (n + 1) // 2)
    assert part_flops("decoder.blocks.cross_attention") == b * (4 * n * d**2 + 4 * m * d**2 + 4 * n * m * d)
    assert part_flops("decoder.blocks.feed_forward") == b * 16 * n * d**2
    assert part_flops("unembedding") == b * 2 * n * d * 5
    assert sum(op.flops for op in operations) == sum(part_flops(part) for part in ("encoder", "decoder", "unembedding"))


def test_a_very_long_generation_can_be_estimated():
    config = preset("llama-3-8b", context_length=10**12)
    result = estimate(config, seq_len=10**6, n_new_tokens=10**11, mode="generate", dtype="bfloat16")
    assert result.memory.cache == 131072 * (10**11 + 10**6 - 1)
    assert {op.phase for op in result.operations} == {Phase.PREFILL, Phase.DECODE}
    assert result.flops.decode < result.flops.forward


def test_generating_beyond_the_context_length_is_an_error():
    message = r"^seq_len=1000 \+ n_new_tokens=26 - 1 .*context_length=1024, got 1025$"
    with pytest.raises(ContextLengthError, match=message):
        estimate("gpt2", seq_len=1000, n_new_tokens=26, mode="generate")
