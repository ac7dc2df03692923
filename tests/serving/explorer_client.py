"""An explorer with small models of all four families, and helpers to send requests to it."""

import json
from functools import cache

import numpy as np

from qkv.choices import SpecialTokenStyle, TokenizerKind
from qkv.config import GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.models import RNNSeq2Seq, Seq2Seq
from qkv.serving.explorer import Explorer
from qkv.serving.frame_codec import decode_frame
from qkv.serving.model_registry import ModelRegistry
from qkv.tasks import LanguageModel, Translator
from tests.agreement.model_strategies import build_random_model
from tests.tasks.small_bert import small_bert
from tests.text.samples import trained

PORT, TOKEN = 8477, "the-token"
TEXT = "The cat sat on the mat."
SECOND = "El niño comió."
FAMILIES = ("gpt", "bert", "seq2seq", "rnn")
STACKS = {"gpt": ["self"], "bert": ["self"], "seq2seq": ["encoder", "decoder", "cross"], "rnn": ["cross"]}


@cache
def tasks():
    """Small models by family, in float32 like all served models."""
    bpe, pairs = trained(TokenizerKind.BPE), trained(TokenizerKind.BPE, SpecialTokenStyle.SEQ2SEQ)
    gpt = GPTConfig(
        vocab_size=bpe.vocab_size, context_length=41, d_model=20, n_heads=5, n_kv_heads=1, n_layers=3,
        positions="rotary",
    )  # fmt: skip
    sizes = {"vocab_size": pairs.vocab_size, "context_length": 37}
    seq2seq = Seq2SeqConfig(**sizes, d_model=14, n_heads=7, n_encoder_layers=2, n_decoder_layers=3)
    return {
        "gpt": LanguageModel(build_random_model(gpt, 1).float(), bpe),
        "bert": small_bert(),
        "seq2seq": Translator(Seq2Seq(seq2seq, seed=0).eval(), pairs),
        "rnn": Translator(RNNSeq2Seq(RNNConfig(**sizes, d_model=22, attention="general"), seed=0).eval(), pairs),
    }


def new_explorer() -> Explorer:
    return Explorer(ModelRegistry(memory=tasks(), zoo=False))


@cache
def explorer() -> Explorer:
    return new_explorer()


def get_data(path: str, body=None, *, backend: Explorer | None = None):
    """Returns the data of a successful response. Fails if the response is an error."""
    response = (backend or explorer()).handle_request(path, body)
    assert response.status == 200, response.body
    return json.loads(response.body) if response.content_type == "application/json" else decode_frame(response.body)


def post_run(family: str, text: str = TEXT, *, backend: Explorer | None = None, **more):
    second = {"second": SECOND} if family in ("seq2seq", "rnn") else {}
    return get_data("/api/run", {"model": family, "text": text, **second, **more}, backend=backend)


def reference_cache(family: str):
    """Returns the activation cache that `qkv.inspection` computes for the same text."""
    from qkv.inspection import prepare_input, run_with_cache

    task = tasks()[family]
    return run_with_cache(task.model, prepare_input(task, TEXT, SECOND if family in ("seq2seq", "rnn") else None))


def split_frames(body: bytes):
    """Returns the decoded frames of a stream."""
    actual = []
    while body:
        n = int.from_bytes(body[:4], "little")
        actual.append(decode_frame(body[4 : 4 + n]))
        body = body[4 + n :]
    return actual


def assert_close(actual, expected, tolerance: float = 2e-6) -> None:
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=1e-5)
