"""A whole generation costs its prompt's pass and every step after it, to the last FLOP."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from qkv.choices import Kernel
from qkv.config import preset
from qkv.cost import Phase, Workload, estimate, operations
from qkv.errors import ContextLengthError
from qkv.models import build
from qkv.nn import using

CONFIGS = [
    preset("gpt-nano"),
    preset("gpt-nano", sliding_window=11),
    preset("llama-nano"),
    preset("transformer-nano"),
    preset("t5-small", sliding_window=7),
    preset("rnn-nano", attention="additive"),
]


@given(st.sampled_from(CONFIGS), st.integers(1, 23), st.integers(1, 29), st.sampled_from([1, 3]))
def test_it_is_the_sum_of_its_steps(config, n, new, batch):
    source = None if config.family == "gpt" else 5
    work = Workload(batch=batch, length=n, new=new, mode="generate", source_length=source)
    steps = [work.replace(mode="prefill", new=None, predictions=1)]
    steps += [work.replace(mode="decode", new=None, length=n + i) for i in range(1, new)]
    apart = list(itertools.chain.from_iterable(operations(config, step) for step in steps))
    together = operations(config, work)
    for what in ("flops", "useful_flops", "elementwise_flops"):
        assert sum(getattr(one, what) for one in together) == sum(getattr(one, what) for one in apart)
    for fused in (True, False):
        assert sum(one.moved(fused=fused) for one in together) == sum(one.moved(fused=fused) for one in apart)
    assert sum(one.kernels * one.runs for one in together) == sum(one.kernels * one.runs for one in apart)
    assert len(together) <= 3 * len(operations(config, steps[0]))


def test_it_is_what_torch_counts():
    config, batch, n, new = preset("gpt-nano"), 3, 7, 5
    with torch.device("meta"):
        model = build(config)
        ids = torch.zeros(batch, n, dtype=torch.long)
    with using(model, Kernel.PLAIN), torch.no_grad(), FlopCounterMode(display=False) as count:
        cache = model.new_cache(batch=batch, capacity=n + new)
        model.unembedding(model.states(ids, cache=cache)[:, -1:])
        for _ in range(new - 1):
            model(ids[:, :1], cache=cache)
    found = estimate(config, batch=batch, length=n, new=new, mode="generate").flops
    assert found.forward == count.get_total_flops()


def test_an_encoder_decoder_reads_its_source_once():
    """Row 9.4: m²d + md² for the source, n²d + nd² + nmd for the target."""
    config = preset("transformer-nano", n_encoder_layers=1, n_decoder_layers=1, vocab_size=5)
    b, m, n, d = 2, 11, 7, config.d_model
    made = operations(config, Workload(batch=b, length=1, new=n, source_length=m, mode="generate"))

    def of(part):
        return sum(one.flops for one in made if one.part.startswith(part))

    assert of("encoder.blocks") == b * (24 * m * d**2 + 4 * m**2 * d)
    assert of("decoder.blocks.attention") == b * (8 * n * d**2 + 4 * d * n * (n + 1) // 2)
    assert of("decoder.blocks.cross") == b * (4 * n * d**2 + 4 * m * d**2 + 4 * n * m * d)
    assert of("decoder.blocks.feedforward") == b * 16 * n * d**2
    assert of("unembedding") == b * 2 * n * d * 5
    assert sum(one.flops for one in made) == sum(of(part) for part in ("encoder", "decoder", "unembedding"))


def test_a_very_long_generation_is_answered_at_once():
    config = preset("llama-3-8b", context_length=10**12)
    found = estimate(config, length=10**6, new=10**11, mode="generate", dtype="bfloat16")
    assert found.memory.cache == 131072 * (10**11 + 10**6 - 1)
    assert {one.phase for one in found.operations} == {Phase.PREFILL, Phase.DECODE}
    assert found.flops.decode < found.flops.forward


def test_more_tokens_than_the_context_holds_are_refused():
    with pytest.raises(ContextLengthError, match=r"length=1000 \+ new=26 - 1=1025 is more than .* context_length=1024"):
        estimate("gpt2", length=1000, new=26, mode="generate")
