"""Int8 models nearly agree with float32, in every implementation."""

from functools import partial
from itertools import islice

import pytest
import torch

import qkv
from qkv.accel.int8 import Int8Linear
from qkv.config import BERTConfig, GPTConfig, RNNConfig, SamplingConfig, Seq2SeqConfig
from qkv.data import read_documents
from qkv.engines import decode_engine, quantize_linears_to_int8, select_backend
from qkv.errors import InputError
from qkv.generation import generate, translate
from qkv.models import build
from tests.text.samples import DATA

SIZES = {"vocab_size": 31, "context_length": 23, "d_model": 24, "n_heads": 6, "d_ff": 37}
LAYERS = {"n_encoder_layers": 1, "n_decoder_layers": 2}
CONFIGS = {
    "gpt": GPTConfig(**SIZES, n_layers=2),
    "untied gpt": GPTConfig(**SIZES, n_layers=2, tie_embeddings=False, unembedding_bias=True, gated=True),
    "bert": BERTConfig(**SIZES, n_layers=2, masked_lm_head=True),
    "seq2seq": Seq2SeqConfig(**SIZES, **LAYERS),
}


def inputs(model):
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
    return (ids, ids[:, :3]) if isinstance(model.config, Seq2SeqConfig) else (ids,)


def run_model(model):
    answer = model(*inputs(model))
    return model.masked_lm_logits(answer) if isinstance(model.config, BERTConfig) else answer


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_every_family_agrees_with_float32(name):
    model = build(CONFIGS[name], seed=1).eval()
    before = run_model(model)
    quantize_linears_to_int8(model)
    relative_error = (run_model(model) - before).norm() / before.norm()
    assert 0 < float(relative_error) < 0.05
    assert not any(type(part) is torch.nn.Linear for part in model.modules())


def test_the_cpu_backend_supports_int8_and_agrees():
    model = build(CONFIGS["untied gpt"], seed=1).eval()
    quantize_linears_to_int8(model)
    assert select_backend(model).name == "cpu"
    engine_scores, eager_scores = (
        [
            sequence.log_probabilities
            for sequence in generate(model, [[3, 4, 5], [6]], max_new=6, sampling=SamplingConfig(temperature=0),
                                     create_engine=partial(decode_engine, backend=backend))
        ]
        for backend in ("cpu", "eager")
    )  # fmt: skip
    assert torch.allclose(torch.tensor(engine_scores), torch.tensor(eager_scores), rtol=0.02)
    pair = build(CONFIGS["seq2seq"], seed=1).eval()
    quantize_linears_to_int8(pair)
    options = {"start_id": 1, "max_new": [5], "stop_ids": frozenset({2})}
    assert translate(pair, [[3, 4]], **options, create_engine=partial(decode_engine, backend="cpu"))


def test_int8_for_an_rnn_is_rejected():
    model = build(RNNConfig(vocab_size=11, source_vocab_size=13, d_model=6, **LAYERS))
    with pytest.raises(InputError, match=r"int8.*RNN"):
        quantize_linears_to_int8(model)


def bits_per_byte(task, documents):
    scores = list(task.score_documents(documents))
    return sum(score.loss_sum for score in scores) / sum(score.n_bytes for score in scores)


@pytest.mark.parametrize("n", [6, pytest.param(300, marks=pytest.mark.long)])
def test_int8_costs_less_than_half_a_percent_of_bits_per_byte(n):
    text = DATA / "stories" / "dev.txt"
    if not text.is_file():
        pytest.skip("stories/dev.txt is not at hand: set QKV_DATA to the folder that holds it")
    documents = list(islice(read_documents([text]), n))
    plain, quantized = qkv.load("stories"), qkv.load("stories", int8=True)
    assert isinstance(quantized.model.blocks[0].attention.q_proj, Int8Linear)
    assert repr(quantized) == repr(plain)
    assert 0 < bits_per_byte(quantized, documents) / bits_per_byte(plain, documents) - 1 < 0.005
