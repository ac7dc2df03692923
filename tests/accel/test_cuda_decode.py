"""The Triton decode kernels equal the eager model for all supported shapes, on a GPU or in Triton's interpreter."""

from functools import partial

import pytest
import torch

from qkv.accel.cuda import decode_forward, decode_step
from qkv.accel.cuda.backend import reason_kernels_are_unsupported
from qkv.accel.cuda.decode_engine import CUDADecodeEngine
from qkv.accel.cuda.decode_forward import KernelWeights
from qkv.accel.cuda.decode_pool import CUDADecodeStepPool
from qkv.accel.cuda.decode_step import CUDADecodeStep
from qkv.choices import Activation, NormKind, PositionKind
from qkv.config import GPTConfig, SamplingConfig
from qkv.generation import generate
from qkv.generation.decode_engine import eager_engine
from qkv.generation.generate import generate_tokens
from qkv.models import GPT

GREEDY = SamplingConfig(temperature=0)
LLAMA = {
    "positions": PositionKind.ROTARY, "n_kv_heads": 2, "norm": NormKind.RMS, "gated": True,
    "activation": Activation.SILU, "attention_bias": False, "feed_forward_bias": False, "tie_embeddings": False,
}  # fmt: skip
SHAPES = {"GPT-2": {}, "Llama": LLAMA, "without final norm": {"activation": Activation.GELU, "final_norm": False}}


def small_gpt(device="cpu", dtype=torch.float32, **changes) -> GPT:
    settings = {"vocab_size": 157, "context_length": 67, "n_layers": 2, "d_model": 48, "n_heads": 6} | changes
    model = GPT(GPTConfig(**settings), seed=1).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(2)), alpha=0.1)
    return model.to(device, dtype)


