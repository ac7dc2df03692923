"""Entry point for `python -m qkv.cli`."""

from qkv.cli import main

main()
