"""A small translation model trained to reverse the order of words, so that the correct output is known."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.config import RNNConfig, Seq2SeqConfig
from qkv.generation.decode_engine import right_pad_sequences
from qkv.models import RNNSeq2Seq, Seq2Seq
from qkv.tasks import Translator
from qkv.text import Tokenizer, save_tokenizer, train_tokenizer
from qkv.weights.checkpoint_folder import write_folder_atomically_with_manifest
from tests.learning.training_loop import train_on_samples

WORDS = ["uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve", "diez"]
CONTEXT = 37
CPU = torch.device("cpu")


def draw_text(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


def reverse_words(text: str) -> str:
    return " ".join(reversed(text.split()))


@cache
def small_translator(kind: str = "transformer") -> Translator:
    """Train a `transformer` or an `rnn` that is correct on texts of up to 6 words."""
    if kind == "transformer":
        return train_to_reverse()
    tokenizer = train_word_tokenizer()
    config = RNNConfig(vocab_size=tokenizer.vocab_size, context_length=CONTEXT, d_model=48, attention="general")
    return _train_translator(RNNSeq2Seq(config, seed=0), tokenizer, n_steps=250, learning_rate=1e-2)


def train_to_reverse(**shape: Any) -> Translator:
    tokenizer = train_word_tokenizer()
    sizes = {"vocab_size": tokenizer.vocab_size, "context_length": CONTEXT, "d_model": 48}
    layers = {"n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "init_std": 0.06}
    return _train_translator(
        Seq2Seq(Seq2SeqConfig(**sizes, **layers, **shape), seed=0), tokenizer, n_steps=170, learning_rate=4e-3
    )


def train_word_tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerKind.BPE, [" ".join(WORDS)] * 9, vocab_size=283, style=SpecialTokenStyle.SEQ2SEQ)


def _train_translator(
    model: Seq2Seq | RNNSeq2Seq, tokenizer: Tokenizer, *, n_steps: int, learning_rate: float
) -> Translator:
    begin, end = tokenizer.special_id(SpecialToken.BOS), tokenizer.special_id(SpecialToken.EOS)

    def loss(generator: torch.Generator) -> torch.Tensor:
        rng = random.Random(int(torch.randint(0, 1 << 30, (1,), generator=generator)))
        texts = [draw_text(rng, rng.randint(1, 6)) for _ in range(32)]
        source, attention_mask = right_pad_sequences(tokenizer.encode_batch(texts), CPU, tokenizer.vocab_size)
        targets = [tokenizer.encode(reverse_words(text), add_special_tokens=False) for text in texts]
        prefix, _ = right_pad_sequences([[begin, *ids] for ids in targets], CPU, tokenizer.vocab_size)
        labels = torch.full_like(prefix, -100)
        for row, ids in enumerate(targets):
            labels[row, : len(ids) + 1] = torch.tensor([*ids, end])
        return F.cross_entropy(
            model(source, prefix, source_attention_mask=attention_mask).flatten(0, 1), labels.flatten()
        )

    train_on_samples(model, loss, n_steps=n_steps, learning_rate=learning_rate, seed=1)
    return Translator(model, tokenizer, name="transformer" if isinstance(model, Seq2Seq) else "rnn")


def save_translator(task: Translator, folder: Path) -> Path:
    settings = json.dumps(task.model.config.model_dump(mode="json", exclude_none=True))
    tensors = {"model.safetensors": dict(task.model.named_parameters())}
    write_folder_atomically_with_manifest(folder, tensors=tensors, text_files={"config.json": settings})
    save_tokenizer(task.tokenizer, folder)
    return folder
