"""Logits to ids: sampling, prefill and decode with the cache, stopping."""

from qkv.generation.generate import Ended, Step, Text, generate, prefill, steps
from qkv.generation.sampling import adjusted, draw
from qkv.generation.stopping import StopStrings

__all__ = ["Ended", "Step", "StopStrings", "Text", "adjusted", "draw", "generate", "prefill", "steps"]
