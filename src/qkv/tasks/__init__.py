"""Text in, answer out: a model with its tokenizer."""

from qkv.tasks.language_model import Continuation, LanguageModel
from qkv.tasks.loading import find_folder, load, load_weights

__all__ = ["Continuation", "LanguageModel", "find_folder", "load", "load_weights"]
