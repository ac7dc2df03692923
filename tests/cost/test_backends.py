"""The backend for which a time is predicted is the one that runs the model."""

import pytest
import torch

from qkv import engines
from qkv.accel.cuda.backend import reason_kernels_are_unsupported, reason_varlen_is_unsupported
from qkv.choices import NormKind
from qkv.config import BERTConfig, GPTConfig, RNNConfig, Seq2SeqConfig, TrainingConfig, load_config
from qkv.cost import Workload
from qkv.cost.backends import select_backend
from qkv.errors import InputError
from qkv.models import build
from qkv.zoo import shipped_model_folders

SHAPE = {"vocab_size": 32, "context_length": 16, "d_model": 16, "n_heads": 2}
GPT_OPTIONS = [
    {"causal": False},
    {"sliding_window": 4},
    {"embedding_norm": True},
    {"norm_position": "post"},
    {"n_kv_heads": 1},
    {"gated": True},
    {"head_combination": "pooled"},
    *({"norm": kind} for kind in NormKind),  # one of these is the default
    *({"positions": kind} for kind in ("none", "sinusoidal", "concatenated", "rotary", "alibi", "relative")),
]
BERT_OPTIONS = [
    {"sliding_window": 4},
    {"gated": True},
    {"scale_scores": False},
    {"head_combination": "pooled"},
    {"positions": "rotary"},
    *({"norm": kind} for kind in NormKind),
]
GPTS = [GPTConfig(**SHAPE, n_layers=1, **options) for options in GPT_OPTIONS]
BERTS = [BERTConfig(**SHAPE, n_layers=1, **options) for options in BERT_OPTIONS]
SEQ2SEQ_OPTIONS = [
    {"head_combination": "pooled"},
    {"positions": "concatenated"},
    *({"norm": kind} for kind in NormKind),
]
SEQ2SEQS = [Seq2SeqConfig(**SHAPE, n_encoder_layers=1, n_decoder_layers=1, **options) for options in SEQ2SEQ_OPTIONS]
SHIPPED = {name: load_config(folder / "config.json") for name, folder in shipped_model_folders().items()}
CONFIGS = [*GPTS, *BERTS, *SEQ2SEQS, RNNConfig(vocab_size=32, d_model=16), *SHIPPED.values()]


def workload_of(config, dtype="float32"):
    return Workload(batch_size=1, seq_len=2, mode="forward" if config.family == "bert" else "decode", dtype=dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_the_backend_on_a_cpu_supports_the_model(config):
    model = build(config).eval()
    with torch.no_grad():
        assert select_backend(config, workload_of(config), "cpu") == engines.select_backend(model).name


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.family in ("gpt", "bert")], ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backend_on_a_gpu_supports_the_model(config, dtype):
    model = build(config).eval().to(getattr(torch, dtype))
    reason = (reason_kernels_are_unsupported if config.family == "gpt" else reason_varlen_is_unsupported)(model)
    assert select_backend(config, workload_of(config, dtype), "cuda") == ("cuda" if reason is None else "eager")


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "tpu")])
def test_a_backend_that_does_not_run_the_workload_is_an_error(device, backend):
    with pytest.raises(InputError, match=rf"--backend {backend}\b"):
        select_backend(GPTS[0], workload_of(GPTS[0]), device, backend)


def test_eager_runs_every_workload():
    assert select_backend(GPTS[0], workload_of(GPTS[0]), "cuda", "eager") == "eager"
    eager_attention = Workload(batch_size=1, seq_len=2, kernel="eager", mode="decode")
    assert select_backend(GPTS[0], eager_attention, "cpu") == "eager"


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_the_backend_on_a_cpu_supports_training(config, activation_checkpointing):
    workload = Workload(batch_size=1, seq_len=2, mode="train", activation_checkpointing=activation_checkpointing)
    training = TrainingConfig(
        steps=1000, batch_size=1, seq_len=2, precision="fp32", activation_checkpointing=activation_checkpointing
    )
    expected = engines.select_training_backend(build(config), training).name
    assert select_backend(config, workload, "cpu") == expected
    assert select_backend(config, workload.replace(dtype="mixed"), "cuda") == "cuda"
