"""CTranslate2 says what we say with the same weights, and a shape that it lacks is named."""

import json
import random
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
from tests.tasks.small_translator import reverse_words, draw_text, small_translator, train_to_reverse
from tests.weights.loaded_models import random_model
from tests.weights.published_translators import FOLDERS, SPANISH

SHIPPED = {
    "gated": True, "activation": "silu", "norm": "rms", "norm_position": "pre", "final_norm": True,
    "attention_bias": False, "feed_forward_bias": False, "d_ff": 104,
}  # fmt: skip


@cache
def shipped_shape() -> Translator:
    """As `recipes/es-en.toml` describes it, smaller."""
    return train_to_reverse(**SHIPPED)


def as_loaded(task: Translator) -> ModelBundle:
    return ModelBundle(task.model, task.tokenizer, generation_config=task.generation_config)


def theirs(folder, task, texts, **options):
    """The texts that CTranslate2 writes, greedily."""
    tokens = [[task.source_tokenizer.id_to_token(i) for i in task.source_tokenizer.encode(text)] for text in texts]
    translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1, compute_type="float32")
    found = translator.translate_batch(tokens, beam_size=1, max_decoding_length=30, **options)
    ids = [[task.tokenizer.backend.token_to_id(token) for token in one.hypotheses[0]] for one in found]
    return [" ".join(task.tokenizer.decode(one).split()) for one in ids]


@pytest.mark.parametrize("make", [small_translator, shipped_shape])
def test_greedy_texts_of_a_trained_model_are_the_same(make, tmp_path):
    """Greedy alone: with beams it searches by rules of its own, and 2 in 100 of these texts differ."""
    task = make()
    assert save_ct2(as_loaded(task), tmp_path / "ct2") == []
    chance = random.Random(3)
    texts = [draw_text(chance, chance.randint(1, 9)) for _ in range(200)]
    ours = [one.text for one in task.translate_batch(texts, beam=BeamConfig(n_beams=1), max_new=30)]
    said = theirs(tmp_path / "ct2", task, texts)
    assert sum(one == other for one, other in zip(ours, said, strict=True)) >= 199
    short = [draw_text(chance, 4) for _ in range(20)]
    right = zip(short, theirs(tmp_path / "ct2", task, short), strict=True)
    assert sum(reverse_words(text) == said for text, said in right) >= 15  # else nothing was learnt, and nothing shown


