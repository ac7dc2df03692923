"""Fill masks, classify texts and compute embeddings with a BERT."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import Pooling, ProblemType, SpecialToken
from qkv.config import SentenceEmbedding
from qkv.errors import ContextLengthError, InputError
from qkv.models import BERT
from qkv.tasks.batch_encoder import BatchEncoder, EncodedBatch
from qkv.tasks.description import describe_task
from qkv.tasks.similarity import SimilarText, find_nearest
from qkv.text import Tokenizer, encode_texts, encode_truncated

TextOrPair = str | tuple[str, str]
"""A text or a pair of texts."""


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """A tokenized text or pair."""

    texts: tuple[str, ...]
    number: int
    """Number of the text in error messages."""
    ids: list[int]
    segments: list[int]
    n_truncated: int = 0
    """Number of tokens removed by truncation."""


TextInputs = Sequence[TextOrPair | EncodedText]


@dataclass(frozen=True, slots=True)
class MaskPrediction:
    """A candidate token for a mask."""

    id: int
    token: str
    """Text of the token, with a leading ## if it continues a word."""
    probability: float


@dataclass(frozen=True, kw_only=True)
class FilledText:
    text: str
    """The text with the most likely token in place of each mask, chosen independently."""
    predictions: list[list[MaskPrediction]]
    """The most likely tokens for each mask from left to right, best first."""


@dataclass(frozen=True, kw_only=True)
class Classification:
    """The output of a classification head for one text."""

    labels: tuple[str, ...]
    """The most likely class, or all labels with a probability of at least 0.5 in multi-label models.

    Empty for regression.
    """
    probabilities: dict[str, float]
    """Probability of every class, in the order of the config. Empty for regression."""
    value: float | None = None


