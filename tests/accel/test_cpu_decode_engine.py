"""The CPU decode engine rejects models that it does not support, and notices changed weights and hooks.

`tests/agreement/test_backends.py` compares its results with those of the eager engine.
"""

from functools import partial

import pytest
import torch

import qkv
from qkv.accel.cpu.decode_buffers import BufferedNorm, DecodeBuffers
from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.choices import AttentionKernel, BackendName
from qkv.config import BeamConfig, BERTConfig, GPTConfig, SamplingConfig, Seq2SeqConfig
from qkv.engines import BACKENDS, decode_engine
from qkv.generation import generate, translate
from qkv.generation.decode_engine import Seq2SeqDecodeEngine
from qkv.inspection import record
from qkv.nn import HeadConfig, use_attention_kernel
from qkv.nn.norm import RMSNorm
from tests.agreement.model_strategies import build_random_model

CPU = next(backend for backend in BACKENDS if backend.name == BackendName.CPU)
GREEDY = SamplingConfig(temperature=0)
GPT_CONFIG = GPTConfig(
    vocab_size=23, context_length=29, d_model=12, n_heads=6, n_layers=2, positions="rotary", norm="rms", gated=True
)
SEQ2SEQ_CONFIG = Seq2SeqConfig(
    vocab_size=31, source_vocab_size=37, share_embeddings=False, context_length=23, d_model=12, n_heads=6, d_ff=17,
    n_encoder_layers=1, n_decoder_layers=2,
)  # fmt: skip
BERT_CONFIG = BERTConfig(vocab_size=23, context_length=29, d_model=12, n_heads=3, n_layers=2)
SOURCES = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]


def small(config, seed=0):
    return build_random_model(config, seed).float().eval()


@pytest.mark.parametrize("config", [GPT_CONFIG, SEQ2SEQ_CONFIG], ids=["gpt", "seq2seq"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"positions": "concatenated"}, "positions='concatenated' is not supported"),
        ({"head_combination": "pooled"}, "head_combination='pooled' is not supported"),
        ({"output_projection": False}, "is a Identity"),
    ],
    ids=str,
)
def test_unsupported_configs_are_rejected(config, changes, reason):
    changes = {**config.model_dump(exclude={"d_value"}), **changes}
    assert reason in CPU.supports(small(type(config)(**changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"positions": "rotary"}, "positions='rotary'"),
        ({"sliding_window": 3}, "sliding_window"),
        ({"gated": True}, "gated=true"),
    ],
    ids=str,
)
@torch.no_grad()
def test_unsupported_encoder_configs_are_rejected(changes, reason):
    assert CPU.supports(small(BERT_CONFIG)) is None
    assert reason in CPU.supports(small(BERT_CONFIG.replace(**changes)))


def test_an_encoder_with_gradients_or_recorded_activations_is_rejected():
    model = small(BERT_CONFIG)
    assert "torch.no_grad()" in CPU.supports(model)
    with torch.no_grad():
        with record(model, "blocks.1.resid_mid"):
            assert CPU.supports(model) == "blocks.1.resid_mid is being recorded or changed"
        assert CPU.supports(model) is None


def test_other_dtypes_other_kernels_and_training_are_rejected():
    model = small(SEQ2SEQ_CONFIG)
    assert CPU.supports(model) is None
    with use_attention_kernel(model, AttentionKernel.EAGER):
        assert "attention kernel 'eager'" in CPU.supports(model)
    assert "evaluation mode" in CPU.supports(model.train())
    assert "torch.float64" in CPU.supports(model.eval().double())


def test_hooks_and_interventions_take_effect_during_beam_search():
    model = small(SEQ2SEQ_CONFIG)
    run = partial(
        translate, model, [SOURCES[0]], start_id=1, max_new=[5], stop_ids=frozenset(), beam=BeamConfig(n_beams=2),
        create_engine=decode_engine,
    )  # fmt: skip
    with record(model, "decoder.blocks.1.resid_mid") as trace:
        ((recorded, *_),) = run()
    assert len(trace.names) == 1
    ((plain, *_),) = run()
    assert recorded.ids == plain.ids
    stop = model.unembedding.logits.intervene(lambda logits: -logits)
    ((changed, *_),) = run()
    stop()
    assert changed.ids != plain.ids
    model.decoder.blocks[0].feed_forward.down_proj.register_forward_hook(lambda *_: None)
    assert CPU.supports(model) == "decoder.blocks.0.feed_forward.down_proj has a hook"


