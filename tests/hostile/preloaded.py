"""Imported before forking: what every opening needs, so that none of them takes its seconds."""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import gguf  # noqa: F401
import matplotlib.figure  # noqa: F401

import qkv.tasks
import qkv.training  # noqa: F401
