"""Activation checkpointing: recompute the activations of each block in the backward pass to save memory."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from qkv.nn import Block


def enable_activation_checkpointing(model: nn.Module) -> None:
    """Save only the input of each block for the backward pass.

    The results, dropout masks and weight names do not change.
    """
    for block in [part for part in model.modules() if isinstance(part, Block)]:
        # nn.Module.__call__ uses this instance attribute instead of the class's forward method.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
