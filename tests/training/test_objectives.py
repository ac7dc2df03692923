"""In which precision and by which attention a step is computed."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from qkv.config import GPTConfig
from qkv.models import GPT
from qkv.training.objectives import windows_attention


def test_a_gpu_since_hopper_tries_cudnns_attention_first_and_all_others_after_it(monkeypatch):
    before = _cur_sdpa_kernel_backends(with_priority=True)
    for capability, first in (((9, 0), SDPBackend.CUDNN_ATTENTION), ((8, 0), before[0])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, capability=capability: capability)
        with windows_attention(torch.device("cuda"))():
            tried = _cur_sdpa_kernel_backends(with_priority=True)
        assert tried[0] is first
        assert set(tried) >= {SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH}
    with windows_attention(torch.device("cpu"))():
        assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_in_mixed_precision_the_residual_stream_has_the_products_precision():
    model = GPT(GPTConfig(vocabulary_size=7, context_length=5, d_model=6, n_heads=2, n_layers=2))
    seen: list[torch.dtype] = []
    for block in model.blocks:
        assert isinstance(block, nn.Module)
        block.register_forward_hook(lambda _part, given, out: seen.extend((given[0].dtype, out.dtype)))
    ids = torch.ones(1, 5, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    model(ids)
    assert set(seen) == {torch.float32}
