"""Engines reject models with modules that they do not know."""

import pytest
import torch

from qkv.accel.cpu.backend import CPUBackend
from qkv.config import GPTConfig
from qkv.engines import select_backend
from qkv.errors import InputError
from qkv.models import GPT
from qkv.nn.norm import RMSNorm


class CenteredNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


def test_a_model_with_a_new_kind_of_norm_runs_on_the_eager_backend():
    model = GPT(GPTConfig(vocab_size=11, context_length=8, d_model=12, n_heads=3, n_layers=2)).eval()
    assert CPUBackend().supports(model) is None
    model.blocks[1].feed_forward_norm = CenteredNorm(12)
    reason = CPUBackend().supports(model)
    assert reason == "blocks.1.feed_forward_norm is a CenteredNorm, which only the eager implementation supports"
    assert select_backend(model).name == "eager"
    with pytest.raises(InputError, match=f"--backend cpu: {reason}"):
        select_backend(model, "cpu")
