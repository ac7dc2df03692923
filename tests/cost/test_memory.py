"""Memory computed from a config equals that of the built model."""

import functools

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qkv.choices import AttentionKernel, CellKind, NormKind, RNNAttentionScore
from qkv.config import GPTConfig, preset
from qkv.cost import cache_bytes, count_parameters, estimate
from qkv.models import build
from qkv.nn import use_attention_kernel
from qkv.nn.cache import LayerSourceCache
from tests.cost.config_strategies import FAMILIES, make_source

CONFIGS = {
    "gpt-fused": (preset("gpt2", n_layers=3, d_model=60, n_heads=4, vocab_size=101), "fused", 41),
    "gpt-eager": (preset("gpt2", n_layers=3, d_model=60, n_heads=4, vocab_size=101), "eager", 41),
    "llama-fused": (preset("llama-nano", n_layers=3, vocab_size=101), "fused", 41),
    "llama-eager": (preset("llama-nano", n_layers=3, vocab_size=101), "eager", 41),
    "bert-fused": (preset("bert-nano", masked_lm_head=True, vocab_size=101), "fused", 41),
    "t5-fused": (preset("t5-small", d_model=60, n_heads=4, d_head=15, d_ff=200, vocab_size=101), "fused", 41),
    "t5-eager": (preset("t5-small", d_model=60, n_heads=4, d_head=15, d_ff=200, vocab_size=101), "eager", 41),
    "transformer": (preset("transformer-nano", vocab_size=101), "fused", 41),
    "rnn-gru": (preset("rnn-nano", vocab_size=101), "fused", 41),
    "rnn-lstm": (preset("rnn-nano", vocab_size=101, cell="lstm", attention="additive"), "fused", 41),
}


