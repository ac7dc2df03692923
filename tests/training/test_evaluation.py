"""Tests for evaluation results."""

import math

import pytest
import torch

from qkv.training import EvaluationResult, evaluate
from qkv.training.objectives import LossOutput


class FakeBatch:
    def __init__(self, total, n_targets):
        self.total, self.n_targets, self.n_tokens = total, n_targets, n_targets

    def split(self, _n_rows):
        yield self


def test_batches_are_weighted_by_their_targets():
    model = torch.nn.Dropout(0.5)
    batches = [FakeBatch(10.0, 10), FakeBatch(9.0, 3)]
    result = evaluate(model, lambda batch: LossOutput(torch.tensor(batch.total)), batches)
    assert result.loss == pytest.approx(19 / 13)
    assert model.training


def test_evaluation_runs_in_eval_mode_and_restores_the_previous_mode():
    model = torch.nn.Dropout(0.5)

    def objective(_batch):
        assert not model.training
        assert not torch.is_grad_enabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate(model, objective, [FakeBatch(1.0, 1)])
    assert model.training


def test_perplexity_and_bits_per_byte():
    result = EvaluationResult(loss_sum=10 * math.log(2), n_targets=5, n_bytes=4)
    assert result.perplexity == pytest.approx(4.0)
    assert result.bits_per_byte == pytest.approx(2.5)
    assert EvaluationResult(loss_sum=1.0, n_targets=1).bits_per_byte is None
    assert math.isfinite(EvaluationResult(loss_sum=1e9, n_targets=1).perplexity)
