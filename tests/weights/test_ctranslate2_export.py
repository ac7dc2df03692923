"""CTranslate2 computes the same with exported weights, and unsupported settings are listed."""

import json
import random
import re
import sys
from functools import cache

import ctranslate2
import pytest
import torch

from qkv.config import BeamConfig, Seq2SeqConfig
from qkv.errors import ConfigError, DiskError, InputError, MissingExtraError
from qkv.models import Seq2Seq
from qkv.tasks import Translator, load_pretrained
from qkv.text import load_tokenizer
from qkv.weights.ctranslate2_export import save_ct2
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import StorageDType
from tests.tasks.small_translator import draw_text, reverse_words, small_translator, train_to_reverse
from tests.weights.loaded_models import random_model
from tests.weights.published_translators import FOLDERS, SPANISH

SHIPPED = {
    "gated": True, "activation": "silu", "norm": "rms", "norm_position": "pre", "final_norm": True,
    "attention_bias": False, "feed_forward_bias": False, "d_ff": 104,
}  # fmt: skip


@cache
def shipped_translator() -> Translator:
    """Smaller version of `recipes/es-en.toml`."""
    return train_to_reverse(**SHIPPED)


def to_bundle(task: Translator) -> ModelBundle:
    return ModelBundle(task.model, task.tokenizer, generation_config=task.generation_config)


def ct2_translations(folder, task, texts, **options):
    """Greedy translations by CTranslate2."""
    tokens = [[task.source_tokenizer.id_to_token(i) for i in task.source_tokenizer.encode(text)] for text in texts]
    translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1, compute_type="float32")
    results = translator.translate_batch(tokens, beam_size=1, max_decoding_length=30, **options)
    ids = [[task.tokenizer.backend.token_to_id(token) for token in result.hypotheses[0]] for result in results]
    return [" ".join(task.tokenizer.decode(token_ids).split()) for token_ids in ids]


@pytest.mark.parametrize("make", [small_translator, shipped_translator])
def test_greedy_translations_of_a_trained_model_are_equal(make, tmp_path):
    """Only greedy search is compared: its beam search has different rules, and 2 % of these translations differ."""
    task = make()
    assert save_ct2(to_bundle(task), tmp_path / "ct2") == []
    generator = random.Random(3)
    texts = [draw_text(generator, generator.randint(1, 9)) for _ in range(200)]
    ours = [translation.text for translation in task.translate_batch(texts, beam=BeamConfig(n_beams=1), max_new=30)]
    actual = ct2_translations(tmp_path / "ct2", task, texts)
    assert sum(a == b for a, b in zip(ours, actual, strict=True)) >= 199
    short = [draw_text(generator, 4) for _ in range(20)]
    pairs = zip(short, ct2_translations(tmp_path / "ct2", task, short), strict=True)
    assert (
        sum(reverse_words(text) == translation for text, translation in pairs) >= 15
    )  # the model has learned the task


