"""Text in, answer out: a model with its tokenizer."""

from qkv.tasks.language_model import Continuation, LanguageModel
from qkv.tasks.loader import Task, resolve_model_folder, load, load_as, load_pretrained
from qkv.tasks.similarity import SimilarText
from qkv.tasks.text_encoder import Classification, EncodedText, FilledText, MaskPrediction, TextEncoder
from qkv.tasks.translator import Translation, Translator, TranslationHypothesis

__all__ = [
    "Classification",
    "Continuation",
    "EncodedText",
    "FilledText",
    "MaskPrediction",
    "LanguageModel",
    "SimilarText",
    "Task",
    "TextEncoder",
    "Translation",
    "Translator",
    "TranslationHypothesis",
    "resolve_model_folder",
    "load",
    "load_as",
    "load_pretrained",
]
