"""Compute static word vectors from the embedding matrix and contextual word vectors from sentences."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import ContextLengthError, InputError
from qkv.models import BERT, GPT
from qkv.tasks.language_model import LanguageModel
from qkv.tasks.text_encoder import TextEncoder
from qkv.text import Tokenizer

_MARKED_WORD = re.compile(r"\[([^\[\]]+)\]")


@dataclass(frozen=True, kw_only=True)
class WordVectors:
    words: list[str]
    is_contextual: list[bool]
    vectors: Float[Tensor, "word d_model"]

    @property
    def cosine(self) -> Float[Tensor, "word word"]:
        unit = torch.nn.functional.normalize(self.vectors, dim=-1)
        return unit @ unit.T

    @property
    def euclidean(self) -> Float[Tensor, "word word"]:
        # Compute distances from differences. With the faster matmul-based method, the distance between a word and
        # itself would not be exactly 0.
        return torch.cdist(self.vectors, self.vectors, compute_mode="donot_use_mm_for_euclid_dist")


@torch.no_grad()
def word_vectors(task: LanguageModel | TextEncoder, words_or_marked_contexts: Sequence[str]) -> WordVectors:
    """Compute one vector per word or marked context.

    For a word without brackets, such as `king`, the vector is looked up in the embedding matrix. For a sentence such as
    `the river [bank]`, the vector is the last layer's state for the marked word. If a word has several tokens, the
    result is the mean of their vectors.
    """
    words, vectors = [], []
    for item in words_or_marked_contexts:
        marks = list(_MARKED_WORD.finditer(item))
        if len(marks) > 1:
            raise InputError(f"{item!r} marks {len(marks)} words with [ ], expected at most 1")
        word = marks[0][1] if marks else item
        if not word.strip():
            raise InputError(f"{item!r} contains no word")
        words.append(word.strip())
        vectors.append(_contextual_vector(task, item, marks[0]) if marks else _static_vector(task, word))
    if not vectors:
        raise InputError("at least 1 word is required, got 0")
    is_contextual = [_MARKED_WORD.search(item) is not None for item in words_or_marked_contexts]
    return WordVectors(words=words, is_contextual=is_contextual, vectors=torch.stack(vectors).float().cpu())


def word_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    """Return the token ids of a word.

    The word is tokenized with a leading space, like inside a text, unless that results in more tokens.
    """
    bare, with_space = (tokenizer.encode(form, add_special_tokens=False) for form in (word, f" {word}"))
    return with_space if len(with_space) <= len(bare) else bare


def encode_and_locate_tokens(tokenizer: Tokenizer, sentence: str, start: int, end: int) -> tuple[list[int], list[int]]:
    """Return the ids of a sentence, and the positions of the tokens that overlap the characters `start` to `end`."""
    ids = tokenizer.encode(sentence)
    spans = tokenizer.token_spans_without_template(sentence)
    piece_ids = [span.id for span in spans]
    offset = next(n for n in range(len(ids) - len(piece_ids) + 1) if ids[n : n + len(piece_ids)] == piece_ids)
    first, last = (len(sentence[:n].encode()) for n in (start, end))
    return ids, [offset + n for n, span in enumerate(spans) if span.start < last and span.end > first]


def _static_vector(task: LanguageModel | TextEncoder, word: str) -> Tensor:
    return task.model.embedding.token.weight[word_ids(task.tokenizer, word)].mean(0)


def _contextual_vector(task: LanguageModel | TextEncoder, item: str, mark: re.Match[str]) -> Tensor:
    sentence = item[: mark.start()] + mark[1] + item[mark.end() :]
    ids, positions = encode_and_locate_tokens(task.tokenizer, sentence, mark.start(), mark.start() + len(mark[1]))
    limit = task.model.config.context_length
    if len(ids) > limit:
        raise ContextLengthError(
            f"the sentence with {mark[1]!r} has {len(ids):,} tokens, which exceeds the model's limit of {limit:,}"
        )
    batch = torch.tensor([ids], device=task.model.embedding.token.weight.device)
    match task.model:
        case GPT() as model:
            states = model.hidden_states(batch)
        case BERT() as model:
            states = model(batch)
    return states[0, positions].mean(0)
