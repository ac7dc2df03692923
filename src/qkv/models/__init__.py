"""Complete models: GPT, BERT, encoder–decoder Transformer and RNN."""

from typing import assert_never

from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.models.bert import BERT
from qkv.models.gpt import GPT
from qkv.models.rnn import RNNSeq2Seq, RNNSource
from qkv.models.seq2seq import Seq2Seq

Model = GPT | BERT | Seq2Seq | RNNSeq2Seq

__all__ = ["BERT", "GPT", "Model", "RNNSeq2Seq", "RNNSource", "Seq2Seq", "build"]


def build(config: ModelConfig, *, seed: int = 0) -> Model:
    """Build a model with random weights from a config.

    Inside `with torch.device("meta"):`, no memory is allocated.
    """
    match config:
        case GPTConfig():
            return GPT(config, seed=seed)
        case BERTConfig():
            return BERT(config, seed=seed)
        case Seq2SeqConfig():
            return Seq2Seq(config, seed=seed)
        case RNNConfig():
            return RNNSeq2Seq(config, seed=seed)
        case _:
            assert_never(config)
