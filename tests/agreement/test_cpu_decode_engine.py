"""The CPU decode engine agrees with the eager implementation."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import qkv
from qkv.accel.cpu.decode_buffers import BufferedNorm, DecodeBuffers
from qkv.accel.cpu.decode_engine import create_cpu_decode_engine, supports_cpu_decode_engine
from qkv.accel.cpu.prepacked_weights import MIN_ONEDNN_SIZE, MIN_PADDED_SIZE, ConcatenatedLinear, prepack_weights
from qkv.config import GPTConfig, SamplingConfig
from qkv.generation import GPTDecoder, beam_generate, generate
from qkv.inspection import record
from qkv.nn import HeadConfig, RMSNorm
from tests.agreement.model_strategies import VOCABULARY, build_random_model, gpts, seeds

GREEDY = SamplingConfig(temperature=0)
PROMPTS = {"one": [[3]], "even": [[3, 4, 5], [6, 7, 8]], "ragged": [[3, 4, 5, 6, 7], [8], [9, 10, 11]]}
CAPACITY = 13
GPT2 = {
    "positions": "learned", "norm": "layer", "norm_position": "pre", "activation": "gelu-tanh", "embedding_norm": True,
    "scale_embedding": True, "unembedding_bias": True, "scale_logits": True, "n_kv_heads": 6,
}  # fmt: skip
LLAMA = {
    "positions": "rotary", "norm": "rms", "norm_position": "pre", "activation": "silu", "gated": True,
    "attention_bias": False, "feed_forward_bias": False, "n_kv_heads": 2, "final_norm": True,
}  # fmt: skip
SHAPES = {
    "GPT-2": GPT2,
    "Llama": LLAMA,
    "ALiBi": {"positions": "alibi"},
    "T5's bias": {"positions": "relative"},
    "windowed": {**LLAMA, "sliding_window": 3},
    "windowed, ALiBi": {"positions": "alibi", "sliding_window": 3},
}


def small(seed=0, **shape):
    sizes = {"vocab_size": VOCABULARY, "context_length": 29, "d_model": 10, "n_heads": 6, "d_head": 4, "d_ff": 17}
    return build_random_model(GPTConfig(**{**sizes, "n_layers": 2, **shape}), seed).float()


def both_engines(model, prompts):
    engine = create_cpu_decode_engine(model, prepack_weights(model), capacity=CAPACITY)
    assert engine is not None
    decoders = [
        GPTDecoder(model, batch=len(prompts), capacity=CAPACITY, cpu_engine=cpu_engine) for cpu_engine in (engine, None)
    ]
    for decoder in decoders:
        decoder.prefill(prompts)
    return decoders


def assert_agree(actual, expected):
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def compare_steps(decoders, rows, seed):
    """Run eight decode steps, dropping, repeating and reordering rows in between."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(8):
        ids = torch.randint(0, VOCABULARY, (rows,), generator=generator)
        assert_agree(*(decoder.step(ids) for decoder in decoders))
        if step in (2, 4, 5):
            order = torch.randint(0, rows, (1 + step // 2,), generator=generator)
            for decoder in decoders:
                decoder.reorder(order, sequences=order)
            rows = len(order)


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_each_step_of_the_listed_configs_agrees(shape, prompts):
    model = small(**SHAPES[shape])
    compare_steps(both_engines(model, PROMPTS[prompts]), len(PROMPTS[prompts]), seed=5)


@settings(max_examples=40)
@given(gpts(), seeds, st.sampled_from(sorted(PROMPTS)))
@torch.inference_mode()
def test_each_step_of_any_supported_config_agrees(config, seed, prompts):
    model = build_random_model(config, seed).float()
    assume(supports_cpu_decode_engine(model, prepack_weights(model)))
    compare_steps(both_engines(model, PROMPTS[prompts]), len(PROMPTS[prompts]), seed)


@torch.inference_mode()
def test_the_stories_model_generates_the_same_ids_with_both_implementations():
    task = qkv.load("stories")
    prompts = [task.tokenize(text) for text in ("Once upon a time", "The sea was", "One day a little dog named")]
    engine_outputs = generate(task.model, prompts, max_new=40, sampling=GREEDY)
    with record(task.model, "last_hidden_state"):  # recording forces the eager implementation
        eager_outputs = generate(task.model, prompts, max_new=40, sampling=GREEDY)
    assert [text.new_ids for text in engine_outputs] == [text.new_ids for text in eager_outputs]
    errors = [
        abs(actual - expected)
        for engine_output, eager_output in zip(engine_outputs, eager_outputs, strict=True)
        for actual, expected in zip(engine_output.log_probabilities, eager_output.log_probabilities, strict=True)
    ]
    assert max(errors) <= 1e-4


def test_beam_search_finds_the_same_sequences_with_both_implementations():
    model = small(**LLAMA)
    options = {"max_new": 7, "beam": qkv.config.BeamConfig(n_beams=3, n_best=3), "stop_ids": frozenset({2})}
    engine_outputs = beam_generate(model, PROMPTS["ragged"], **options)
    with record(model, "last_hidden_state"):
        eager_outputs = beam_generate(model, PROMPTS["ragged"], **options)
    for engine_hypotheses, eager_hypotheses in zip(engine_outputs, eager_outputs, strict=True):
        assert [hypothesis.ids for hypothesis in engine_hypotheses] == [
            hypothesis.ids for hypothesis in eager_hypotheses
        ]


@pytest.mark.parametrize(
    "unusual",
    [{"positions": "concatenated"}, {"head_combination": "pooled"}, {"output_projection": False, "d_head": 2}],
    ids=["concatenated", "pooled", "without output projection"],
)  # fmt: skip
def test_unsupported_configs_use_the_eager_implementation(unusual):
    model = small(**{"d_model": 12, **unusual})
    assert create_cpu_decode_engine(model, prepack_weights(model), capacity=CAPACITY) is None
    assert generate(model, [[3]], max_new=5, sampling=GREEDY)[0].new_ids


@pytest.mark.parametrize(
    ("n_in", "n_out"), [(7, 11), (257, MIN_ONEDNN_SIZE // 257 + 1), (1031, MIN_PADDED_SIZE // 1031 + 1), (1031, 128)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_linear_equals_the_concatenated_linear_layers(n_in, n_out, rows, has_bias):
    weights = [torch.randn(n_out, n_in) / n_in**0.5, torch.randn(3, n_in) / n_in**0.5]
    biases = [torch.randn(n_out), torch.randn(3)] if has_bias else [None, None]
    x, stream = torch.randn(rows, n_in), torch.randn(rows, n_out + 3)
    expected = torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], dim=1)
    product, out, added = ConcatenatedLinear(weights, biases), torch.empty_like(expected), stream.clone()
    product.write_to(x, out)
    product.add_to(added, x)
    for got, wanted in ((product(x), expected), (out, expected), (added, stream + expected)):
        assert torch.allclose(got, wanted, rtol=0, atol=1e-5)
    alone = ConcatenatedLinear(weights[:1], biases[:1])
    assert torch.allclose(alone(x), F.linear(x, weights[0], biases[0]), rtol=0, atol=1e-5)


def test_the_norm_of_a_small_row_includes_eps():
    norm = RMSNorm(7, eps=1e-3)
    buffers = DecodeBuffers(torch.zeros(1, 7), HeadConfig.split(7, 1), rows=3, rms_norm_eps=1e-3, is_rotary=False)
    buffers.residual.copy_(torch.randn(3, 7) * torch.tensor([[1.0], [1e-2], [0.0]]))
    assert torch.allclose(
        BufferedNorm(norm)(buffers.residual, buffers), norm(buffers.residual[None])[0], rtol=0, atol=1e-6
    )


def test_a_changed_weight_is_packed_again():
    model = small(**LLAMA)
    packing = prepack_weights(model)

    def log_probabilities(**options):
        return generate(model, [[3, 4]], max_new=9, sampling=GREEDY, **options)[0].log_probabilities

    before = log_probabilities(prepacked=packing)
    with torch.no_grad():
        model.blocks[1].feed_forward.up_proj.weight.neg_()
    assert log_probabilities(prepacked=packing) == log_probabilities() != before
