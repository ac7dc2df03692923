"""Modules that are imported before forking, so that the commands do not spend time on importing them."""

import functools
import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import gguf  # noqa: F401
import matplotlib.figure  # noqa: F401
import typer.main

import qkv.cli
import qkv.tasks
import qkv.training

# Replace measurements and command construction, which do not depend on the files, with constants.
qkv.training.measure_matmul_flops = lambda _device: 2e10
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(qkv.cli.app)
