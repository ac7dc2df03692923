"""Every registered backend agrees with the eager one for all models that it supports, and gives a reason for others."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.accel.cpu import onednn_linear
from qkv.accel.cuda import fused_modules
from qkv.choices import BackendName, NormKind
from qkv.config import BeamConfig, BERTConfig, GPTConfig, RNNConfig, SamplingConfig, Seq2SeqConfig, TrainingConfig
from qkv.data.token_batches import TokenBatch
from qkv.engines import BACKENDS, accelerated, decode_engine, encode_engine, explain_backends, select_backend
from qkv.errors import InputError
from qkv.generation import beam_generate, generate, translate
from qkv.models import BERT, GPT, build
from qkv.training.gpt import next_token_objective
from qkv.training.step import build_train_step
from tests.agreement.model_strategies import (
    SOURCE_VOCABULARY,
    VOCABULARY,
    berts,
    build_random_model,
    gpts,
    random_ids,
    rnns,
    seeds,
    seq2seqs,
)

FAST_BACKENDS = [backend.name for backend in BACKENDS if backend.name != BackendName.EAGER]
DEVICE_TYPES = {BackendName.CPU: "cpu", BackendName.CUDA: "cuda"}
SIZES = {"vocab_size": VOCABULARY, "context_length": 29, "d_model": 48, "n_heads": 6, "d_ff": 37}
LLAMA = {
    "positions": "rotary", "norm": "rms", "norm_position": "pre", "activation": "silu", "gated": True,
    "attention_bias": False, "feed_forward_bias": False, "n_kv_heads": 2, "final_norm": True, "tie_embeddings": False,
}  # fmt: skip
SHARED_CHANGES = {
    "default": {},
    "Llama": LLAMA,
    "post-norm": {"norm_position": "post", "embedding_norm": True, "final_norm": False, "activation": "relu"},
    "sinusoidal": {"positions": "sinusoidal", "scale_embedding": True, "activation": "gelu"},
    "concatenated": {"positions": "concatenated"},
    "ALiBi, windowed": {"positions": "alibi", "sliding_window": 3},
    "T5": {"positions": "relative", "scale_scores": False, "scale_logits": True, "norm": "rms", "n_kv_heads": 1},
    "Llama, windowed": {**LLAMA, "sliding_window": 3},
    "no positions, other d_value": {"positions": "none", "d_value": 5, "unembedding_bias": True},
    "pooled heads": {"head_combination": "pooled"},
    **{f"{kind} norm": {"norm": kind} for kind in NormKind},
    "no output projection": {"output_projection": False},
}
BERT_SIZES = {**SIZES, "n_layers": 2, "n_segments": 2}
SEQ2SEQ_SIZES = {
    **SIZES, "source_vocab_size": SOURCE_VOCABULARY, "share_embeddings": False, "n_encoder_layers": 1,
    "n_decoder_layers": 2,
}  # fmt: skip
RNN_SIZES = {"vocab_size": VOCABULARY, "source_vocab_size": SOURCE_VOCABULARY, "d_model": 10}
GPTS = {name: GPTConfig(**SIZES, n_layers=2, **changes) for name, changes in SHARED_CHANGES.items()}
BERTS = {name: BERTConfig(**BERT_SIZES | changes) for name, changes in SHARED_CHANGES.items()} | {
    "BERT": BERTConfig(**BERT_SIZES),
    "wide": BERTConfig(**BERT_SIZES | {"d_model": 132, "n_heads": 3, "d_head": 48, "d_ff": 1013}),  # uses oneDNN
}
SEQ2SEQS = {name: Seq2SeqConfig(**SEQ2SEQ_SIZES, **changes) for name, changes in SHARED_CHANGES.items()}
RNNS = {
    "GRU": RNNConfig(**RNN_SIZES, n_encoder_layers=1, n_decoder_layers=2, cell="gru", attention="additive"),
    "LSTM": RNNConfig(**RNN_SIZES, n_encoder_layers=2, n_decoder_layers=1, cell="lstm", attention="dot"),
    "without attention": RNNConfig(**RNN_SIZES, n_encoder_layers=1, n_decoder_layers=1, attention="none"),
}
DECODERS = {"gpt": GPTS, "seq2seq": SEQ2SEQS, "rnn": RNNS}
DECODER_CASES = [(family, name) for family, configs in DECODERS.items() for name in configs]
FAMILIES = {**DECODERS, "bert": BERTS}
TEXTS = {"one": [[3]], "even": [[3, 4, 5], [6, 7, 8]], "ragged": [[3, 4, 5, 6, 7], [8], [9, 10, 11]]}
CAPACITY = 13
N_GPU_EXAMPLES = 15  # fewer, because every new combination of settings compiles kernels
n_examples = N_GPU_EXAMPLES if torch.cuda.is_available() else 25


@pytest.fixture(params=FAST_BACKENDS, scope="module")
def backend(request):
    """Each backend that this machine can run, except for the eager one."""
    if DEVICE_TYPES[request.param] == "cuda" and not torch.cuda.is_available():
        pytest.skip("the cuda backend requires a GPU; tests/accel runs its kernels in Triton's interpreter")
    return next(backend for backend in BACKENDS if backend.name == request.param)


def build_for(backend, config, seed=0):
    """Return a random model on the device of the backend, in a dtype that the backend supports."""
    is_bf16 = backend.name == BackendName.CUDA and isinstance(config, BERTConfig)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    return build_random_model(config, seed).to(DEVICE_TYPES[backend.name], dtype)


def build_if_supported(backend, config, seed=0):
    """Return a model if the backend supports it. Otherwise, check its reason and return `None`."""
    model = build_for(backend, config, seed)
    with torch.no_grad():
        reason = backend.supports(model)
        if reason is None:
            assert select_backend(model, backend.name) is backend
            return model
        assert isinstance(reason, str)
        assert reason.strip() == reason != ""
        with pytest.raises(InputError) as error:
            select_backend(model, backend.name)
        assert reason in str(error.value)
        assert str(backend.name) in str(error.value)
        assert explain_backends(model)[1][backend.name] == reason
    return None


def test_the_registry_contains_every_backend_and_eager_is_the_last_resort():
    assert {backend.name for backend in BACKENDS} == set(BackendName) - {BackendName.AUTO}
    assert {backend.name for backend in BACKENDS} == {"cpu", "cuda", "eager"}
    assert BACKENDS[-1].name == "eager"
    assert set(DEVICE_TYPES) == set(FAST_BACKENDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_backend_supports_some_models_and_eager_supports_all(backend, family):
    """Without this test, a backend that rejects every model would pass all other tests."""
    with torch.no_grad():
        models = [build_for(backend, config) for config in FAMILIES[family].values()]
        n_supported = sum(backend.supports(model) is None for model in models)
        assert n_supported >= {"gpt": 3, "bert": 2, "seq2seq": 5, "rnn": 3}[family]
        assert all(BACKENDS[-1].supports(model) is None for model in models)


def encode(model, rows, segments, backend):
    """Return the concatenated states of all texts."""
    engine, states = encode_engine(model, backend=backend), dict[int, torch.Tensor]()
    for indices in engine.group([len(row) for row in rows]):
        group_segments = None if segments is None else [segments[index] for index in indices]
        encoded = engine.encode([rows[index] for index in indices], group_segments)
        states |= {index: encoded[i, : len(rows[index])] for i, index in enumerate(indices)}
    return torch.cat([states[index] for index in range(len(rows))])


@torch.no_grad()
def check_encoder(backend, config, texts, seed, assert_agree):
    model = build_if_supported(backend, config, seed)
    if model is None:
        return
    all_segments = [None]
    if model.embedding.segment is not None:
        all_segments.append([[i % 2 for i in range(len(text))] for text in texts])
    for segments in all_segments:
        actual, expected = (encode(model, texts, segments, name) for name in (backend.name, BackendName.EAGER))
        if expected.dtype is torch.float32:
            assert_agree(actual, expected)
            continue
        # The random weights amplify the rounding to 16 bits, but not more than in the eager model.
        exact = encode(deepcopy(model).float(), texts, segments, BackendName.EAGER)
        error, eager_error = ((states.float() - exact).norm() for states in (actual, expected))
        assert error <= 2 * eager_error + 1e-3 * exact.norm()


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("name", BERTS)
def test_the_states_of_a_bert_agree(backend, name, texts, assert_agree):
    check_encoder(backend, BERTS[name], TEXTS[texts], 3, assert_agree)


@settings(max_examples=n_examples)
@given(berts(n_segments=2), seeds, st.sampled_from(sorted(TEXTS)))
def test_the_states_of_a_random_bert_agree(backend, assert_agree, config, seed, texts):
    check_encoder(backend, config, TEXTS[texts], seed, assert_agree)


def prefill_both(backend, model, texts):
    """Return both engines after processing the texts, which are the prompts of a GPT and otherwise the sources."""
    is_gpt = isinstance(model, GPT)
    prompts, sources = (texts, None) if is_gpt else ([[1]] * len(texts), texts)
    engines = [
        decode_engine(model, batch=len(texts), capacity=CAPACITY, backend=name)
        for name in (backend.name, BackendName.EAGER)
    ]
    return engines, [engine.prefill(prompts, sources=sources) for engine in engines]


def beams_after(step, n_sequences, width, generator):
    """Return the rows, the remaining sequences and the number of equal tokens of a reordering after some steps.

    First, each sequence gets three beams. Later, their order changes, and all sequences except for the last finish. Of
    three sequences, as many rows remain as there were at the start.
    """
    if step == 1:
        return [sequence for sequence in range(n_sequences) for _ in range(3)], None, 2
    remaining = list(range(n_sequences)) if step < 4 else [n_sequences - 1]
    parents = torch.randint(0, width, (len(remaining), width), generator=generator).tolist()
    rows = [index * width + parent for index, row in zip(remaining, parents, strict=True) for parent in row]
    return rows, None if len(remaining) == n_sequences else remaining, 2


@torch.inference_mode()
def check_decoder(backend, config, texts, seed, assert_agree):
    """Compare the logits of the prompts and of seven steps, with beams that are added, dropped and reordered."""
    model = build_if_supported(backend, config, seed)
    if model is None:
        return
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    engines, logits = prefill_both(backend, model, texts)
    assert_agree(*logits)
    n_sequences, width = len(texts), 1
    for step in range(7):
        ids = torch.randint(0, config.vocab_size, (n_sequences, width), generator=generator)
        assert_agree(*(engine.decode(ids.flatten().to(device)) for engine in engines))
        if step in (1, 3, 4):
            rows, sequences, common_prefix = beams_after(step, n_sequences, width, generator)
            for engine in engines:
                engine.reorder(
                    torch.tensor(rows, device=device),
                    sequences=None if sequences is None else torch.tensor(sequences, device=device),
                    common_prefix=common_prefix,
                )
            n_sequences = n_sequences if sequences is None else len(sequences)
            width = len(rows) // n_sequences
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize(("family", "name"), DECODER_CASES)
def test_the_logits_of_each_step_agree(backend, family, name, texts, assert_agree):
    check_decoder(backend, DECODERS[family][name], TEXTS[texts], 5, assert_agree)


@settings(max_examples=n_examples)
@given(gpts(), seeds, st.sampled_from(sorted(TEXTS)))
def test_the_logits_of_a_random_gpt_agree(backend, assert_agree, config, seed, texts):
    check_decoder(backend, config, TEXTS[texts], seed, assert_agree)


@settings(max_examples=n_examples)
@given(seq2seqs(), seeds, st.sampled_from(sorted(TEXTS)))
def test_the_logits_of_a_random_seq2seq_agree(backend, assert_agree, config, seed, texts):
    check_decoder(backend, config, TEXTS[texts], seed, assert_agree)


@settings(max_examples=n_examples)
@given(rnns(), seeds, st.sampled_from(sorted(TEXTS)))
def test_the_logits_of_a_random_rnn_agree(backend, assert_agree, config, seed, texts):
    check_decoder(backend, config, TEXTS[texts], seed, assert_agree)


SAMPLINGS = {"greedy": SamplingConfig(temperature=0), "sampled": SamplingConfig(temperature=0.9, top_p=0.9, seed=5)}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["default", "Llama"])
def test_generated_tokens_are_equal(backend, name, sampling):
    model = build_for(backend, GPTS[name], 7)
    outputs = [
        generate(model, TEXTS["ragged"], max_new=9, sampling=SAMPLINGS[sampling],
                 create_engine=partial(decode_engine, backend=engine))
        for engine in (backend.name, BackendName.EAGER)
    ]  # fmt: skip
    for actual, expected in zip(*outputs, strict=True):
        assert actual.new_ids == expected.new_ids
        assert actual.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-3)


@pytest.mark.parametrize(("family", "name"), [("gpt", "Llama"), ("seq2seq", "default"), ("rnn", "GRU")])
def test_beam_search_finds_the_same_hypotheses(backend, family, name):
    model, beam = build_for(backend, DECODERS[family][name], 7), BeamConfig(n_beams=3, n_best=3)
    run = partial(beam_generate, model, TEXTS["ragged"], max_new=9, beam=beam, stop_ids=frozenset({2}))
    if family != "gpt":
        run = partial(
            translate, model, TEXTS["ragged"], start_id=1, max_new=[9] * 3, beam=beam, stop_ids=frozenset({2})
        )
    actual, expected = (
        run(create_engine=partial(decode_engine, backend=engine)) for engine in (backend.name, BackendName.EAGER)
    )
    for hypotheses, eager_hypotheses in zip(actual, expected, strict=True):
        assert [hypothesis.ids for hypothesis in hypotheses] == [hypothesis.ids for hypothesis in eager_hypotheses]


def add_hook(model):
    next(module for module in model.modules() if isinstance(module, torch.nn.Linear)).register_forward_hook(
        lambda *_: None
    )


def observe_tap(model):
    last = model.last_hidden_state if isinstance(model, GPT | BERT) else model.decoder.last_hidden_state
    last.observe(lambda _: None)


STATES = {
    "training": (lambda model: model.train(), ("gpt", "bert", "seq2seq", "rnn")),
    "a hook": (add_hook, ("gpt", "bert")),
    "an observed tap": (observe_tap, ("gpt", "bert")),
}


@pytest.mark.parametrize(
    ("state", "family"), [(state, family) for state, (_, families) in STATES.items() for family in families]
)
@torch.no_grad()
def test_a_model_in_a_state_that_a_fast_engine_would_ignore_runs_eagerly(backend, state, family):
    model = build_for(backend, FAMILIES[family]["GRU" if family == "rnn" else "default"])
    assert select_backend(model) is backend
    STATES[state][0](model)
    assert backend.supports(model)
    assert select_backend(model).name == BackendName.EAGER


@pytest.mark.parametrize(
    ("has_gpu", "reason"),
    [(True, "the model is on cpu, not on an NVIDIA GPU"), (False, "PyTorch finds no NVIDIA GPU on this machine")],
)
def test_a_model_on_another_device_or_of_another_dtype_is_rejected(has_gpu, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with torch.no_grad():
        selected, reasons = explain_backends(build_random_model(GPTS["default"]))
    assert selected == BackendName.EAGER
    assert reasons[BackendName.CUDA] == reason
    assert "torch.float64" in reasons[BackendName.CPU]


def test_with_a_named_backend_the_faster_ones_are_not_used_because_of_the_option():
    with torch.no_grad():
        selected, reasons = explain_backends(build_random_model(GPTS["default"]), BackendName.EAGER)
    assert selected == BackendName.EAGER
    assert reasons == dict.fromkeys([BackendName.CUDA, BackendName.CPU], "not selected by --backend eager")


def test_an_unknown_backend_is_rejected():
    with pytest.raises(InputError, match="--backend tpu: must be one of"):
        select_backend(build(GPTS["default"]), "tpu")


def run_model(model, device):
    """Return one output of a model for each family."""
    ids = random_ids(1, 3, 7).to(device)
    sources = random_ids(2, 3, 5, SOURCE_VOCABULARY).to(device)
    return model(ids) if isinstance(model, GPT | BERT) else model(sources, ids)


def outputs_and_gradients(model, device):
    model.zero_grad()
    output = run_model(model, device)
    output.logsumexp(-1).sum().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt", "default"), ("gpt", "Llama"), ("gpt", "sinusoidal"), ("gpt", "concatenated"), ("bert", "BERT"),
     ("seq2seq", "default"), ("rnn", "GRU")],
)  # fmt: skip
def test_accelerated_modules_share_parameters_and_give_the_same_gradients(
    device, family, name, mode, monkeypatch, assert_agree
):
    monkeypatch.setattr(onednn_linear, "MIN_ONEDNN_SIZE", 1)
    monkeypatch.setattr(fused_modules, "MIN_TOKENS_FOR_FUSED_QKV", 1)
    model = (
        build_random_model(FAMILIES[family][name], 3)
        .to(device, torch.float32)
        .train(mode == "train" or family == "rnn")
    )
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    expected = outputs_and_gradients(model, device)
    swap = accelerated(model, mode)
    is_replaced = device.type == "cuda" or (family == "gpt" and mode == "train")
    assert bool(swap.replacements) is is_replaced
    with swap:
        inside, inside_parameters = dict(model.named_modules()), dict(model.named_parameters())
        assert list(inside) == list(modules)
        assert any(inside[key] is not modules[key] for key in modules) is is_replaced
        assert list(inside_parameters) == list(parameters)
        assert all(inside_parameters[key] is parameters[key] for key in parameters)
        actual = outputs_and_gradients(model, device)
    for tensor, eager_tensor in zip(actual, expected, strict=True):
        assert_agree(tensor, eager_tensor)
    assert all(module is modules[key] for key, module in model.named_modules())


def test_accelerated_restores_the_modules_after_an_error(device, monkeypatch):
    monkeypatch.setattr(onednn_linear, "MIN_ONEDNN_SIZE", 1)
    model = build(GPTS["default"]).to(device)
    modules = dict(model.named_modules())

    def fail_inside():
        with accelerated(model, "train"):
            assert any(module is not modules[key] for key, module in model.named_modules())
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        fail_inside()
    assert all(module is modules[key] for key, module in model.named_modules())


def training_losses(config, training, device, backend):
    """Return the losses of six training steps. A captured step is replayed from the third one."""
    model, losses = build(config, seed=3).to(device).train(), []
    step = build_train_step(model, training, lambda: next_token_objective(model, training), backend=backend)
    for i in range(6):
        ids = random_ids(i, training.batch_size, training.seq_len + 1)
        counts = torch.full((training.batch_size,), training.seq_len)
        batch = step.load(TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, counts))
        losses.append(step(batch, i, learning_rate=1e-2).read().loss)
    return losses


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.compiled)])
@pytest.mark.parametrize("name", ["default", "Llama"])
def test_training_gives_the_same_losses(backend, name, is_compiled, monkeypatch):
    monkeypatch.setattr(onednn_linear, "MIN_ONEDNN_SIZE", 1)
    monkeypatch.setattr(fused_modules, "MIN_TOKENS_FOR_FUSED_QKV", 1)
    eager = TrainingConfig(
        steps=6, batch_size=4, seq_len=16, warmup_steps=0, precision="bf16" if is_compiled else "fp32"
    )
    fast = eager.replace(compile=is_compiled)
    reason = backend.supports_training(build(GPTS[name]).to(DEVICE_TYPES[backend.name]), fast)
    if reason is not None:
        assert is_compiled
        assert backend.name == BackendName.CPU
        return
    device = DEVICE_TYPES[backend.name]
    actual = training_losses(GPTS[name], fast, device, backend.name)
    expected = training_losses(GPTS[name], eager, device, BackendName.EAGER)
    assert actual == pytest.approx(expected, rel=2e-2 if is_compiled else 1e-4)
    assert actual[0] != actual[-1]
