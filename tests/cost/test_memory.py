"""Bytes from a config are the bytes that the model takes."""

import functools

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qkv.choices import CellKind, Kernel, ScoreKind
from qkv.config import GPTConfig, preset
from qkv.cost import cache_bytes, estimate, parameters
from qkv.models import build
from qkv.nn import using
from qkv.nn.cache import SourceCache
from tests.cost.drawn import FAMILIES, source_of

CONFIGS = {
    "gpt-fused": (preset("gpt2", n_layers=3, d_model=60, n_heads=4, vocab_size=101), "fused", 41),
    "gpt-plain": (preset("gpt2", n_layers=3, d_model=60, n_heads=4, vocab_size=101), "plain", 41),
    "llama-fused": (preset("llama-nano", n_layers=3, vocab_size=101), "fused", 41),
    "llama-plain": (preset("llama-nano", n_layers=3, vocab_size=101), "plain", 41),
    "bert-fused": (preset("bert-nano", masked_word_head=True, vocab_size=101), "fused", 41),
    "t5-fused": (preset("t5-small", d_model=60, n_heads=4, d_head=15, d_ff=200, vocab_size=101), "fused", 41),
    "t5-plain": (preset("t5-small", d_model=60, n_heads=4, d_head=15, d_ff=200, vocab_size=101), "plain", 41),
    "transformer": (preset("transformer-nano", vocab_size=101), "fused", 41),
    "rnn-gru": (preset("rnn-nano", vocab_size=101), "fused", 41),
    "rnn-lstm": (preset("rnn-nano", vocab_size=101, cell="lstm", attention="additive"), "fused", 41),
}


