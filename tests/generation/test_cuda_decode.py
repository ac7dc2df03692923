"""The GPU's kernels, run by Triton's interpreter: as the model itself computes, in every shape they know."""

from importlib import import_module

import pytest
import torch

from qkv.choices import Activation, NormKind, PositionKind
from qkv.config import GPTConfig, SamplingConfig
from qkv.generation import cuda_decode, cuda_decode_forward, cuda_decode_step, generate
from qkv.generation.prepacked_weights import prepack_weights
from qkv.models import GPT
from tests.by_triton import has_triton

module = import_module("qkv.generation.generate")  # the package has a function of that name
GREEDY = SamplingConfig(temperature=0)


def small(**changed) -> GPT:
    settings = {"vocab_size": 157, "context_length": 67, "n_layers": 2, "d_model": 48, "n_heads": 6} | changed
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
def by_kernels(monkeypatch):
    """Everyone goes by the kernels who could on a GPU."""
    monkeypatch.setattr(module, "can_use_triton_kernels", cuda_decode.is_supported_by_kernels)
    monkeypatch.setattr(module, "create_cpu_decode_engine", lambda *_, **__: None)


@pytest.mark.long
@pytest.mark.compiled  # run-time checks would rewrite the kernels
@has_triton
@pytest.mark.parametrize("n_splits", [1, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("changed", [{}, LLAMA, {"activation": Activation.GELU, "final_norm": False}], ids=str)
def test_a_step_by_kernels_gives_the_logits_of_the_model(changed, rows, n_splits, monkeypatch):
    monkeypatch.setattr(cuda_decode_forward, "_choose_n_splits", lambda *_: n_splits)
    model = small(**changed)
    prompts = torch.randint(157, (rows, 37), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=rows, capacity=64)
        cache = model.new_cache(batch=rows)
        model(prompts, cache=step.cache)
        ids = model(prompts, cache=cache)[:, -1].argmax(-1)
        for _ in range(2):
            got = step.decode_logits(ids, cache.lengths)
            wanted = model(ids[:, None], cache=cache)[:, 0]
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
            ids = wanted.argmax(-1)


@pytest.mark.compiled
@has_triton
def test_a_model_smaller_than_a_programs_share_of_heads_is_written_too(monkeypatch):
    monkeypatch.setattr(cuda_decode_forward, "OUT_PROJ_PROGRAMS", 128)
    model, ids = small(d_model=22, n_heads=1, n_layers=1), torch.tensor([[5]])
    with torch.inference_mode():
        step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=1, capacity=64)
        torch.testing.assert_close(
            step.decode_logits(ids[0], torch.tensor([0])), model(ids)[:, -1], rtol=1e-4, atol=1e-4
        )


@pytest.mark.long
@pytest.mark.compiled
@has_triton
@pytest.mark.parametrize("place", ["embedding.token", "blocks.0.attention.out_proj", "blocks.1.feed_forward.down_proj"])
@pytest.mark.parametrize("factor", [3e7, 1e12, float("nan")])
def test_a_row_whose_sums_no_whole_number_can_hold_is_no_number(place, factor):
    model = small()
    step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=1, capacity=64)
    with torch.inference_mode():
        assert step.decode_logits(torch.tensor([5]), torch.tensor([0])).isfinite().all()
        model.get_submodule(place).weight.mul_(factor)
        step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=1, capacity=64)
        assert step.decode_logits(torch.tensor([5]), torch.tensor([0])).isnan().all()


@pytest.mark.long
@pytest.mark.compiled  # run-time checks would rewrite the kernels
@has_triton
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingConfig(temperature=0.9, top_k=20, top_p=0.9, seed=5)], ids=["greedy", "sampled"]
)
def test_texts_written_ahead_are_those_written_one_by_one(sampling, by_kernels, monkeypatch):
    model, prompts = small(**LLAMA), [[3, 5, 7], [11]]
    monkeypatch.setattr(cuda_decode_step, "TOKENS_PER_SYNC", 3)
    monkeypatch.setattr(cuda_decode, "TOKENS_PER_SYNC", 3)
    packing = prepack_weights(model)
    first = generate(model, prompts, max_new=5, sampling=sampling, prepacked=packing)
    again = generate(model, prompts, max_new=5, sampling=sampling, prepacked=packing)
    monkeypatch.undo()
    wanted = generate(model, prompts, max_new=5, sampling=sampling)
    assert [text.new_ids for text in first] == [text.new_ids for text in again] == [text.new_ids for text in wanted]
    for text, other in zip(first, wanted, strict=True):
        assert text.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-5)


def test_kernels_are_for_models_that_they_know():
    assert cuda_decode.is_supported_by_kernels(small())
    assert cuda_decode.is_supported_by_kernels(small(**LLAMA))
    assert not cuda_decode.is_supported_by_kernels(small().train())
    for changed in (
        {"sliding_window": 5},
        {"norm_position": "post"},
        {"positions": "alibi"},
        {"head_layout": "pooled"},
    ):
        assert not cuda_decode.is_supported_by_kernels(small(**changed)), changed
    for linear in ("gate_proj", "down_proj"):
        replaced = small(**LLAMA)
        setattr(replaced.blocks[1].feed_forward, linear, torch.nn.Identity())
        assert not cuda_decode.is_supported_by_kernels(replaced), linear
    watched = small()
    watched.blocks[0].attention.head_outputs.observe(lambda _: None)
    assert not cuda_decode.is_supported_by_kernels(watched)
    hooked = small()
    hooked.final_norm.register_forward_hook(lambda *_: None)
    assert not cuda_decode.is_supported_by_kernels(hooked)


def test_a_step_is_kept_until_a_weight_changes():
    model = small()
    steps = cuda_decode.CUDADecodeStepPool(model)

    def taken(batch: int, capacity: int) -> cuda_decode_step.CUDADecodeStep:
        with steps.acquire(batch=batch, capacity=capacity) as step:
            return step

    first = taken(1, 30)
    assert taken(1, 67) is first, "both get the whole context, for it is short"
    assert taken(2, 30) is not first
    with steps.acquire(batch=1, capacity=30) as one, steps.acquire(batch=1, capacity=30) as other:
        assert one is not other, "two writers at a time"
    with torch.no_grad():
        model.final_norm.weight += 1
    assert taken(1, 30) is not first


def test_one_recording_does_for_every_seed(monkeypatch):
    model, recorded = small(), set()
    step = cuda_decode_step.CUDADecodeStep(model, cuda_decode_forward.KernelWeights(model), batch=1, capacity=64)
    monkeypatch.setattr(step, "_replay", lambda key, _: recorded.add(key))
    for temperature, seed in ((0.5, 3), (0.5, 5), (0.7, 5)):
        step.decode_tokens(2, SamplingConfig(temperature=temperature, seed=seed))
    assert sorted(key.temperature for key in recorded) == [0.5, 0.7]


def test_one_who_looks_inside_gets_logits_of_every_step():
    step = next(module.generate_steps(small(), [[3, 5]], max_new=2))
    assert step.logits.shape == (1, 157)
