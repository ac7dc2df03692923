"""Imported before forking: what every opening needs whatever the file, so that none of them takes its seconds."""

import functools
import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import gguf  # noqa: F401
import matplotlib.figure  # noqa: F401
import typer.main

import qkv.cli
import qkv.tasks
import qkv.training

# How fast this machine multiplies, and what the commands are called, no file changes.
qkv.training.measure_matmul_flops = lambda _device: 2e10
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(qkv.cli.app)