def test_the_folder_has_the_tokenizer_that_its_tokens_come_from(tmp_path):
    task = small_translator()
    save_ct2(as_loaded(task), tmp_path / "ct2", dtype=StorageDType.F16)
    names = {file.name for file in (tmp_path / "ct2").iterdir()}
    wanted = {"model.bin", "config.json", "shared_vocabulary.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == wanted
    words = json.loads((tmp_path / "ct2" / "shared_vocabulary.json").read_text())
    assert words == [task.tokenizer.id_to_token(i) for i in range(task.tokenizer.vocab_size)]
    assert load_tokenizer(tmp_path / "ct2").encode("uno dos") == task.tokenizer.encode("uno dos")
    assert theirs(tmp_path / "ct2", task, ["uno dos"]) == ["dos uno"]
    n_bytes = sum(one.numel() for one in task.model.parameters()) * 2
    assert (tmp_path / "ct2" / "model.bin").stat().st_size < 1.5 * n_bytes


ODD = {
    "positions": {"positions": "learned", "embedding_norm": True, "scale_embedding": False, "activation": "gelu"},
    "T5's": {
        "positions": "relative", "norm": "rms", "norm_position": "pre", "final_norm": True, "scale_scores": False,
        "scale_logits": True, "scale_embedding": False, "attention_bias": False, "feed_forward_bias": False,
        "gated": True, "activation": "gelu-tanh", "relative_buckets": 8, "relative_max_distance": 9,
    },
    "no biases of norms, an untied bias": {
        "norm_bias": False, "tie_embeddings": False, "unembedding_bias": True, "norm_position": "pre",
        "norm_eps": 0.01,
    },
    "interleaved from one": {"sinusoid": "interleaved-from-one", "norm_eps": 0.03},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_log_probabilities_of_other_shapes_agree(name, tmp_path):
    tokenizer = small_translator().tokenizer
    sizes = {"context_length": 41, "d_model": 20, "n_heads": 5, "n_encoder_layers": 2, "n_decoder_layers": 3}
    config = Seq2SeqConfig(vocab_size=tokenizer.vocab_size + 3, init_std=0.2, **{**sizes, **ODD[name]})
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


def test_a_marian_folder_leaves_with_both_tokenizers_and_never_writes_its_padding(tmp_path):
    FOLDERS["marian, swish"](tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model")
    task = Translator(loaded.model, loaded.tokenizer, source=loaded.source_tokenizer, generation_config=loaded.generation_config)
    assert save_ct2(loaded, tmp_path / "ct2") == []
    ours = [one.text for one in task.translate_batch(SPANISH, beam=BeamConfig(n_beams=1), max_new=30)]
    assert theirs(tmp_path / "ct2", task, SPANISH) == ours
    assert (tmp_path / "ct2" / "source_tokenizer.json").is_file()


def test_what_bart_forces_is_said(tmp_path):
    FOLDERS["bart"](tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model")
    assert save_ct2(loaded, tmp_path / "ct2") == ["every text must begin with <s>: give it as target_prefix"]
    task = Translator(loaded.model, loaded.tokenizer, generation_config=loaded.generation_config)
    ours = [one.text for one in task.translate_batch(SPANISH, beam=BeamConfig(n_beams=1), max_new=30)]
    prefix = [["<s>"] for _ in SPANISH]
    assert theirs(tmp_path / "ct2", task, SPANISH, target_prefix=prefix) == ours


@pytest.mark.parametrize(
    ("shape", "remark"),
    [
        ({"positions": "rotary", "window": 5}, "CTranslate2 cannot have sliding_window=5, positions=rotary$"),
        ({"n_kv_heads": 1}, "CTranslate2 cannot have n_kv_heads=1$"),
        ({"d_head": 5}, "CTranslate2 cannot have d_head=5$"),
        ({"final_norm": True}, "CTranslate2 cannot have final_norm=True$"),
        ({"d_patch": 7, "share_embeddings": False}, "CTranslate2 cannot have d_patch=7$"),
        ({"head_layout": "pooled"}, "CTranslate2 cannot have head_layout=pooled, d_value=12$"),
    ],
)
def test_a_shape_that_it_lacks_is_named(tmp_path, shape, remark):
    tokenizer = small_translator().tokenizer
    sizes = {"context_length": 41, "d_model": 12, "n_heads": 3, "n_encoder_layers": 1, "n_decoder_layers": 1}
    model = Seq2Seq(Seq2SeqConfig(vocab_size=tokenizer.vocab_size, **{**sizes, **shape}))
    with pytest.raises(ConfigError, match=remark):
        save_ct2(ModelBundle(model, tokenizer), tmp_path / "ct2")
    assert list(tmp_path.iterdir()) == []


def test_other_families_missing_parts_and_full_places_are_refused(tmp_path, monkeypatch):
    task = small_translator()
    with pytest.raises(InputError, match="--to ct2 takes encoder–decoder Transformers, not a gpt"):
        save_ct2(random_model("llama, 2 queries a key"), tmp_path / "a")
    with pytest.raises(InputError, match="--to ct2 needs the model's tokenizer"):
        save_ct2(ModelBundle(task.model, None), tmp_path / "a")
    with pytest.raises(InputError, match="is there already"):
        save_ct2(as_loaded(task), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"cannot write \d+ bytes"):
        save_ct2(as_loaded(task), tmp_path / "file" / "out")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(MissingExtraError, match=r"--to ct2 needs ctranslate2: pip install 'qkv\[formats\]'"):
        save_ct2(as_loaded(task), tmp_path / "a")
