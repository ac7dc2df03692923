"""Sequence-to-sequence models learn to reverse a sequence and attend to the correct positions."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qkv.config import RNNConfig, Seq2SeqConfig
from qkv.inspection import record
from qkv.models import RNNSeq2Seq, Seq2Seq
from tests.learning.reversal import (
    BEGIN,
    VOCAB_SIZE,
    Pairs,
    attention_accuracy,
    sample_pairs,
    target_loss,
    token_accuracy,
)
from tests.learning.training_loop import HELD_OUT, SEEDS, train_on_samples


def transformer(seed: int) -> Seq2Seq:
    config = Seq2SeqConfig(
        vocab_size=VOCAB_SIZE,
        context_length=11,
        d_model=64,
        n_heads=4,
        n_encoder_layers=2,
        n_decoder_layers=2,
        # The default of 0.02 suits d_model of 256 and more. With d_model=64 it would need twice the steps.
        init_std=0.05,
    )
    return Seq2Seq(config, seed=seed)


def rnn(seed: int, *, cell: str = "gru", attention: str = "general") -> RNNSeq2Seq:
    config = RNNConfig(vocab_size=VOCAB_SIZE, d_model=64, cell=cell, attention=attention)
    return RNNSeq2Seq(config, seed=seed)


def forced_logits(model: Seq2Seq | RNNSeq2Seq, pairs: Pairs) -> Tensor:
    """Returns the logits with teacher forcing."""
    return model(pairs.source, pairs.prefix, source_attention_mask=pairs.source_attention_mask)


@torch.no_grad()
def decode_greedily(model: Seq2Seq | RNNSeq2Seq, pairs: Pairs) -> Tensor:
    """Returns the tokens of greedy decoding."""
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
class Accuracy:
    forced: float
    """Token accuracy with teacher forcing."""
    greedy: float
    """Token accuracy of greedy decoding."""
    attention: float
    """Highest fraction over heads of attention to the source position of the next token."""


def measure_accuracy(model: Seq2Seq | RNNSeq2Seq, attention_names: str) -> Accuracy:
    pairs = sample_pairs(torch.Generator().manual_seed(HELD_OUT), n=512)
    with torch.no_grad(), record(model, attention_names) as trace:
        logits = forced_logits(model, pairs)
    heads = torch.cat([attention_accuracy(trace[name], pairs.lengths) for name in trace.names])
    return Accuracy(
        forced=token_accuracy(logits.argmax(-1), pairs.target),
        greedy=token_accuracy(decode_greedily(model, pairs), pairs.target),
        attention=heads.max().item(),
    )


def learn_to_reverse(
    model: Seq2Seq | RNNSeq2Seq, *, n_steps: int, learning_rate: float, seed: int, lengths: tuple[int, int] = (5, 9)
) -> None:
    def loss(generator: torch.Generator) -> Tensor:
        pairs = sample_pairs(generator, n=64, shortest=lengths[0], longest=lengths[1])
        return target_loss(forced_logits(model, pairs), pairs.target)

    train_on_samples(model, loss, n_steps=n_steps, learning_rate=learning_rate, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_transformer_learns_to_reverse_and_attends_to_the_token_it_generates(seed):
    model = transformer(seed)
    learn_to_reverse(model, n_steps=300, learning_rate=3e-3, seed=seed)
    accuracy = measure_accuracy(model, "decoder.blocks.*.cross_attention.weights")
    assert min(accuracy.forced, accuracy.greedy, accuracy.attention) >= 0.99, accuracy


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
    accuracy = measure_accuracy(model, "decoder.attention.weights")
    assert min(accuracy.forced, accuracy.greedy, accuracy.attention) >= 0.99, accuracy


@pytest.mark.parametrize("seed", SEEDS)
def test_an_rnn_without_attention_falls_behind_on_longer_sequences(seed):
    pairs = sample_pairs(torch.Generator().manual_seed(HELD_OUT), n=512, shortest=9, longest=13)
    accuracy = {}
    for attention in ("general", "none"):
        model = rnn(seed, attention=attention)
        learn_to_reverse(model, n_steps=200, learning_rate=1e-2, seed=seed, lengths=(9, 13))
        accuracy[attention] = token_accuracy(decode_greedily(model, pairs), pairs.target)
    assert accuracy["general"] >= 0.95, accuracy
    assert accuracy["none"] <= 0.6, accuracy
