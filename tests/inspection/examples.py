"""Small random models of every family with their tokenizers, and an example input for each."""

from functools import cache

from qkv.choices import SpecialTokenStyle, TokenizerKind
from qkv.config import RNNConfig, Seq2SeqConfig
from qkv.inspection import prepare_input
from qkv.tasks import Translator
from tests.agreement.model_strategies import build_random_model
from tests.tasks.small_bert import small_bert
from tests.tasks.small_gpt import small_gpt
from tests.text.samples import trained

FAMILIES = ["gpt", "bert", "seq2seq", "rnn"]
TEXT = "The cat sat on the mat, and the dog sat by the cat."


@cache
def example_task(family: str, **settings):
    match family:
        case "gpt":
            return small_gpt()
        case "bert":
            return small_bert()
    tokenizer = trained(TokenizerKind.BPE, SpecialTokenStyle.SEQ2SEQ)
    sizes = {"vocab_size": tokenizer.vocab_size, "context_length": 41, "d_model": 12}
    if family == "rnn":
        return Translator(build_random_model(RNNConfig(**sizes, attention="general")), tokenizer)
    layers = {"n_heads": 3, "n_encoder_layers": 2, "n_decoder_layers": 3}
    return Translator(build_random_model(Seq2SeqConfig(**sizes, **layers, **settings)), tokenizer)


def example_input(family: str):
    return prepare_input(example_task(family), TEXT, "the dog slept" if family in ("seq2seq", "rnn") else None)
