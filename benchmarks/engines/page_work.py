"""What both pages show: one model in one folder, and a text of just so many tokens."""

import shutil
from pathlib import Path

import torch

from benchmarks.engines.embed_work import model_folder
from qkv.tasks import load_pretrained
from qkv.weights.save import save_hf

LAYERS = HEADS = 12
UNEVEN = 3.2
"""Random queries and keys times this: rows as uneven as a trained BERT's, which even ones would be too easy beside."""
STORY = """
    the cat sat on a mat and the dog ran to the old house where a man had a red ball one day she said that it was
    not good for him but they were happy with all of their friends in the big park
"""


def text_of(n_tokens: int) -> str:
    """Each word is one token; [CLS] and [SEP] make the rest."""
    words = STORY.split()
    return " ".join(words[i % len(words)] for i in range(n_tokens - 2))


def save_shipped(name: str, folder: Path) -> None:
    save_hf(load_pretrained(name), folder)


def save_trained(folder: Path) -> None:
    shutil.copytree(model_folder(), folder)


def save_random(folder: Path) -> None:
    """BERT's base shape with 12 × 12 heads, and the shipped bert's tokenizer."""
    from transformers import BertConfig, BertModel

    save_shipped("bert", folder)
    torch.manual_seed(0)
    words = load_pretrained("bert").model.config.vocab_size
    shape = BertConfig(vocab_size=words, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    model = BertModel(shape).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                weight.mul_(UNEVEN)
    model.save_pretrained(folder)
