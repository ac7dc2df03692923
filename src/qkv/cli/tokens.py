"""How is one token shown? As everywhere."""

from qkv.text.showing import spelt, text_of

__all__ = ["spelt", "text_of"]