def test_a_changed_weight_is_packed_again():
    model = small(GPT_CONFIG)

    def log_probabilities(backend):
        create_engine = partial(decode_engine, backend=backend)
        (sequence,) = generate(model, [[3, 4]], max_new=9, sampling=GREEDY, create_engine=create_engine)
        return sequence.log_probabilities

    before = log_probabilities(BackendName.CPU)
    with torch.no_grad():
        model.blocks[1].feed_forward.up_proj.weight.neg_()
    after = log_probabilities(BackendName.CPU)
    assert after == pytest.approx(log_probabilities(BackendName.EAGER), abs=1e-4)
    assert after != pytest.approx(before, abs=1e-3)


def test_engines_of_a_model_share_its_packed_weights_for_as_long_as_it_exists():
    model, other = small(GPT_CONFIG), small(GPT_CONFIG)
    assert isinstance(CPU.prepacked_weights(model), PrepackedWeights)
    assert CPU.prepacked_weights(model) is CPU.prepacked_weights(model) is not CPU.prepacked_weights(other)


def test_the_stories_model_generates_the_same_ids_as_the_eager_engine():
    task = qkv.load("stories")
    prompts = [task.tokenize(text) for text in ("Once upon a time", "The sea was", "One day a little dog named")]
    actual, expected = (
        generate(
            task.model, prompts, max_new=40, sampling=GREEDY, create_engine=partial(decode_engine, backend=backend)
        )
        for backend in (BackendName.CPU, BackendName.EAGER)
    )
    for sequence, eager_sequence in zip(actual, expected, strict=True):
        assert sequence.new_ids == eager_sequence.new_ids
        assert sequence.log_probabilities == pytest.approx(eager_sequence.log_probabilities, abs=1e-4)


def test_the_norm_of_a_small_row_includes_eps():
    norm = RMSNorm(7, eps=1e-3)
    buffers = DecodeBuffers(torch.zeros(1, 7), HeadConfig.split(7, 1), rows=3, rms_norm_eps=1e-3, is_rotary=False)
    buffers.residual.copy_(torch.randn(3, 7) * torch.tensor([[1.0], [1e-2], [0.0]]))
    assert torch.allclose(
        BufferedNorm(norm)(buffers.residual, buffers), norm(buffers.residual[None])[0], rtol=0, atol=1e-6
    )


class WrongCommonPrefix(Seq2SeqDecodeEngine):
    """Planted bug: the common prefix is one token too long, so this token is not reordered."""

    def reorder(self, rows, *, sequences=None, common_prefix=0):
        super().reorder(rows, sequences=sequences, common_prefix=common_prefix + 1)


@pytest.mark.parametrize(("engine_class", "is_correct"), [(Seq2SeqDecodeEngine, True), (WrongCommonPrefix, False)])
def test_reordering_moves_all_but_the_common_prefix(engine_class, is_correct):
    """Scores equal those of a full pass only if enough of the cache is reordered."""

    def create_engine(model, *, batch, capacity):
        return engine_class(model, model.new_cache(batch=batch, capacity=capacity))

    errors = []
    for seed in range(8):
        model = small(SEQ2SEQ_CONFIG, seed)
        options = {"start_id": 1, "max_new": [9], "stop_ids": frozenset({2}), "beam": BeamConfig(n_beams=4, n_best=4)}
        (hypotheses,) = translate(model, [SOURCES[0]], **options, create_engine=create_engine)
        for hypothesis in hypotheses:
            ids = torch.tensor([[1, *hypothesis.ids[:-1]]])
            with torch.no_grad():
                log_p = model(torch.tensor([SOURCES[0]]), ids)[0].log_softmax(-1)
            log_ps = [float(log_p[i, token_id]) for i, token_id in enumerate(hypothesis.ids)]
            errors.append(abs(sum(log_ps) / len(log_ps) - hypothesis.score))
    assert (max(errors) < 1e-4) is is_correct
