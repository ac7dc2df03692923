"""Fast implementations of the reference model. Only `qkv.engines` imports this package."""
