"""How is one token shown? As everywhere."""

from qkv.text.token_display import quoted_token_text, token_text

__all__ = ["spelt", "text_of"]
