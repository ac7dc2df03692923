"""A small random BERT with every head and a small trained tokenizer, in memory or as a folder."""

from functools import cache
from pathlib import Path

from qkv.choices import TokenizerKind
from qkv.config import BERTConfig
from qkv.tasks import TextEncoder
from tests.agreement.model_strategies import build_random_model
from tests.tasks.small_gpt import save_task
from tests.text.samples import trained

CONTEXT = 43
NAMES = ("bad", "good", "neither")


@cache
def small_bert(**settings) -> TextEncoder:
    tokenizer = trained(TokenizerKind.WORDPIECE)
    heads = {"masked_lm_head": True, "next_sentence_head": True, "class_names": NAMES}
    config = BERTConfig(
        vocab_size=tokenizer.vocab_size,
        context_length=CONTEXT,
        d_model=12,
        n_heads=3,
        n_layers=2,
        **(heads | settings),
    )
    return TextEncoder(build_random_model(config, 0), tokenizer)


def save_bert(folder: Path, **settings) -> Path:
    return save_task(small_bert(**settings), folder)