def create_step(model: GPT) -> CUDADecodeStep:
    return CUDADecodeStep(model, KernelWeights(model), batch=1, capacity=64)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use blocks so small that a small model requires several programs and iterations per kernel."""
    monkeypatch.setattr(decode_forward, "KEY_BLOCK_ELEMENTS", 128)
    monkeypatch.setattr(decode_forward, "TARGET_PROGRAMS", 4)
    monkeypatch.setattr(decode_forward, "LARGE_MATRIX_BYTES", 2**14)
    monkeypatch.setattr(decode_forward, "OUT_PROJ_PROGRAMS", 16)
    monkeypatch.setattr(decode_step, "VOCAB_BLOCK", 64)


def assert_engines_agree(model, prompts, assert_agree, *, n_steps=2):
    engines = [
        CUDADecodeEngine(model, CUDADecodeStepPool(), batch=len(prompts), capacity=64),
        eager_engine(model, batch=len(prompts), capacity=64),
    ]
    actual, expected = (engine.prefill(prompts).float() for engine in engines)
    for _ in range(n_steps):
        ids = expected.argmax(-1)
        actual, expected = (engine.decode(ids).float() for engine in engines)
        assert_agree(actual, expected, dtype=model.embedding.token.weight.dtype)


@pytest.mark.long
@pytest.mark.parametrize("n_splits", [1, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_kernel_step_equals_the_eager_logits(kernel_device, shape, rows, n_splits, monkeypatch, assert_agree):
    monkeypatch.setattr(decode_forward, "_choose_n_splits", lambda *_: n_splits)
    prompts = torch.randint(157, (rows, 37), generator=torch.Generator().manual_seed(3)).tolist()
    assert_engines_agree(small_gpt(kernel_device, **SHAPES[shape]), prompts, assert_agree)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_16_bit_kernels_equal_the_eager_logits(kernel_device, dtype, rows, assert_agree):
    if dtype is torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies matrices of bfloat16 numbers as if they were integers")
    prompts = [[5, 7, 11], [13], [17, 19]][:rows]
    model = small_gpt(kernel_device, dtype, **LLAMA, n_layers=1)
    assert_engines_agree(model, prompts, assert_agree, n_steps=1)


@torch.inference_mode()
def test_a_model_smaller_than_a_programs_block_is_supported(kernel_device, monkeypatch, assert_agree):
    monkeypatch.setattr(decode_forward, "OUT_PROJ_PROGRAMS", 128)
    assert_engines_agree(small_gpt(kernel_device, d_model=22, n_heads=1, n_layers=1), [[5]], assert_agree, n_steps=1)


@pytest.mark.long
@pytest.mark.parametrize(
    "module_name", ["embedding.token", "blocks.0.attention.out_proj", "blocks.1.feed_forward.down_proj"]
)
@pytest.mark.parametrize("factor", [3e7, 1e12, float("nan")])
@torch.inference_mode()
def test_a_fixed_point_overflow_gives_nan(kernel_device, module_name, factor):
    model = small_gpt(kernel_device)
    ids, positions = torch.tensor([5], device=kernel_device), torch.tensor([0], device=kernel_device)
    assert create_step(model).decode_logits(ids, positions).isfinite().all()
    model.get_submodule(module_name).weight.mul_(factor)
    assert create_step(model).decode_logits(ids, positions).isnan().all()


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingConfig(temperature=0.9, top_k=20, top_p=0.9, seed=5)], ids=["greedy", "sampled"]
)
def test_decoding_several_tokens_per_sync_equals_eager_generation(kernel_device, sampling, monkeypatch):
    monkeypatch.setattr(decode_step, "TOKENS_PER_SYNC", 3)
    monkeypatch.setattr(CUDADecodeEngine, "tokens_per_sync", 3)
    model, pool = small_gpt(kernel_device, **LLAMA), CUDADecodeStepPool()

    def create_engine(model, *, batch, capacity):
        return CUDADecodeEngine(model, pool, batch=batch, capacity=capacity)

    run = partial(generate, model, [[3, 5, 7], [11]], max_new=5, sampling=sampling)
    first, again, expected = run(create_engine=create_engine), run(create_engine=create_engine), run()
    for sequence, repeated, eager in zip(first, again, expected, strict=True):
        assert sequence.new_ids == repeated.new_ids == eager.new_ids
        assert sequence.log_probabilities == pytest.approx(eager.log_probabilities, abs=1e-4)


def test_the_steps_of_a_generation_provide_their_logits(kernel_device):
    def create_engine(model, *, batch, capacity):
        return CUDADecodeEngine(model, CUDADecodeStepPool(), batch=batch, capacity=capacity)

    steps = generate_tokens(small_gpt(kernel_device), [[3, 5]], max_new=2, create_engine=create_engine)
    assert [step.logits.shape for step in steps] == [(1, 157)] * 2


def test_kernels_reject_unsupported_models():
    assert reason_kernels_are_unsupported(small_gpt()) is None
    assert reason_kernels_are_unsupported(small_gpt(**LLAMA)) is None
    assert "evaluation mode" in reason_kernels_are_unsupported(small_gpt().train())
    for changes, reason in (
        ({"sliding_window": 5}, "sliding_window"),
        ({"norm_position": "post"}, "norm_position"),
        ({"positions": "alibi"}, "'alibi'"),
        ({"positions": "concatenated"}, "'concatenated'"),
        ({"head_combination": "pooled"}, "'pooled'"),
    ):
        assert reason in reason_kernels_are_unsupported(small_gpt(**changes))
    for linear in ("gate_proj", "down_proj"):
        replaced = small_gpt(**LLAMA)
        setattr(replaced.blocks[1].feed_forward, linear, torch.nn.Identity())
        assert reason_kernels_are_unsupported(replaced) == f"blocks.1.feed_forward.{linear} is a Identity"
    observed = small_gpt()
    observed.blocks[0].attention.head_outputs.observe(lambda _: None)
    assert reason_kernels_are_unsupported(observed) == "blocks.0.attention.head_outputs is being recorded or changed"
    hooked = small_gpt()
    hooked.final_norm.register_forward_hook(lambda *_: None)
    assert reason_kernels_are_unsupported(hooked) == "final_norm has a hook"


def test_the_pool_reuses_a_step_until_a_weight_changes():
    model, pool = small_gpt(), CUDADecodeStepPool()

    def acquire_once(batch: int, capacity: int) -> CUDADecodeStep:
        step = pool.acquire(model, batch=batch, capacity=capacity)
        pool.release(step)
        return step

    first = acquire_once(1, 30)
    assert acquire_once(1, 67) is first, "both capacities are rounded to the context length"
    assert acquire_once(2, 30) is not first
    in_use = pool.acquire(model, batch=1, capacity=30)
    assert acquire_once(1, 30) is not in_use
    pool.release(in_use)
    with torch.no_grad():
        model.final_norm.weight += 1
    assert acquire_once(1, 30) is not first


def test_the_pool_discards_a_step_whose_cache_has_been_replaced():
    model, pool = small_gpt(), CUDADecodeStepPool()
    for rows, is_reused in ([0, 1, 1], False), ([0, 0], True):
        step = pool.acquire(model, batch=2, capacity=30)
        step.cache.reserve(batch=2, n_new=3)
        step.cache.reorder(torch.tensor(rows))
        step.cache.reorder(torch.tensor([0, 1]))
        pool.release(step)
        assert (pool.acquire(model, batch=2, capacity=30) is step) is is_reused


def test_all_seeds_share_one_cuda_graph(monkeypatch):
    step, captured_keys = create_step(small_gpt()), set()
    monkeypatch.setattr(step, "_replay", lambda key, _: captured_keys.add(key))
    for temperature, seed in ((0.5, 3), (0.5, 5), (0.7, 5)):
        step.decode_tokens(2, SamplingConfig(temperature=temperature, seed=seed))
    assert sorted(key.temperature for key in captured_keys) == [0.5, 0.7]
