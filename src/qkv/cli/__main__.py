"""`python -m qkv.cli`, for where the `qkv` command is not on the path."""

from qkv.cli import main

main()
