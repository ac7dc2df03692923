"""`verify` passes correct models, and each check detects its own bug."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from qkv.choices import CheckStatus
from qkv.config import GPTConfig, RNNConfig, Seq2SeqConfig
from qkv.errors import InputError
from qkv.generation import decode_engine, generate
from qkv.models import GPT, stack
from qkv.nn import KVCache
from qkv.tasks import Translator, load_pretrained
from qkv.tasks.verification import CHECKS, verify
from qkv.tasks.verification.case import NotCheckedError, VerificationCase
from qkv.training import optimizer
from qkv.weights import checkpoint_folder, ctranslate2_export, gguf_file, save
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import save_hf, save_native
from tests.agreement.model_strategies import build_random_model
from tests.tasks.small_bert import save_bert
from tests.tasks.small_gpt import save_task, small_gpt
from tests.tasks.small_translator import CONTEXT, save_translator, train_word_tokenizer
from tests.weights.loaded_models import random_model

SHORT = ("The cat sat.", "Then both slept by the dog.", "dos tres cuatro")
FOLDERS = ("gpt", "llama", "bert", "seq2seq", "rnn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a random model of each kind."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), train_word_tokenizer()
    save_task(small_gpt(), folder / "gpt")
    save_hf(random_model("llama, group size 2"), folder / "llama")
    save_bert(folder / "bert")
    sizes = {"vocab_size": tokenizer.vocab_size, "context_length": CONTEXT, "d_model": 12}
    configs = {
        "seq2seq": Seq2SeqConfig(**sizes, n_heads=3, n_encoder_layers=1, n_decoder_layers=2),
        "rnn": RNNConfig(**sizes, attention="general"),
    }
    for name, config in configs.items():
        save_translator(Translator(build_random_model(config).float(), tokenizer), folder / name)
    return folder


def failed_checks(name, *, quick=True):
    return {result.check for result in verify(name, texts=SHORT, quick=quick) if result.verdict is CheckStatus.FAILED}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_correct_model_passes_and_skipped_checks_have_a_reason(folder, name):
    results = list(verify(folder / name, quick=True))
    assert [result.check for result in results] == list(CHECKS)
    for result in results:
        assert result.verdict is not CheckStatus.FAILED, result
        assert (result.difference is None) == (result.verdict is CheckStatus.NOT_CHECKED) == (result.reason is not None)
    n_checked = sum(result.verdict is CheckStatus.PASSED for result in results)
    assert n_checked == {"gpt": 13, "llama": 13, "bert": 9, "seq2seq": 10, "rnn": 9}[name]


def without(part: str) -> Callable:
    """A mask function that ignores one of its arguments."""
    return lambda *args, **rules: build_mask(*args, **(rules | {part: None}))


build_mask, positions, own_forward, select = (
    stack.build_mask,
    KVCache._assign_slots,
    GPT.forward,
    decode_engine.GPTDecodeEngine.reorder,
)


def at_the_start(self, n_new, attention_mask):
    """Positions that restart at 0 in each cached pass, except with rows of unequal lengths."""
    slots = positions(self, n_new, attention_mask)
    return slots if self.is_ragged else slots - slots[:, :1]


def rows_swapped(self, ids, **options):
    logits = own_forward(self, ids, **options)
    return logits.flip(0) if ids.shape[0] == 2 and not options.get("cache") else logits


def unmoved(self, rows, *, sequences=None, common_prefix=0):
    """Reordering that leaves the cache unchanged."""
    if sequences is not None:
        select(self, rows, sequences=sequences, common_prefix=common_prefix)


def second_best(logits, *_others, **_more):
    return logits.topk(2).indices[:, 1]


def published_otherwise(config):
    return to_lossless_published_config(config) | {"rms_norm_eps": 0.1}


to_lossless_published_config, dequantize_int8_matrices = (
    save.to_lossless_published_config,
    checkpoint_folder.dequantize_int8_matrices,
)


def too_large(stored):
    return dequantize_int8_matrices(
        {name: tensor * 1.01 if name.endswith(".scale") else tensor for name, tensor in stored.items()}
    )


BUGS = {
    "cached": ("gpt", KVCache, "_assign_slots", at_the_start),
    "batched": ("gpt", GPT, "forward", rows_swapped),
    "padded": ("gpt", stack, "build_mask", without("attention_mask")),
    "packed": ("gpt", stack, "build_mask", without("documents")),
    "greedy": ("gpt", generate, "choose_next_ids", second_best),
    "beam": ("gpt", decode_engine.GPTDecodeEngine, "reorder", unmoved),
    "int8 weights": ("gpt", checkpoint_folder, "dequantize_int8_matrices", too_large),
    "hf": ("llama", save, "to_lossless_published_config", published_otherwise),
    "gguf": ("llama", gguf_file, "halves_to_interleaved", lambda tensor, **_n: tensor),
}


@pytest.mark.parametrize("check", BUGS)
def test_a_bug_fails_only_its_own_check(folder, check, monkeypatch):
    name, owner, part, bug = BUGS[check]
    module = sys.modules["qkv.generation.generate"] if owner is generate else owner
    monkeypatch.setattr(module, part, bug)
    # The CPU engine shares the sampling and the KV cache with the eager one.
    shared = {"cpu backend"} if check in ("greedy", "beam") else set()
    assert failed_checks(folder / name) == {check} | shared


def test_unmasked_padding_of_a_bert_is_detected(folder, monkeypatch):
    monkeypatch.setattr(stack, "build_mask", without("attention_mask"))
    assert failed_checks(folder / "bert") == {"padded"}


def test_changed_weights_are_detected_in_every_format(folder, monkeypatch):
    written = save.to_published_state
    monkeypatch.setattr(
        save, "to_published_state", lambda *args: {key: tensor * 1.1 for key, tensor in written(*args).items()}
    )
    assert failed_checks(folder / "rnn") == {"saved", "int8 weights", "int8"}


def test_embeddings_of_unused_words_are_compared(folder, monkeypatch):
    written = save.to_published_state

    def with_one_word_changed(*args):
        tensors = written(*args)
        tensors["source_embedding.weight"][-1] += 0.5
        return tensors

    monkeypatch.setattr(save, "to_published_state", with_one_word_changed)
    assert failed_checks(folder / "rnn") == {"saved", "int8 weights"}


def test_a_wrong_kernel_is_detected_by_every_check(folder, monkeypatch):
    attention = sys.modules["qkv.nn.attention"]
    monkeypatch.setattr(attention, "fused_attention", lambda inputs: 1.01 * inputs.weighted_values(inputs.weights()))
    assert {"fused", "cached", "batched", "padded", "packed"} <= failed_checks(folder / "gpt")


def no_compiler(monkeypatch):
    monkeypatch.setattr("qkv.tasks.verification.computation_checks.shutil", SimpleNamespace(which=lambda _name: None))


@pytest.fixture
def difference(folder, tmp_path):
    """Returns a function that runs a single check."""

    def measure(name, check, subfolder="new"):
        (tmp_path / subfolder).mkdir()
        case = VerificationCase(loaded=load_pretrained(folder / name), texts=SHORT, folder=tmp_path / subfolder)
        with torch.no_grad():
            return CHECKS[check].difference(case)

    return measure


def test_transformers_agrees_and_a_wrong_setting_is_detected(difference, monkeypatch):
    assert difference("llama", "transformers") < CHECKS["transformers"].tolerance
    monkeypatch.setattr(save, "to_lossless_published_config", published_otherwise)
    assert difference("llama", "transformers", "wrong") > 10 * CHECKS["transformers"].tolerance


def test_ctranslate2_agrees_and_a_wrong_weight_is_detected(difference, monkeypatch):
    assert difference("seq2seq", "ct2") < CHECKS["ct2"].tolerance
    fill_norm = ctranslate2_export._fill_norm

    def too_strong(spec, norm):
        fill_norm(spec, norm)
        spec.gamma = spec.gamma * 1.01

    monkeypatch.setattr(ctranslate2_export, "_fill_norm", too_strong)
    assert difference("seq2seq", "ct2", "wrong") > 10 * CHECKS["ct2"].tolerance


def test_a_wrong_compiled_forward_is_detected(difference, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_options: lambda *args: forward(*args) * 1.001)
    assert difference("gpt", "compiled") > 10 * CHECKS["compiled"].tolerance


@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch during compilation
def test_a_compiled_forward_agrees(difference):
    assert difference("gpt", "compiled") < CHECKS["compiled"].tolerance


@pytest.fixture
def run(tmp_path):
    from tests.training.runs import build_cpu_trainer, prepare_small_run

    prepared = prepare_small_run(tmp_path, steps=3, save_every=3, eval_every=3)
    build_cpu_trainer(prepared).train()
    return prepared.run.path


def test_a_resumed_run_agrees_and_stays_unchanged(run, monkeypatch):
    no_compiler(monkeypatch)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    *_, result = verify(run, texts=SHORT)
    assert (result.check, result.verdict, result.difference) == ("resumed", CheckStatus.PASSED, 0.0)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    monkeypatch.setattr(optimizer, "load_optimizer_state", lambda *_args: None)
    assert failed_checks(run, quick=False) == {"resumed"}


@pytest.mark.parametrize(
    ("name", "check", "reason"),
    [
        ("llama", "compiled", r"torch\.compile.*g\+\+"),
        ("llama", "transformers", "pip install transformers"),
        ("llama", "gguf", r"qkv\[formats\]"),
        ("seq2seq", "ct2", r"qkv\[formats\]"),
        ("llama", "resumed", "training run"),
    ],
)
def test_missing_dependencies_are_named(difference, name, check, reason, monkeypatch):
    no_compiler(monkeypatch)
    for library in ("transformers", "gguf", "ctranslate2"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(NotCheckedError, match=reason):
        difference(name, check)


def test_an_exception_fails_its_check_and_the_others_still_run(folder, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("a shape\ndoes not fit")

    monkeypatch.setattr(KVCache, "reserve", broken)
    results = {result.check: result for result in verify(folder / "gpt", quick=True)}
    assert results["cached"].reason == "RuntimeError: a shape does not fit"
    assert {result.check for result in results.values() if result.verdict is CheckStatus.FAILED} == {
        "cached",
        "greedy",
        "beam",
        "cpu backend",
    }


def test_nan_fails_the_check(folder, monkeypatch):
    nan_logits = lambda model, ids, _split_points, source: model(ids) * float("nan")  # noqa: E731, ARG005
    monkeypatch.setattr("qkv.tasks.verification.implementations.forward_in_chunks", nan_logits)
    result = {result.check: result for result in verify(folder / "gpt", quick=True)}["cached"]
    assert (result.verdict, result.difference, result.reason) == (CheckStatus.FAILED, None, "the difference is nan")


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(vocab_size=23, context_length=31, d_model=12, n_heads=3, n_layers=1),
        Seq2SeqConfig(
            vocab_size=23,
            source_vocab_size=19,
            share_embeddings=False,
            context_length=31,
            d_model=12,
            n_heads=3,
            n_encoder_layers=1,
            n_decoder_layers=1,
        ),
    ],
    ids=["gpt", "seq2seq"],
)
def test_a_model_without_a_tokenizer_uses_random_ids(config, tmp_path):
    save_native(ModelBundle(build_random_model(config).float(), None), tmp_path / "model")
    assert not failed_checks(tmp_path / "model")


def test_an_image_model_can_be_saved_but_not_verified_or_used_as_a_translator(tmp_path):
    config = Seq2SeqConfig(
        vocab_size=23,
        share_embeddings=False,
        d_patch=7,
        context_length=31,
        d_model=12,
        n_heads=3,
        n_encoder_layers=1,
        n_decoder_layers=1,
    )
    model = build_random_model(config).float()
    save_native(ModelBundle(model, None), tmp_path / "model")
    back = load_pretrained(tmp_path / "model").model
    patches, ids = torch.rand(2, 5, 7), torch.zeros(2, 3, dtype=torch.long)
    assert torch.equal(back(patches, ids), model.eval()(patches, ids))
    with pytest.raises(InputError, match="d_patch=7"):
        list(verify(tmp_path / "model", quick=True))
    with pytest.raises(InputError, match=r"Translator.*d_patch=7"):
        Translator(back, train_word_tokenizer())


def test_too_few_texts_raise(folder):
    with pytest.raises(InputError, match=r"\b1 of 2 texts"):
        list(verify(folder / "gpt", texts=["The cat sat on the mat.", "a"], quick=True))
