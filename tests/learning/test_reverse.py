"""Do the sequence-to-sequence models learn to say a sequence backwards, looking where they should?"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qkv.config import RNNConfig, Seq2SeqConfig
from qkv.inspection import record
from qkv.models import RNNSeq2Seq, Seq2Seq
from tests.learning.practice import HELD_OUT, SEEDS, train_on_samples
from tests.learning.reversal import (
    BEGIN,
    VOCABULARY_SIZE,
    Pairs,
    draw_pairs,
    fraction_pointed,
    fraction_right,
    loss_of,
)


def transformer(seed: int) -> Seq2Seq:
    config = Seq2SeqConfig(
        vocab_size=VOCABULARY_SIZE,
        context_length=11,
        d_model=64,
        n_heads=4,
        n_encoder_layers=2,
        n_decoder_layers=2,
        # The usual 0.02 suits widths of 256 and more; at 64 it learns too, in twice the steps.
        init_std=0.05,
    )
    return Seq2Seq(config, seed=seed)


def rnn(seed: int, *, cell: str = "gru", attention: str = "general") -> RNNSeq2Seq:
    config = RNNConfig(vocab_size=VOCABULARY_SIZE, d_model=64, cell=cell, attention=attention)
    return RNNSeq2Seq(config, seed=seed)


def told(model: Seq2Seq | RNNSeq2Seq, pairs: Pairs) -> Tensor:
    """Logits where each token follows the true ones before it."""
    return model(pairs.source, pairs.prefix, source_attention_mask=pairs.source_attention_mask)


@torch.no_grad()
def written(model: Seq2Seq | RNNSeq2Seq, pairs: Pairs) -> Tensor:
    """The likeliest token at each step, read back at the next."""
    n_rows, n_steps = pairs.target.shape
    ids = [torch.full((n_rows, 1), BEGIN)]
    if isinstance(model, Seq2Seq):
        source = model.encode(pairs.source, attention_mask=pairs.source_attention_mask)
        cache = model.new_cache(batch=n_rows, capacity=n_steps)
        for _ in range(n_steps):
            ids.append(model.decode(ids[-1], source, cache=cache).argmax(-1))
    else:
        start = model.encode(pairs.source, attention_mask=pairs.source_attention_mask)
        state = start.state
        for _ in range(n_steps):
            logits, state = model.decode(ids[-1], start.source, state)
            ids.append(logits.argmax(-1))
    return torch.cat(ids[1:], dim=1)


@dataclass(frozen=True)
class Grade:
    told: float
    """Fraction of tokens right, given the true ones before."""
    written: float
    """The same with the model's own tokens before."""
    pointed: float
    """Of the best head: how often it looks most at the source position whose token comes next."""


def grade(model: Seq2Seq | RNNSeq2Seq, looks: str) -> Grade:
    pairs = draw_pairs(torch.Generator().manual_seed(HELD_OUT), n=512)
    with torch.no_grad(), record(model, looks) as trace:
        logits = told(model, pairs)
    heads = torch.cat([fraction_pointed(trace[name], pairs.lengths) for name in trace.names])
    return Grade(
        told=fraction_right(logits.argmax(-1), pairs.target),
        written=fraction_right(written(model, pairs), pairs.target),
        pointed=heads.max().item(),
    )


def learn_to_reverse(
    model: Seq2Seq | RNNSeq2Seq, *, n_steps: int, learning_rate: float, seed: int, lengths: tuple[int, int] = (5, 9)
) -> None:
    def loss(generator: torch.Generator) -> Tensor:
        pairs = draw_pairs(generator, n=64, shortest=lengths[0], longest=lengths[1])
        return loss_of(told(model, pairs), pairs.target)

    train_on_samples(model, loss, n_steps=n_steps, learning_rate=learning_rate, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_transformer_learns_to_reverse_and_attends_to_the_token_it_generates(seed):
    model = transformer(seed)
    learn_to_reverse(model, n_steps=300, learning_rate=3e-3, seed=seed)
    reached = grade(model, "decoder.blocks.*.cross_attention.weights")
    assert min(reached.told, reached.written, reached.pointed) >= 0.99, reached


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("cell", "attention"),
    [
        ("gru", "general"),
        ("lstm", "additive"),
        pytest.param("lstm", "general", marks=pytest.mark.long),
        pytest.param("gru", "additive", marks=pytest.mark.long),
    ],
)
def test_an_rnn_with_attention_learns_to_reverse_and_attends_to_the_token_it_generates(cell, attention, seed):
    model = rnn(seed, cell=cell, attention=attention)
    learn_to_reverse(model, n_steps=400, learning_rate=1e-2, seed=seed)
    reached = grade(model, "decoder.attention.weights")
    assert min(reached.told, reached.written, reached.pointed) >= 0.99, reached


@pytest.mark.parametrize("seed", SEEDS)
def test_an_rnn_without_attention_falls_behind_on_longer_sequences(seed):
    pairs = draw_pairs(torch.Generator().manual_seed(HELD_OUT), n=512, shortest=9, longest=13)
    right = {}
    for attention in ("general", "none"):
        model = rnn(seed, attention=attention)
        learn_to_reverse(model, n_steps=200, learning_rate=1e-2, seed=seed, lengths=(9, 13))
        right[attention] = fraction_right(written(model, pairs), pairs.target)
    assert right["general"] >= 0.95, right
    assert right["none"] <= 0.6, right
