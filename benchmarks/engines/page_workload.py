"""Page workload, which consists of a model in a folder and a text with a given number of tokens."""

import shutil
from pathlib import Path

import torch

from benchmarks.engines.embed_workload import model_folder
from qkv.tasks import load_pretrained
from qkv.weights.save import save_hf

LAYERS = HEADS = 12
SHARPNESS = 3.2
"""Scaling factor for random queries and keys that makes attention rows as uneven as in a trained BERT. Uniform rows
would be easier to draw.
"""
STORY = """
    the cat sat on a mat and the dog ran to the old house where a man had a red ball one day she said that it was
    not good for him but they were happy with all of their friends in the big park
"""


def make_text(n_tokens: int) -> str:
    """Build a text of single-token words that has `n_tokens` tokens including [CLS] and [SEP]."""
    vocabulary = STORY.split()
    return " ".join(vocabulary[i % len(vocabulary)] for i in range(n_tokens - 2))


def save_shipped(name: str, folder: Path) -> None:
    save_hf(load_pretrained(name), folder)


def save_trained(folder: Path) -> None:
    shutil.copytree(model_folder(), folder)


def save_random(folder: Path) -> None:
    """Save a randomly initialized BERT-base with 12 × 12 heads and the tokenizer of the shipped BERT."""
    from transformers import BertConfig, BertModel

    save_shipped("bert", folder)
    torch.manual_seed(0)
    vocabulary = load_pretrained("bert").model.config.vocab_size
    shape = BertConfig(vocab_size=vocabulary, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    model = BertModel(shape).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                weight.mul_(SHARPNESS)
    model.save_pretrained(folder)
