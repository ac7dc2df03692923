"""The Triton decode kernels, run in Triton's interpreter, equal the eager model for all supported shapes."""

from importlib import import_module

import pytest
import torch

from qkv.accel.cpu.prepacked_weights import prepack_weights
from qkv.accel.cuda import decode_forward as cuda_decode_forward
from qkv.accel.cuda import decode_pool as cuda_decode
from qkv.accel.cuda import decode_step as cuda_decode_step
from qkv.choices import Activation, NormKind, PositionKind
from qkv.config import GPTConfig, SamplingConfig
from qkv.generation import generate
from qkv.models import GPT
from tests.triton_marks import requires_triton

module = import_module("qkv.generation.generate")  # the package has a function of that name
GREEDY = SamplingConfig(temperature=0)


def small_gpt(**changes) -> GPT:
    settings = {"vocab_size": 157, "context_length": 67, "n_layers": 2, "d_model": 48, "n_heads": 6} | changes
    model = GPT(GPTConfig(**settings), seed=1).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(2)), alpha=0.1)
    return model


LLAMA = {
    "positions": PositionKind.ROTARY, "n_kv_heads": 2, "norm": NormKind.RMS, "gated": True,
    "activation": Activation.SILU, "attention_bias": False, "feed_forward_bias": False, "tie_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cuda_decode_forward, "KEY_BLOCK_ELEMENTS", 128)
    monkeypatch.setattr(cuda_decode_forward, "TARGET_PROGRAMS", 4)
    monkeypatch.setattr(cuda_decode_forward, "LARGE_MATRIX_BYTES", 2**14)
    monkeypatch.setattr(cuda_decode_forward, "OUT_PROJ_PROGRAMS", 16)
    monkeypatch.setattr(cuda_decode_step, "VOCAB_BLOCK", 64)


@pytest.fixture
def use_kernels_on_cpu(monkeypatch):
    """Use the kernels on the CPU for all models that they support on a GPU."""
    monkeypatch.setattr(module, "can_use_triton_kernels", cuda_decode.is_supported_by_kernels)
    monkeypatch.setattr(module, "create_cpu_decode_engine", lambda *_, **__: None)


@pytest.mark.long
@pytest.mark.compiled  # run-time checks would rewrite the kernels
@requires_triton
@pytest.mark.parametrize("n_splits", [1, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("changes", [{}, LLAMA, {"activation": Activation.GELU, "final_norm": False}], ids=str)
def test_a_kernel_step_equals_the_eager_logits(changes, rows, n_splits, monkeypatch):
    monkeypatch.setattr(cuda_decode_forward, "_choose_n_splits", lambda *_: n_splits)
    model = small_gpt(**changes)
    prompts = torch.randint(157, (rows, 37), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=rows, capacity=64)
        cache = model.new_cache(batch=rows)
        model(prompts, cache=step.cache)
        ids = model(prompts, cache=cache)[:, -1].argmax(-1)
        for _ in range(2):
            actual = step.decode_logits(ids, cache.lengths)
            expected = model(ids[:, None], cache=cache)[:, 0]
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
            ids = expected.argmax(-1)


@pytest.mark.compiled
@requires_triton
def test_a_model_smaller_than_a_programs_block_is_supported(monkeypatch):
    monkeypatch.setattr(cuda_decode_forward, "OUT_PROJ_PROGRAMS", 128)
    model, ids = small_gpt(d_model=22, n_heads=1, n_layers=1), torch.tensor([[5]])
    with torch.inference_mode():
        step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=1, capacity=64)
        torch.testing.assert_close(
            step.decode_logits(ids[0], torch.tensor([0])), model(ids)[:, -1], rtol=1e-4, atol=1e-4
        )


@pytest.mark.long
@pytest.mark.compiled
@requires_triton
@pytest.mark.parametrize(
    "module_name", ["embedding.token", "blocks.0.attention.out_proj", "blocks.1.feed_forward.down_proj"]
)
@pytest.mark.parametrize("factor", [3e7, 1e12, float("nan")])
def test_a_fixed_point_overflow_gives_nan(module_name, factor):
    model = small_gpt()
    step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=1, capacity=64)
    with torch.inference_mode():
        assert step.decode_logits(torch.tensor([5]), torch.tensor([0])).isfinite().all()
        model.get_submodule(module_name).weight.mul_(factor)
        step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=1, capacity=64)
        assert step.decode_logits(torch.tensor([5]), torch.tensor([0])).isnan().all()


