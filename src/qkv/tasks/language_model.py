"""Text goes on: a GPT with its tokenizer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qkv.choices import Role
from qkv.config import SamplingConfig
from qkv.errors import InputError
from qkv.generation import Ended, StopStrings, Text, steps
from qkv.models import GPT
from qkv.text import StreamingDecoder, Tokenizer
from qkv.training.evaluation import Score
from qkv.training.losses import cross_entropy_sum


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What came after a prompt."""

    text: str
    ids: list[int]
    log_probabilities: list[float]
    ended: Ended


class LanguageModel:
    """`generate` goes on from a prompt; `score` says how well it would have guessed a text."""

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def generate(
        self,
        prompt: str,
        *,
        max_new: int = 200,
        stop: Sequence[str] = (),
        **sampling: Any,  # noqa: ANN401
    ) -> str:
        """The text that follows the prompt; keywords are those of `SamplingConfig` (temperature, top_k, seed …)."""
        return self.continue_all([prompt], max_new=max_new, stop=stop, sampling=SamplingConfig(**sampling))[0].text

    def continue_all(
        self,
        prompts: Sequence[str],
        *,
        max_new: int = 200,
        stop: Sequence[str] = (),
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    ) -> list[Continuation]:
        """All prompts in one batch; each text is what it would have been alone."""
        shown = ["" for _ in prompts]
        texts: dict[int, Text] = {}
        for row, piece, text in self._pieces(prompts, max_new=max_new, stop=stop, sampling=sampling):
            shown[row] += piece
            texts[row] = text
        return [
            Continuation(
                text=shown[row],
                ids=texts[row].new,
                log_probabilities=texts[row].log_probabilities,
                ended=texts[row].ended or Ended.STOP,
            )
            for row in range(len(prompts))
        ]

    def stream(
        self,
        prompt: str,
        *,
        max_new: int = 200,
        stop: Sequence[str] = (),
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    ) -> Iterator[str]:
        """The same text, piece by piece as it comes; no character is split."""
        for _, piece, _ in self._pieces([prompt], max_new=max_new, stop=stop, sampling=sampling):
            if piece:
                yield piece

    def _pieces(
        self, prompts: Sequence[str], *, max_new: int, stop: Sequence[str], sampling: SamplingConfig
    ) -> Iterator[tuple[int, str, Text]]:
        stops = [StopStrings(stop) for _ in prompts]
        ids = [self.encode(prompt) for prompt in prompts]
        decoders = [StreamingDecoder(self.tokenizer, before=each) for each in ids]
        for step in steps(self.model, ids, max_new=max_new, sampling=sampling, stop_ids=self.stop_ids):
            stopping = stops[step.row]
            piece = stopping.feed(decoders[step.row].add(step.id))
            if stopping.is_stopped:
                step.text.ended = Ended.STOP
            elif step.text.ended is not None:
                piece += stopping.feed(decoders[step.row].finish()) + stopping.flush()
            yield step.row, piece, step.text

    @property
    def stop_ids(self) -> frozenset[int]:
        end = self.tokenizer.find(Role.END)
        return frozenset() if end is None else frozenset({end})

    def encode(self, prompt: str) -> list[int]:
        """The prompt's ids; an empty prompt is the beginning of a text, where the tokenizer has a token for it."""
        ids = self.tokenizer.encode(prompt)
        if ids:
            return ids
        begin = self.tokenizer.find(Role.BEGIN)
        if begin is None:
            raise InputError("the prompt is empty, and this tokenizer has no token for the beginning of a text")
        return [begin]

    @torch.inference_mode()
    def score(self, document: str) -> Score:
        """−Σ log p of the document's tokens and its end token, from a fresh context.

        A document longer than the context is read in windows; from the second on, the first half is there to
        be seen alone and the second half is scored.
        """
        begin, end = self.tokenizer.id_of(Role.BEGIN), self.tokenizer.id_of(Role.END)
        text = document.strip()
        ids = [begin, *self.tokenizer.encode(text, add_specials=False), end]
        device = self.model.embedding.token.weight.device
        window = self.model.config.context_length
        total, scored, start = 0.0, 1, 0
        while scored < len(ids):
            part = torch.tensor([ids[start : start + window + 1]], device=device)
            logits = self.model(part[:, :-1])[:, scored - start - 1 :]
            total += float(cross_entropy_sum(logits, part[:, scored - start :]))
            scored = start + part.shape[1]
            start = scored - 1 - window // 2
        return Score(loss_sum=total, n_targets=len(ids) - 1, n_bytes=len(text.encode()))
