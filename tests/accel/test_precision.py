"""TF32 is disabled only inside a context."""

from contextlib import ExitStack

import torch

from qkv.utils import CudnnTF32Disabled


def test_tf32_stays_disabled_until_the_last_of_two_threads_leaves(monkeypatch):
    disabled = CudnnTF32Disabled()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with ExitStack() as first, ExitStack() as second:
        for thread in (first, second):
            thread.enter_context(disabled)
            assert not torch.backends.cudnn.allow_tf32
        first.close()
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32