@pytest.mark.long
@pytest.mark.compiled  # run-time checks would rewrite the kernels
@requires_triton
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingConfig(temperature=0.9, top_k=20, top_p=0.9, seed=5)], ids=["greedy", "sampled"]
)
def test_decoding_several_tokens_per_sync_equals_eager_generation(sampling, use_kernels_on_cpu, monkeypatch):
    model, prompts = small_gpt(**LLAMA), [[3, 5, 7], [11]]
    monkeypatch.setattr(cuda_decode_step, "TOKENS_PER_SYNC", 3)
    monkeypatch.setattr(cuda_decode, "TOKENS_PER_SYNC", 3)
    prepacked = prepack_weights(model)
    first = generate(model, prompts, max_new=5, sampling=sampling, prepacked=prepacked)
    again = generate(model, prompts, max_new=5, sampling=sampling, prepacked=prepacked)
    monkeypatch.undo()
    expected = generate(model, prompts, max_new=5, sampling=sampling)
    assert (
        [sequence.new_ids for sequence in first]
        == [sequence.new_ids for sequence in again]
        == [sequence.new_ids for sequence in expected]
    )
    for sequence, other in zip(first, expected, strict=True):
        assert sequence.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-5)


def test_kernels_reject_unsupported_models():
    assert cuda_decode.is_supported_by_kernels(small_gpt())
    assert cuda_decode.is_supported_by_kernels(small_gpt(**LLAMA))
    assert not cuda_decode.is_supported_by_kernels(small_gpt().train())
    for changes in (
        {"sliding_window": 5},
        {"norm_position": "post"},
        {"positions": "alibi"},
        {"head_combination": "pooled"},
    ):
        assert not cuda_decode.is_supported_by_kernels(small_gpt(**changes)), changes
    for linear in ("gate_proj", "down_proj"):
        replaced = small_gpt(**LLAMA)
        setattr(replaced.blocks[1].feed_forward, linear, torch.nn.Identity())
        assert not cuda_decode.is_supported_by_kernels(replaced), linear
    observed = small_gpt()
    observed.blocks[0].attention.head_outputs.observe(lambda _: None)
    assert not cuda_decode.is_supported_by_kernels(observed)
    hooked = small_gpt()
    hooked.final_norm.register_forward_hook(lambda *_: None)
    assert not cuda_decode.is_supported_by_kernels(hooked)


def test_the_pool_reuses_a_step_until_a_weight_changes():
    model = small_gpt()
    pool = cuda_decode.CUDADecodeStepPool(model)

    def acquire_once(batch: int, capacity: int) -> cuda_decode_step.CUDADecodeStep:
        with pool.acquire(batch=batch, capacity=capacity) as step:
            return step

    first = acquire_once(1, 30)
    assert acquire_once(1, 67) is first, "both capacities are rounded to the context length"
    assert acquire_once(2, 30) is not first
    with pool.acquire(batch=1, capacity=30) as first_step, pool.acquire(batch=1, capacity=30) as second_step:
        assert first_step is not second_step
    with torch.no_grad():
        model.final_norm.weight += 1
    assert acquire_once(1, 30) is not first


def test_all_seeds_share_one_cuda_graph(monkeypatch):
    model, captured_keys = small_gpt(), set()
    step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=1, capacity=64)
    monkeypatch.setattr(step, "_replay", lambda key, _: captured_keys.add(key))
    for temperature, seed in ((0.5, 3), (0.5, 5), (0.7, 5)):
        step.decode_tokens(2, SamplingConfig(temperature=temperature, seed=seed))
    assert sorted(key.temperature for key in captured_keys) == [0.5, 0.7]


def test_generate_steps_provides_the_logits_of_every_step():
    step = next(module.generate_tokens(small_gpt(), [[3, 5]], max_new=2))
    assert step.logits.shape == (1, 157)
