"""Text in, answer out: a model with its tokenizer."""

from qkv.tasks.language_model import Continuation, LanguageModel
from qkv.tasks.loading import Task, find_folder, load, load_as, load_weights
from qkv.tasks.nearness import Similar
from qkv.tasks.text_encoder import Answer, Encoded, Filled, Guess, TextEncoder
from qkv.tasks.translator import Translation, Translator, Written

__all__ = [
    "Answer",
    "Continuation",
    "Encoded",
    "Filled",
    "Guess",
    "LanguageModel",
    "Similar",
    "Task",
    "TextEncoder",
    "Translation",
    "Translator",
    "Written",
    "find_folder",
    "load",
    "load_as",
    "load_weights",
]
