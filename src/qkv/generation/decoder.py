"""A model in the midst of several texts: what sampling and beam search need of it, and no more."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from qkv.generation.sampling import NextLogits
from qkv.models import GPT, Seq2Seq
from qkv.nn import Mask, Source

Rows = Int[Tensor, " row"]
Texts = Int[Tensor, " text"]


@runtime_checkable
class Decoder(Protocol):
    """Holds the texts so far, one a row, as a cache or in any other way."""

    def step(self, ids: Rows) -> NextLogits:
        """One more token a row; the logits of the token after it."""
        ...

    def select(self, rows: Rows, *, texts: Texts | None = None) -> None:
        """Go on with these rows, in this order, repeats allowed.

        All texts have equally many rows, side by side. `texts` says which of them are left; None: all. A model
        that keeps something for each text (a source) and not for each row needs to know.
        """
        ...


class GPTDecoder:
    """A GPT with its cache; every row is a text of its own length."""

    def __init__(self, model: GPT, *, batch: int, capacity: int) -> None:
        self._model = model
        self.cache = model.new_cache(batch=batch, capacity=capacity)

    @property
    def device(self) -> torch.device:
        return self._model.embedding.token.weight.device

    def prefill(self, prompts: Sequence[Sequence[int]]) -> NextLogits:
        """All prompts in one pass; the logits after each prompt's last token."""
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = torch.tensor(
            [[*prompt, *[0] * (longest - n)] for prompt, n in zip(prompts, lengths, strict=True)], device=self.device
        )
        n = torch.tensor(lengths, device=self.device)
        is_token = None if min(lengths) == longest else torch.arange(longest, device=self.device) < n[:, None]
        states = self._model.states(ids, is_token=is_token, cache=self.cache)
        last = states[torch.arange(len(lengths), device=self.device), n - 1]
        return self._model.unembedding(last[:, None])[:, 0]

    def step(self, ids: Rows) -> NextLogits:
        return self._model(ids[:, None], cache=self.cache)[:, 0]

    def select(self, rows: Rows, *, texts: Texts | None = None) -> None:  # noqa: ARG002
        self.cache.select(rows)


class Seq2SeqDecoder:
    """The writing half of an encoder–decoder; the rows of one text share its source, which is never copied."""

    def __init__(self, model: Seq2Seq, source: Source, *, capacity: int) -> None:
        self._model = model
        self._source = source
        self.cache = model.new_cache(batch=source.states.shape[0], capacity=capacity)

    def step(self, ids: Rows) -> NextLogits:
        return self._model.decode(ids[:, None], self._source, cache=self.cache)[:, 0]

    def select(self, rows: Rows, *, texts: Texts | None = None) -> None:
        self.cache.select(rows)
        if texts is None:
            return
        is_token = None if self._source.mask is None else self._source.mask.key_is_token
        mask = None if is_token is None else Mask(key_is_token=is_token[texts])
        self._source = Source(states=self._source.states[texts], mask=mask)
        for layer in self.cache.sources:
            if layer.kept is not None:
                keys, values = layer.kept
                layer.kept = keys[texts], values[texts]
