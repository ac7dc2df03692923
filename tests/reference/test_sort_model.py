"""Our GPT reproduces the stored activations of a small published minGPT that sorts six letters."""

import base64
import json
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from qkv.config import GPTConfig
from qkv.inspection import record
from qkv.models import GPT

DATA = Path(os.environ.get("QKV_DATA", Path(__file__).parents[3] / "shared" / "data"))
FOLDER = DATA / "weights"
MODEL, PARTIALS = FOLDER / "gpt-nano-sort-model.json", FOLDER / "gpt-nano-sort-t0-partials.json"

pytestmark = pytest.mark.skipif(
    not (MODEL.exists() and PARTIALS.exists()),
    reason="no stored sorting model: QKV_DATA must be a folder that holds weights/gpt-nano-sort-*.json",
)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors in the file (little-endian float32 in base64, with shapes)."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: torch.from_numpy(np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(entry["shape"]).copy())
        for name, entry in stored.items()
        if name != "config"
    }


def our_names(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert minGPT's state dict to ours. Its c_attn holds W_Q, W_K and W_V in one matrix."""
    ours = {
        "embedding.token.weight": stored["transformer.wte.weight"],
        "embedding.position.table.weight": stored["transformer.wpe.weight"],
        "unembedding.weight": stored["lm_head.weight"],
    }
    parts = {
        "attn.c_proj": "attention.out_proj",
        "ln_1": "attention_norm",
        "ln_2": "feed_forward_norm",
        "mlp.c_fc": "feed_forward.up_proj",
        "mlp.c_proj": "feed_forward.down_proj",
    }
    for kind in ("weight", "bias"):
        ours[f"final_norm.{kind}"] = stored[f"transformer.ln_f.{kind}"]
        for i in range(3):
            for theirs, name in parts.items():
                ours[f"blocks.{i}.{name}.{kind}"] = stored[f"transformer.h.{i}.{theirs}.{kind}"]
            joined = stored[f"transformer.h.{i}.attn.c_attn.{kind}"].chunk(3)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), joined, strict=True):
                ours[f"blocks.{i}.attention.{name}.{kind}"] = part
    return ours


@pytest.fixture(scope="module")
def model() -> GPT:
    config = GPTConfig(vocab_size=3, context_length=11, d_model=48, n_heads=3, n_layers=3, tie_embeddings=False)
    model = GPT(config).eval()
    model.load_state_dict(our_names(tensors(MODEL)))
    return model


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    return tensors(PARTIALS)


TAPS = {
    "tok_emb": "embedding.tokens",
    "x": "embedding.sum",
    "q": "blocks.0.attention.queries",
    "k": "blocks.0.attention.keys",
    "v": "blocks.0.attention.values",
    "attSm": "blocks.0.attention.weights",
    "yProj": "blocks.0.attention_out",
    "attnResid": "blocks.0.resid_mid",
    "gelu": "blocks.0.feed_forward.hidden",
    "mlp": "blocks.0.feed_forward_out",
    "mlpResid": "blocks.0.resid_post",
    "block0": "blocks.0.resid_post",
    "block1": "blocks.1.resid_post",
    "block2": "blocks.2.resid_post",
    "ln_f": "last_hidden_state",
    "lm_head": "unembedding.logits",
}


@pytest.mark.parametrize("theirs", TAPS)
def test_every_stored_activation_is_reproduced(model, stored, theirs):
    with record(model, TAPS[theirs]) as trace, torch.no_grad():
        model(stored["idx"].long())
    torch.testing.assert_close(trace[TAPS[theirs]], stored[theirs], rtol=1e-4, atol=1e-5)


MODULES = {
    "pos_emb": "embedding.position.table",
    "ln1": "blocks.0.attention_norm",
    "ln2": "blocks.0.feed_forward_norm",
    "fc": "blocks.0.feed_forward.up_proj",
}


@pytest.mark.parametrize("theirs", MODULES)
def test_every_stored_module_output_is_reproduced(model, stored, theirs):
    outputs = []
    handle = model.get_submodule(MODULES[theirs]).register_forward_hook(
        lambda *hook_args: outputs.append(hook_args[-1])
    )
    with torch.no_grad():
        model(stored["idx"].long())
    handle.remove()
    torch.testing.assert_close(outputs[0], stored[theirs], rtol=1e-4, atol=1e-5)


def test_the_stored_attention_activations_are_reproduced(model, stored):
    with record(model, "blocks.0.attention.*") as trace, torch.no_grad():
        model(stored["idx"].long())
    queries, keys, values, heads = (
        trace[f"blocks.0.attention.{name}"].transpose(1, 2).flatten(2)
        for name in ("queries", "keys", "values", "head_outputs")
    )
    joined = torch.cat((queries, keys, values), dim=-1)
    torch.testing.assert_close(joined, stored["qkv"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(heads, stored["y"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trace["blocks.0.attention.scores"], stored["att"], rtol=1e-4, atol=1e-5)


def test_the_stored_probabilities_are_reproduced(model, stored):
    with torch.no_grad():
        probabilities = model(stored["idx"].long()).softmax(-1)
    torch.testing.assert_close(probabilities, stored["probs"], rtol=1e-4, atol=1e-5)


def test_every_stored_tensor_is_checked(stored):
    checked = {*TAPS, *MODULES, "qkv", "y", "att", "probs"}
    assert set(stored) == {"idx", *checked}


def test_the_model_sorts_all_words_of_six_letters(model):
    """Greedy decoding returns the six letters in order. The first one is predicted at the last input letter."""
    words = torch.tensor(list(product(range(3), repeat=6)))
    ids = words
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat((ids, model(ids[:, -11:])[:, -1:].argmax(-1)), dim=1)
    n_sorted = int((ids[:, 6:] == words.sort(1).values).all(1).sum())
    assert n_sorted == 3**6