def kept_bytes(model, run) -> int:
    """What autograd keeps: every stored tensor once, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()  # held, so that no storage is used twice
    del loss
    return sum(kept.values())


def loss_of(model, config, batch, n):
    ids = torch.randint(config.vocab_size, (batch, n))
    match config.family:
        case "gpt":
            logits = model(ids)
        case "bert":
            logits = model.masked_word_logits(model(ids))
        case _:
            logits = model(ids, ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_are_what_autograd_keeps(name):
    config, kernel, n = CONFIGS[name]
    model = build(config)
    with using(model, Kernel(kernel)):
        real = kept_bytes(model, lambda: loss_of(model, config, 3, n))
    ours = estimate(config, batch=3, length=n, kernel=kernel, backend="cpu", mode="train").memory.activations
    assert ours == pytest.approx(real, rel=0.06)


@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_gpt_s_activations_are_exact_to_a_hundredth(kernel):
    config, _, n = CONFIGS["gpt-fused"]
    model = build(config)
    with using(model, Kernel(kernel)):
        real = kept_bytes(model, lambda: loss_of(model, config, 3, n))
    assert estimate(config, batch=3, length=n, kernel=kernel, mode="train").memory.activations == pytest.approx(
        real, rel=0.01
    )


def test_checkpointing_keeps_block_inputs_and_one_block():
    config = preset("gpt2", n_layers=5, d_model=60, n_heads=4, vocab_size=101)
    model = build(config)
    forwards = [block.forward for block in model.blocks]
    for block, forward in zip(model.blocks, forwards, strict=True):
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    inputs = kept_bytes(model, lambda: loss_of(model, config, 3, 41))
    one_layer = estimate(config.replace(n_layers=1), batch=3, length=41, mode="train").memory.activations
    no_layers = one_layer - (
        estimate(config.replace(n_layers=2), batch=3, length=41, mode="train").memory.activations - one_layer
    )
    ours = estimate(config, batch=3, length=41, checkpointing=True, mode="train").memory.activations
    assert ours == pytest.approx(inputs + one_layer - no_layers, rel=0.05)


def test_a_chunked_loss_never_holds_all_logits():
    whole = estimate(preset("gpt2"), batch=8, length=1024, mode="train").memory
    chunked = estimate(preset("gpt2"), batch=8, length=1024, loss_chunk=1024, mode="train").memory
    logits = 8 * 1024 * 50257 * 4
    assert whole.activations - chunked.activations == logits
    assert whole.working == 2 * logits
    assert chunked.working < logits / 2


@pytest.mark.parametrize("family", ["gpt", "seq2seq"])
def test_cache_bytes_are_the_real_cache_s(family):
    @settings(max_examples=20)
    @given(FAMILIES[family])
    def check(config):
        with torch.device("meta"):
            model = build(config)
        cache = model.new_cache(batch=3, capacity=13)
        if family == "seq2seq":
            ids = torch.zeros(3, 7, dtype=torch.long, device="meta")
            model.decode(ids, model.encode(source_of(config, 3, 5)), cache=cache)
        assert cache.n_bytes == cache_bytes(config, batch=3, length=13, source_length=5)

    check()


@pytest.mark.parametrize(
    ("name", "length", "expected"),
    [("gpt2", 1024, 37_748_736), ("llama-2-7b", 4096, 2 * 2**30), ("llama-3-8b", 8192, 2**30)],
)
def test_the_known_caches_at_16_bits(name, length, expected):
    step = estimate(preset(name), batch=1, length=length, mode="decode", dtype="bfloat16")
    assert step.memory.cache == step.traffic.cache == expected


@pytest.mark.parametrize("cell", CellKind)
@pytest.mark.parametrize("attention", ScoreKind)
def test_an_rnn_s_cache_is_the_source_s_states_their_keys_and_its_own(cell, attention):
    config = preset("rnn-nano", cell=cell, attention=attention, n_decoder_layers=3)
    model = build(config)
    start, kept = model.encode(torch.zeros(2, 11, dtype=torch.long)), SourceCache()
    _, state = model.decode(torch.zeros(2, 7, dtype=torch.long), start.source, start.state, cache=kept)
    tensors = [start.source.states, *state, *(kept.kept or ())]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    assert cache_bytes(config, batch=2, length=7, source_length=11) == sum(storages.values())


@pytest.mark.parametrize(
    ("dtype", "weights", "optimizer"), [("float32", 4, 8), ("bfloat16", 2, 4), ("float16", 2, 4), ("mixed", 4, 8)]
)
def test_weights_gradients_and_moments_by_precision(dtype, weights, optimizer):
    n = parameters(preset("gpt2")).total
    held = estimate(preset("gpt2"), batch=1, length=8, dtype=dtype, mode="train").memory
    assert (held.weights, held.gradients, held.optimizer) == (weights * n, weights * n, optimizer * n)
    assert (held.casts > 0) == (dtype == "mixed")


def test_adamw_moves_28_bytes_a_parameter_and_muon_20():
    n = 124_439_808
    assert estimate(preset("gpt2"), batch=1, length=8, mode="train").traffic.update == 28 * n
    matrices = 12 * 12 * 768**2
    muon = estimate(preset("gpt2"), batch=1, length=8, optimizer="muon", mode="train")
    assert muon.traffic.update == 28 * (n - matrices) + 20 * matrices
    assert muon.memory.optimizer == 4 * (2 * (n - matrices) + matrices)
    assert muon.traffic.clipping == 12 * n


def test_muon_s_newton_schulz_is_counted():
    (of_matrices,) = {
        one.flops // one.runs for one in estimate("gpt2", batch=1, length=8, optimizer="muon", mode="train").launches
        if one.name == "Muon" and one.products[0].inner == 4 * 768
    }  # fmt: skip
    assert of_matrices == 5 * 2 * (2 * 768**2 * 4 * 768 + 768**3)


def test_an_average_of_the_weights_is_held_and_gradients_wait_for_an_accumulated_update():
    once = estimate(preset("gpt2"), batch=8, length=64, mode="train")
    averaged = estimate(preset("gpt2"), batch=8, length=64, averaging=True, mode="train")
    more = estimate(preset("gpt2"), batch=8, length=512, accumulation=2, mode="train").memory
    alone = estimate(preset("gpt2"), batch=8, length=512, mode="train").memory
    assert averaged.memory.peak - once.memory.peak == once.memory.weights == averaged.memory.averaged
    assert more.peak - alone.peak == more.gradients


def test_fsdp_holds_a_part_on_each_device_and_ddp_all():
    n = 124_439_808
    alone, ddp, fsdp = (
        estimate("gpt2", batch=2, length=64, n_devices=n_devices, sharding=sharding, mode="train")
        for n_devices, sharding in ((1, "ddp"), (7, "ddp"), (7, "fsdp"))
    )
    part = -(-n // 7)
    assert ddp.memory == alone.memory
    assert (fsdp.memory.weights, fsdp.memory.gradients, fsdp.memory.optimizer) == (4 * part, 4 * part, 8 * part)
    assert fsdp.traffic.update == 28 * part
    block = 12 * 768**2 + 13 * 768  # with biases and norms
    assert fsdp.memory.gathered == 4 * (n - 12 * block + 2 * block)
    assert alone.communication.total == 0
    assert ddp.communication.all_reduce == 2 * 6 * part * 4
    assert (fsdp.communication.all_gather, fsdp.communication.reduce_scatter) == (2 * 6 * part * 4, 6 * part * 4)


def test_inference_holds_weights_cache_ids_and_what_is_held_at_its_worst_moment():
    config = GPTConfig(vocab_size=101, context_length=7, d_model=12, n_heads=3, n_layers=2)
    held = estimate(config, batch=5, length=7, mode="prefill").memory
    streams = 4 * 12  # the stack's input, the block's, the stream after attention, its normed copy
    assert held.activations == 4 * 5 * 7 * (streams + 2 * 48)  # and the activation's two
    ids_and_positions = 8 * 5 * 7 + 8 * 7
    assert held.peak == held.weights + held.cache + held.activations + ids_and_positions
    assert (held.gradients, held.optimizer, held.working) == (0, 0, 0)
    assert estimate(config, batch=5, length=7, mode="forward").memory.cache == 0