def saved_bytes(model, run) -> int:
    """Bytes that autograd saves, each storage once and without the parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()  # kept alive, so that no storage is reused
    del loss
    return sum(saved.values())


def compute_loss(model, config, batch, n):
    ids = torch.randint(config.vocab_size, (batch, n))
    match config.family:
        case "gpt":
            logits = model(ids)
        case "bert":
            logits = model.masked_lm_logits(model(ids))
        case _:
            logits = model(ids, ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_equal_what_autograd_saves(name):
    config, kernel, n = CONFIGS[name]
    model = build(config)
    with use_attention_kernel(model, AttentionKernel(kernel)):
        actual = saved_bytes(model, lambda: compute_loss(model, config, 3, n))
    estimated = estimate(
        config, batch_size=3, seq_len=n, kernel=kernel, device_type="cpu", mode="train"
    ).memory.activations
    assert estimated == pytest.approx(actual, rel=0.06)


@pytest.mark.parametrize("kernel", ["eager", "fused"])
def test_activations_of_a_gpt_are_exact_to_one_percent(kernel):
    config, _, n = CONFIGS["gpt-fused"]
    model = build(config)
    with use_attention_kernel(model, AttentionKernel(kernel)):
        actual = saved_bytes(model, lambda: compute_loss(model, config, 3, n))
    assert estimate(config, batch_size=3, seq_len=n, kernel=kernel, mode="train").memory.activations == pytest.approx(
        actual, rel=0.01
    )


def test_checkpointing_saves_block_inputs_and_one_block():
    config = preset("gpt2", n_layers=5, d_model=60, n_heads=4, vocab_size=101)
    model = build(config)
    forwards = [block.forward for block in model.blocks]
    for block, forward in zip(model.blocks, forwards, strict=True):
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    inputs = saved_bytes(model, lambda: compute_loss(model, config, 3, 41))
    one_layer = estimate(config.replace(n_layers=1), batch_size=3, seq_len=41, mode="train").memory.activations
    no_layers = one_layer - (
        estimate(config.replace(n_layers=2), batch_size=3, seq_len=41, mode="train").memory.activations - one_layer
    )
    estimated = estimate(
        config, batch_size=3, seq_len=41, activation_checkpointing=True, mode="train"
    ).memory.activations
    assert estimated == pytest.approx(inputs + one_layer - no_layers, rel=0.05)


def test_a_chunked_loss_never_has_all_logits_in_memory():
    full = estimate(preset("gpt2"), batch_size=8, seq_len=1024, mode="train").memory
    chunked = estimate(preset("gpt2"), batch_size=8, seq_len=1024, loss_chunk_size=1024, mode="train").memory
    logits = 8 * 1024 * 50257 * 4
    assert full.activations - chunked.activations == logits
    assert full.temporaries == 2 * logits
    assert chunked.temporaries < logits / 2


@pytest.mark.parametrize("family", ["gpt", "seq2seq"])
def test_cache_bytes_equal_the_bytes_of_the_cache(family):
    @settings(max_examples=20)
    @given(FAMILIES[family])
    def check(config):
        with torch.device("meta"):
            model = build(config)
        cache = model.new_cache(batch=3, capacity=13)
        if family == "seq2seq":
            ids = torch.zeros(3, 7, dtype=torch.long, device="meta")
            model.decode(ids, model.encode(make_source(config, 3, 5)), cache=cache)
        assert cache.n_bytes == cache_bytes(config, batch_size=3, seq_len=13, source_len=5)

    check()


@pytest.mark.parametrize(
    ("name", "seq_len", "expected"),
    [("gpt2", 1024, 37_748_736), ("llama-2-7b", 4096, 2 * 2**30), ("llama-3-8b", 8192, 2**30)],
)
def test_published_cache_sizes_in_16_bits(name, seq_len, expected):
    step = estimate(preset(name), batch_size=1, seq_len=seq_len, mode="decode", dtype="bfloat16")
    assert step.memory.cache == step.traffic.cache == expected


@pytest.mark.parametrize("cell", CellKind)
@pytest.mark.parametrize("attention", RNNAttentionScore)
def test_the_cache_of_an_rnn_has_encoder_states_their_keys_and_recurrent_states(cell, attention):
    config = preset("rnn-nano", cell=cell, attention=attention, n_decoder_layers=3)
    model = build(config)
    start, source_cache = model.encode(torch.zeros(2, 11, dtype=torch.long)), LayerSourceCache()
    _, state = model.decode(torch.zeros(2, 7, dtype=torch.long), start.source, start.state, cache=source_cache)
    tensors = [start.source.states, *state, *(source_cache.keys_values or ())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert cache_bytes(config, batch_size=2, seq_len=7, source_len=11) == sum(storages.values())


@pytest.mark.parametrize(
    ("dtype", "weights", "optimizer"), [("float32", 4, 8), ("bfloat16", 2, 4), ("float16", 2, 4), ("mixed", 4, 8)]
)
def test_bytes_of_weights_gradients_and_optimizer_state_by_precision(dtype, weights, optimizer):
    n = count_parameters(preset("gpt2")).total
    memory = estimate(preset("gpt2"), batch_size=1, seq_len=8, dtype=dtype, mode="train").memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights * n, weights * n, optimizer * n)
    assert (memory.weight_casts > 0) == (dtype == "mixed")


def test_adamw_moves_28_bytes_per_parameter_and_muon_20():
    n = 124_439_808
    assert estimate(preset("gpt2"), batch_size=1, seq_len=8, mode="train").traffic.update == 28 * n
    matrices = 12 * 12 * 768**2
    muon = estimate(preset("gpt2"), batch_size=1, seq_len=8, optimizer="muon", mode="train")
    assert muon.traffic.update == 28 * (n - matrices) + 20 * matrices
    assert muon.memory.optimizer == 4 * (2 * (n - matrices) + matrices)
    assert muon.traffic.clipping == 12 * n


def test_the_newton_schulz_iterations_of_muon_are_counted():
    (flops_per_matrix,) = {
        op.flops // op.runs
        for op in estimate("gpt2", batch_size=1, seq_len=8, optimizer="muon", mode="train").launches
        if op.name == "Muon" and op.matmuls[0].inner == 4 * 768
    }
    assert flops_per_matrix == 5 * 2 * (2 * 768**2 * 4 * 768 + 768**3)


def test_an_ema_and_accumulated_gradients_add_to_the_peak():
    baseline = estimate(preset("gpt2"), batch_size=8, seq_len=64, mode="train")
    with_ema = estimate(preset("gpt2"), batch_size=8, seq_len=64, ema=True, mode="train")
    accumulated = estimate(preset("gpt2"), batch_size=8, seq_len=512, accumulation_steps=2, mode="train").memory
    single = estimate(preset("gpt2"), batch_size=8, seq_len=512, mode="train").memory
    assert with_ema.memory.peak - baseline.memory.peak == baseline.memory.weights == with_ema.memory.ema
    assert accumulated.peak - single.peak == accumulated.gradients


def test_fsdp_shards_the_state_and_ddp_replicates_it():
    n = 124_439_808
    single, ddp, fsdp = (
        estimate("gpt2", batch_size=2, seq_len=64, n_devices=n_devices, sharding=sharding, mode="train")
        for n_devices, sharding in ((1, "ddp"), (7, "ddp"), (7, "fsdp"))
    )
    shard = -(-n // 7)
    assert ddp.memory == single.memory
    assert (fsdp.memory.weights, fsdp.memory.gradients, fsdp.memory.optimizer) == (4 * shard, 4 * shard, 8 * shard)
    assert fsdp.traffic.update == 28 * shard
    block = 12 * 768**2 + 13 * 768  # with biases and norms
    assert fsdp.memory.gathered_weights == 4 * (n - 12 * block + 2 * block)
    assert single.communication.total == 0
    assert ddp.communication.all_reduce == 2 * 6 * shard * 4
    assert (fsdp.communication.all_gather, fsdp.communication.reduce_scatter) == (2 * 6 * shard * 4, 6 * shard * 4)


def test_the_peak_of_inference_is_weights_cache_ids_and_peak_activations():
    config = GPTConfig(vocab_size=101, context_length=7, d_model=12, n_heads=3, n_layers=2)
    memory = estimate(config, batch_size=5, seq_len=7, mode="prefill").memory
    # Input of the stack, input of the block, residual stream after attention, and its normalized copy.
    residual = 4 * 12
    assert memory.activations == 4 * 5 * 7 * (residual + 2 * 48)  # plus input and output of the activation
    ids_and_positions = 8 * 5 * 7 + 8 * 7
    assert memory.peak == memory.weights + memory.cache + memory.activations + ids_and_positions
    assert (memory.gradients, memory.optimizer, memory.temporaries) == (0, 0, 0)
    assert estimate(config, batch_size=5, seq_len=7, mode="forward").memory.cache == 0


@pytest.mark.parametrize("kind", NormKind)
def test_the_kinds_of_norms_save_the_expected_bytes(kind):
    def actual_minus_estimated(norm):
        config = preset("gpt2", n_layers=3, d_model=60, n_heads=4, vocab_size=101, norm=norm)
        model = build(config)
        actual = saved_bytes(model, lambda: compute_loss(model, config, 3, 41))
        return actual - estimate(config, batch_size=3, seq_len=41, device_type="cpu", mode="train").memory.activations

    assert actual_minus_estimated(kind) == actual_minus_estimated(NormKind.LAYER)