class TextEncoder:
    """A BERT with its tokenizer.

    `embed` and `find_similar` work with every BERT. `fill_mask`, `classify` and `next_sentence_probability` require the
    respective head. All methods take texts or the result of `encode`, and a single string returns a single result. Texts
    of similar length are batched, which does not change their results. Texts longer than the context raise an error unless
    `truncate` is set.
    """

    def __init__(self, model: BERT, tokenizer: Tokenizer, *, name: str = "", remarks: tuple[str, ...] = ()) -> None:
        self.model = model.eval()
        self._reader = BatchEncoder(self.model)
        self.tokenizer = tokenizer
        self.name = name
        self.remarks = remarks
        """Notes about the loaded weights, such as a head that the config declares but the weights lack."""

    def __repr__(self) -> str:
        return f"{describe_task('TextEncoder', self.model, self.name)}: {', '.join(self.capabilities)})"

    @property
    def capabilities(self) -> list[str]:
        heads = {
            "fill": self.model.masked_word,
            "classify": self.model.classifier,
            "next_sentence": self.model.next_sentence,
        }
        return ["embed", *(task for task, head in heads.items() if head is not None)]

    def encode(
        self,
        texts: TextInputs,
        *,
        truncate: bool = False,
        max_tokens: int | None = None,
        parse_special_tokens: bool = False,
        first: int = 1,
    ) -> list[EncodedText]:
        """Tokenize texts. Texts that are already encoded are returned unchanged.

        `max_tokens` lowers the limit below the context length. `first` is the number of the first text in error
        messages.
        """
        texts = [texts] if isinstance(texts, str) else texts
        limit = min(self.model.config.context_length, max_tokens or self.model.config.context_length)
        rows = [(text,) if isinstance(text, str) else text for text in texts if not isinstance(text, EncodedText)]
        whole = zip(rows, encode_texts(self.tokenizer, rows, parse_special_tokens=parse_special_tokens), strict=True)
        read = []
        for number, text in enumerate(texts, start=first):
            if isinstance(text, EncodedText):
                one = text
            else:
                row, ids = next(whole)
                one = EncodedText(texts=row, number=number, ids=ids.ids, segments=ids.segments)
                if truncate and len(one.ids) > limit:
                    cut = encode_truncated(self.tokenizer, row, limit, parse_special_tokens=parse_special_tokens)
                    one = replace(one, ids=cut.ids, segments=cut.segments, n_truncated=len(one.ids) - limit)
            if len(one.ids) > limit:
                raise ContextLengthError(
                    f"text {one.number} has {len(one.ids):,} tokens, which exceeds the limit "
                    f"of {limit:,} (--truncate or truncate=True truncates it)"
                )
            read.append(one)
        return read

    @torch.no_grad()
    def embed(
        self,
        texts: TextInputs,
        *,
        pooling: Pooling | str | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> Float[Tensor, "*text d_model"]:
        """Compute one vector per text.

        By default, uses the pooling and normalization that the model was trained with, or else normalized mean pooling.
        """
        if isinstance(texts, str):
            return self.embed([texts], pooling=pooling, normalize=normalize, truncate=truncate)[0]
        settings = self.embedding
        pooling = settings.pooling if pooling is None else _parse_pooling(pooling)
        read = self.encode(texts, max_tokens=settings.max_tokens, truncate=truncate)
        vectors = self.model.embedding.token.weight.new_empty(len(read), self.model.config.d_model)
        for batch in self._batches(read):
            match pooling:
                case Pooling.CLS:
                    vectors[batch.indices] = batch.states[:, 0]
                case Pooling.MEAN:
                    sums = (batch.states * batch.attention_mask[..., None]).sum(1)
                    vectors[batch.indices] = sums / batch.attention_mask.sum(1, keepdim=True)
        return F.normalize(vectors, dim=-1) if (settings.normalize if normalize is None else normalize) else vectors

    @property
    def embedding(self) -> SentenceEmbedding:
        """The default settings of `embed`."""
        return self.model.config.sentence_embedding or SentenceEmbedding(normalize=True)

    @overload
    def find_similar(  # pyright: ignore[reportOverlappingOverload] - a string is a sequence too
        self, queries: str, among: TextInputs, *, n: int = 5
    ) -> list[SimilarText]: ...
    @overload
    def find_similar(self, queries: TextInputs, among: TextInputs, *, n: int = 5) -> list[list[SimilarText]]: ...
    def find_similar(
        self, queries: TextInputs, among: TextInputs, *, n: int = 5
    ) -> list[SimilarText] | list[list[SimilarText]]:
        """Returns the `n` texts with the highest cosine similarity to each query, best first."""
        if isinstance(queries, str):
            return self.find_similar([queries], among, n=n)[0]
        if not among:
            raise InputError("at least 1 candidate text is required, got 0")
        others = [among] if isinstance(among, str) else among
        return find_nearest(self.embed(queries, normalize=True), self.embed(others, normalize=True), n=n)

    @overload
    def fill_mask(  # pyright: ignore[reportOverlappingOverload] - a string is a sequence too
        self, texts: str, *, n: int = 5, truncate: bool = False
    ) -> FilledText: ...
    @overload
    def fill_mask(self, texts: TextInputs, *, n: int = 5, truncate: bool = False) -> list[FilledText]: ...
    @torch.no_grad()
    def fill_mask(self, texts: TextInputs, *, n: int = 5, truncate: bool = False) -> FilledText | list[FilledText]:
        """Predict the `n` most likely tokens for every mask token ([MASK]) of every text.

        Continuation tokens (##s) are only predicted for masks that directly follow a word.
        """
        if isinstance(texts, str):
            return self.fill_mask([texts], n=n, truncate=truncate)[0]
        self._needs("masked_word", "masked-word head", "fill masks")
        mask = self.tokenizer.special_id(SpecialToken.MASK)
        read = self.encode(texts, parse_special_tokens=True, truncate=truncate)
        for one in read:
            if not self.has_mask(one):
                where = f" in its first {len(one.ids)} tokens" if one.n_truncated else ""
                raise InputError(f"text {one.number}: contains no {self.tokenizer.id_to_token(mask)}{where}")
        filled: list[list[list[MaskPrediction]]] = [[] for _ in read]
        for batch in self._batches(read):
            rows, columns = (batch.ids == mask).nonzero(as_tuple=True)
            logits = self.model.masked_word_logits(batch.states[rows, columns][None])[0].float()
            # The model may have more rows than the tokenizer has ids. These are never predicted.
            guessed = logits.softmax(-1)[:, : self.tokenizer.vocab_size]
            is_word = torch.tensor([not close for place in batch.indices for close in self._is_close(read[place])])
            guessed[is_word.to(guessed.device)[:, None] & self._goes_on.to(guessed.device)] = 0.0
            best = guessed.topk(min(n, self.tokenizer.vocab_size))
            for row, ids, probabilities in zip(rows.tolist(), best.indices.tolist(), best.values.tolist(), strict=True):
                guesses = zip(ids, probabilities, strict=True)
                filled[batch.indices[row]].append([MaskPrediction(i, self._text(i), p) for i, p in guesses])
        return [
            FilledText(text=self._with(one, masks), predictions=masks) for one, masks in zip(read, filled, strict=True)
        ]

    @cached_property
    def _goes_on(self) -> Bool[Tensor, " id"]:
        """Whether each id continues a word."""
        names = (self.tokenizer.id_to_token(number) for number in range(self.tokenizer.vocab_size))
        return torch.tensor([name.startswith("##") for name in names])

    def _is_close(self, one: EncodedText) -> list[bool]:
        """Returns for each mask whether it directly follows a word."""
        before = "\t".join(one.texts).split(self.tokenizer.special_tokens[SpecialToken.MASK])[:-1]
        n_masks = one.ids.count(self.tokenizer.special_id(SpecialToken.MASK))
        close = [part[-1:].isalnum() for part in before][:n_masks]
        return close + [False] * (n_masks - len(close))

    def has_mask(self, text: EncodedText) -> bool:
        """Returns whether a text contains a mask token."""
        return self.tokenizer.special_id(SpecialToken.MASK) in text.ids

    @overload
    def classify(  # pyright: ignore[reportOverlappingOverload] - a string is a sequence too
        self, texts: str, *, truncate: bool = False
    ) -> Classification: ...
    @overload
    def classify(self, texts: TextInputs, *, truncate: bool = False) -> list[Classification]: ...
    @torch.no_grad()
    def classify(self, texts: TextInputs, *, truncate: bool = False) -> Classification | list[Classification]:
        """Predict the class, labels or value of each text or pair, depending on the model's problem type."""
        if isinstance(texts, str):
            return self.classify([texts], truncate=truncate)[0]
        self._needs("classifier", "classification head", "classify")
        read = self.encode(texts, truncate=truncate)
        answers: dict[int, Classification] = {}
        for batch in self._batches(read):
            logits = self.model.class_logits(batch.states).float()
            answers |= {place: self._answer(row) for place, row in zip(batch.indices, logits, strict=True)}
        return [answers[place] for place in range(len(read))]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, or numbers from 0 if the model has no class names."""
        config = self.model.config
        return config.class_names or tuple(str(number) for number in range(config.n_classes or 0))

    @torch.no_grad()
    def next_sentence_probability(self, pairs: TextInputs, *, truncate: bool = False) -> list[float]:
        """Returns the probability that the second text of each pair follows the first."""
        self._needs("next_sentence", "next-sentence head", "predict whether a text follows")
        read = self.encode(pairs, truncate=truncate)
        for one in read:
            if len(one.texts) != 2:
                raise InputError(f"text {one.number} is a single text, expected a pair")
        follows: dict[int, float] = {}
        for batch in self._batches(read):
            probabilities = self.model.next_sentence_logits(batch.states).float().softmax(-1)[:, 0]
            follows |= dict(zip(batch.indices, probabilities.tolist(), strict=True))
        return [follows[place] for place in range(len(read))]

    def _answer(self, logits: Float[Tensor, " class"]) -> Classification:
        problem = self.model.config.problem_type
        if problem is ProblemType.REGRESSION:
            return Classification(labels=(), probabilities={}, value=float(logits[0]))
        values = logits.softmax(-1) if problem is ProblemType.SINGLE_LABEL else logits.sigmoid()
        probabilities = dict(zip(self.class_names, values.tolist(), strict=True))
        if problem is ProblemType.SINGLE_LABEL:
            return Classification(labels=(self.class_names[int(values.argmax())],), probabilities=probabilities)
        return Classification(
            labels=tuple(name for name, p in probabilities.items() if p >= 0.5), probabilities=probabilities
        )

    def compile(self) -> None:
        """Compile the encoder for a GPU with 16-bit weights. The first batch of each size takes many seconds."""
        self._reader.compile()

    def _batches(self, read: Sequence[EncodedText]) -> Iterator[EncodedBatch]:
        """Yield the final states of all texts, in batches of similar length."""
        has_pairs = self.model.config.uses_segment_ids and any(len(one.texts) == 2 for one in read)
        segments = [one.segments for one in read] if has_pairs else None
        return self._reader.batches([one.ids for one in read], segments)

    def _needs(self, part: str, head: str, verb: str) -> None:
        if getattr(self.model, part) is None:
            can = ", ".join(self.capabilities)
            raise InputError(f"{self.name or 'this model'} has no {head}, so it cannot {verb} (it supports: {can})")

    def _text(self, number: int) -> str:
        text = self.tokenizer.decode([number], skip_special_tokens=False).strip()
        return text if text and "\N{REPLACEMENT CHARACTER}" not in text else self.tokenizer.id_to_token(number)

    def _with(self, one: EncodedText, masks: list[list[MaskPrediction]]) -> str:
        text, spelt = "\t".join(one.texts), self.tokenizer.special_tokens[SpecialToken.MASK]
        for guesses in masks:
            before, _, after = text.partition(spelt)
            token = guesses[0].token
            text = (before.rstrip() + token[2:] if token.startswith("##") else before + token) + after
        return text


def _parse_pooling(word: str) -> Pooling:
    if word not in list(Pooling):
        raise InputError(f"pooling={word!r} must be one of {', '.join(Pooling)}")
    return Pooling(word)
