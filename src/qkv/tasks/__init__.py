"""High-level tasks, each of which combines a model with its tokenizer."""

from qkv.tasks.language_model import Continuation, LanguageModel
from qkv.tasks.loader import Task, load, load_as, load_pretrained, resolve_or_download_model_folder
from qkv.tasks.similarity import SimilarText
from qkv.tasks.text_encoder import Classification, FilledText, MaskPrediction, TextEncoder, TokenizedInput
from qkv.tasks.translator import Translation, TranslationHypothesis, Translator

__all__ = [
    "Classification",
    "Continuation",
    "FilledText",
    "LanguageModel",
    "MaskPrediction",
    "SimilarText",
    "Task",
    "TextEncoder",
    "TokenizedInput",
    "Translation",
    "TranslationHypothesis",
    "Translator",
    "load",
    "load_as",
    "load_pretrained",
    "resolve_or_download_model_folder",
]