def test_the_folder_contains_the_tokenizer(tmp_path):
    task = small_translator()
    save_ct2(to_bundle(task), tmp_path / "ct2", dtype=StorageDType.F16)
    names = {file.name for file in (tmp_path / "ct2").iterdir()}
    expected = {"model.bin", "config.json", "shared_vocabulary.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == expected
    words = json.loads((tmp_path / "ct2" / "shared_vocabulary.json").read_text())
    assert words == [task.tokenizer.id_to_token(i) for i in range(task.tokenizer.vocab_size)]
    assert load_tokenizer(tmp_path / "ct2").encode("uno dos") == task.tokenizer.encode("uno dos")
    assert ct2_translations(tmp_path / "ct2", task, ["uno dos"]) == ["dos uno"]
    n_bytes = sum(parameter.numel() for parameter in task.model.parameters()) * 2
    assert (tmp_path / "ct2" / "model.bin").stat().st_size < 1.5 * n_bytes


OTHER_CONFIGS = {
    "positions": {"positions": "learned", "embedding_norm": True, "scale_embedding": False, "activation": "gelu"},
    "T5": {
        "positions": "relative", "norm": "rms", "norm_position": "pre", "final_norm": True, "scale_scores": False,
        "scale_logits": True, "scale_embedding": False, "attention_bias": False, "feed_forward_bias": False,
        "gated": True, "activation": "gelu-tanh", "relative_buckets": 8, "relative_max_distance": 9,
    },
    "no norm bias, untied, unembedding bias": {
        "norm_bias": False, "tie_embeddings": False, "unembedding_bias": True, "norm_position": "pre",
        "norm_eps": 0.01,
    },
    "interleaved from one": {"sinusoid": "interleaved-from-one", "norm_eps": 0.03},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_log_probabilities_agree_for_other_configs(name, tmp_path):
    tokenizer = small_translator().tokenizer
    sizes = {"context_length": 41, "d_model": 20, "n_heads": 5, "n_encoder_layers": 2, "n_decoder_layers": 3}
    config = Seq2SeqConfig(vocab_size=tokenizer.vocab_size + 3, init_std=0.2, **{**sizes, **OTHER_CONFIGS[name]})
    model = Seq2Seq(config, seed=7).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    save_ct2(ModelBundle(model, tokenizer), tmp_path / "ct2")
    task = Translator(model, tokenizer)
    source, target = tokenizer.encode("uno dos tres cuatro"), tokenizer.encode("siete ocho", add_special_tokens=False)
    with torch.no_grad():
        log_p = model(torch.tensor([source]), torch.tensor([[task.decoder_start_id, *target]]))[0].log_softmax(-1)
    expected = [float(log_p[i, number]) for i, number in enumerate(target)]
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", intra_threads=1, compute_type="float32")
    words = [[tokenizer.id_to_token(number) for number in ids] for ids in (source, target)]
    (scored,) = translator.score_batch([words[0]], [words[1]])
    assert scored.log_probs[: len(expected)] == pytest.approx(expected, abs=2e-4)


def test_an_exported_marian_has_both_tokenizers_and_never_generates_padding(tmp_path):
    FOLDERS["marian, swish"](tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model")
    task = Translator(
        loaded.model, loaded.tokenizer, source=loaded.source_tokenizer, generation_config=loaded.generation_config
    )
    assert save_ct2(loaded, tmp_path / "ct2") == []
    ours = [translation.text for translation in task.translate_batch(SPANISH, beam=BeamConfig(n_beams=1), max_new=30)]
    assert ct2_translations(tmp_path / "ct2", task, SPANISH) == ours
    assert (tmp_path / "ct2" / "source_tokenizer.json").is_file()


def test_the_forced_token_of_bart_is_reported(tmp_path):
    FOLDERS["bart"](tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model")
    (remark,) = save_ct2(loaded, tmp_path / "ct2")
    assert "<s>" in remark
    assert "target_prefix" in remark
    task = Translator(loaded.model, loaded.tokenizer, generation_config=loaded.generation_config)
    ours = [translation.text for translation in task.translate_batch(SPANISH, beam=BeamConfig(n_beams=1), max_new=30)]
    prefix = [["<s>"] for _ in SPANISH]
    assert ct2_translations(tmp_path / "ct2", task, SPANISH, target_prefix=prefix) == ours


@pytest.mark.parametrize(
    ("shape", "remark"),
    [
        ({"positions": "rotary", "sliding_window": 5}, r"CTranslate2 .*\bsliding_window=5, positions=rotary$"),
        ({"n_kv_heads": 1}, r"CTranslate2 .*\bn_kv_heads=1$"),
        ({"d_head": 5}, r"CTranslate2 .*\bd_head=5$"),
        ({"final_norm": True}, r"CTranslate2 .*\bfinal_norm=True$"),
        ({"d_patch": 7, "share_embeddings": False}, r"CTranslate2 .*\bd_patch=7$"),
        ({"head_combination": "pooled"}, r"CTranslate2 .*\bhead_combination=pooled, d_value=12$"),
    ],
)
def test_unsupported_settings_are_listed(tmp_path, shape, remark):
    tokenizer = small_translator().tokenizer
    sizes = {"context_length": 41, "d_model": 12, "n_heads": 3, "n_encoder_layers": 1, "n_decoder_layers": 1}
    model = Seq2Seq(Seq2SeqConfig(vocab_size=tokenizer.vocab_size, **{**sizes, **shape}))
    with pytest.raises(ConfigError, match=remark):
        save_ct2(ModelBundle(model, tokenizer), tmp_path / "ct2")
    assert list(tmp_path.iterdir()) == []


def test_other_families_missing_parts_and_existing_folders_are_rejected(tmp_path, monkeypatch):
    task = small_translator()
    with pytest.raises(InputError, match=r"--to ct2 .*gpt"):
        save_ct2(random_model("llama, group size 2"), tmp_path / "a")
    with pytest.raises(InputError, match=r"--to ct2 .*tokenizer"):
        save_ct2(ModelBundle(task.model, None), tmp_path / "a")
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        save_ct2(to_bundle(task), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"\d+ bytes"):
        save_ct2(to_bundle(task), tmp_path / "file" / "out")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(MissingExtraError, match=r"--to ct2 .*qkv\[formats\]"):
        save_ct2(to_bundle(task), tmp_path / "a")
