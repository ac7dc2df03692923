"""Texts are read whole: a BERT with its tokenizer fills masks, tells classes apart, and gives vectors."""

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
from qkv.tasks.description import describe_task
from qkv.tasks.similarity import SimilarText, find_nearest
from qkv.tasks.batch_encoder import EncodedBatch, BatchEncoder
from qkv.text import Tokenizer, encode_truncated, encode_texts

TextOrPair = str | tuple[str, str]
"""One text, or a pair."""


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """A text or pair as the model reads it."""

    texts: tuple[str, ...]
    number: int
    """What messages call it."""
    ids: list[int]
    segments: list[int]
    n_truncated: int = 0
    """Tokens that were left out at its end, because that was asked."""


TextInputs = Sequence[TextOrPair | EncodedText]


@dataclass(frozen=True, slots=True)
class MaskPrediction:
    """One token that may stand in a mask's place."""

    id: int
    token: str
    """Its text; ## before it where it goes on with a word."""
    probability: float


@dataclass(frozen=True, kw_only=True)
class FilledText:
    text: str
    """With the likeliest token in each mask's place, each chosen for itself."""
    predictions: list[list[MaskPrediction]]
    """Of each mask from left to right, the likeliest tokens, best first."""


@dataclass(frozen=True, kw_only=True)
class Classification:
    """What a classification head says of a text."""

    labels: tuple[str, ...]
    """The likeliest class; where a text may have several labels, all of at least one half; of a number, none."""
    probabilities: dict[str, float]
    """Of every class, in the order of the config; of a number, none."""
    value: float | None = None


class TextEncoder:
    """`embed` and `similar` work with every BERT; `fill`, `classify` and `next_sentence` where it has the head.

    All take texts, or what `encode` made of them; one string has one answer, not a list of one. Texts of like length
    are computed together; each answer is what it would be alone. A text longer than the context is refused, unless
    `truncate` asks to cut it at its end.
    """

    def __init__(self, model: BERT, tokenizer: Tokenizer, *, name: str = "", remarks: tuple[str, ...] = ()) -> None:
        self.model = model.eval()
        self._reader = BatchEncoder(self.model)
        self.tokenizer = tokenizer
        self.name = name
        self.remarks = remarks
        """What its weights leave to be told, such as a promised head that they lack."""

    def __repr__(self) -> str:
        return f"{describe_task('TextEncoder', self.model, self.name)}: {', '.join(self.capabilities)})"

    @property
    def capabilities(self) -> list[str]:
        heads = {
            "fill": self.model.masked_word, "classify": self.model.classifier, "next_sentence": self.model.next_sentence
        }  # fmt: skip
        return ["embed", *(task for task, head in heads.items() if head is not None)]

    def encode(
        self, texts: TextInputs, *, truncate: bool = False, max_tokens: int | None = None, parse_special_tokens: bool = False,
        first: int = 1,
    ) -> list[EncodedText]:  # fmt: skip
        """As the model reads them; what is encoded already stays as it is.

        `max_tokens`: less than the whole context. `first`: the number that messages give to the first text.
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
                    f"text {one.number} has {len(one.ids):,} tokens, the model takes {limit:,}: --truncate "
                    "(truncate=True) cuts it"
                )
            read.append(one)
        return read

    @torch.no_grad()
    def embed(
        self, texts: TextInputs, *, pooling: Pooling | str | None = None, normalize: bool | None = None,
        truncate: bool = False,
    ) -> Float[Tensor, "*text d_model"]:  # fmt: skip
        """One vector a text. Not said: as the model was trained for, else the mean of its states, of length 1."""
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
        """How `embed` works unless told otherwise."""
        return self.model.config.sentence_embedding or SentenceEmbedding(normalize=True)

    @overload
    def find_similar(  # pyright: ignore[reportOverlappingOverload] - a string is a sequence too
        self, queries: str, among: TextInputs, *, n: int = 5
    ) -> list[SimilarText]: ...
    @overload
    def find_similar(self, queries: TextInputs, among: TextInputs, *, n: int = 5) -> list[list[SimilarText]]: ...
    def find_similar(self, queries: TextInputs, among: TextInputs, *, n: int = 5) -> list[SimilarText] | list[list[SimilarText]]:
        """For each query the `n` texts whose vectors have the greatest cosine with its own, best first."""
        if isinstance(queries, str):
            return self.find_similar([queries], among, n=n)[0]
        if not among:
            raise InputError("there are 0 texts to compare with; at least 1 is needed")
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
        """The `n` likeliest tokens for every mask of every text; a mask is spelt as in the tokenizer ([MASK]).

        What goes on with a word (##s) is offered only where the mask stands close behind one: it is no word.
        """
        if isinstance(texts, str):
            return self.fill_mask([texts], n=n, truncate=truncate)[0]
        self._needs("masked_word", "masked-word head", "fill masks")
        mask = self.tokenizer.special_id(SpecialToken.MASK)
        read = self.encode(texts, parse_special_tokens=True, truncate=truncate)
        for one in read:
            if not self.has_mask(one):
                where = f" among its first {len(one.ids)} tokens" if one.n_truncated else ""
                raise InputError(f"text {one.number}: has no {self.tokenizer.id_to_token(mask)}{where}: nothing to fill")
        filled: list[list[list[MaskPrediction]]] = [[] for _ in read]
        for batch in self._batches(read):
            rows, columns = (batch.ids == mask).nonzero(as_tuple=True)
            logits = self.model.masked_word_logits(batch.states[rows, columns][None])[0].float()
            # A model may have more rows than its tokenizer has ids; those are no guesses.
            guessed = logits.softmax(-1)[:, : self.tokenizer.vocab_size]
            is_word = torch.tensor([not close for place in batch.indices for close in self._is_close(read[place])])
            guessed[is_word.to(guessed.device)[:, None] & self._goes_on.to(guessed.device)] = 0.0
            best = guessed.topk(min(n, self.tokenizer.vocab_size))
            for row, ids, probabilities in zip(rows.tolist(), best.indices.tolist(), best.values.tolist(), strict=True):
                guesses = zip(ids, probabilities, strict=True)
                filled[batch.indices[row]].append([MaskPrediction(i, self._text(i), p) for i, p in guesses])
        return [FilledText(text=self._with(one, masks), predictions=masks) for one, masks in zip(read, filled, strict=True)]

    @cached_property
    def _goes_on(self) -> Bool[Tensor, " id"]:
        """Which ids go on with a word."""
        names = (self.tokenizer.id_to_token(number) for number in range(self.tokenizer.vocab_size))
        return torch.tensor([name.startswith("##") for name in names])

    def _is_close(self, one: EncodedText) -> list[bool]:
        """Of each mask that was read: whether it stands close behind a word."""
        before = "\t".join(one.texts).split(self.tokenizer.special_tokens[SpecialToken.MASK])[:-1]
        n_masks = one.ids.count(self.tokenizer.special_id(SpecialToken.MASK))
        close = [part[-1:].isalnum() for part in before][:n_masks]
        return close + [False] * (n_masks - len(close))

    def has_mask(self, text: EncodedText) -> bool:
        """Whether there is something to fill."""
        return self.tokenizer.special_id(SpecialToken.MASK) in text.ids

    @overload
    def classify(  # pyright: ignore[reportOverlappingOverload] - a string is a sequence too
        self, texts: str, *, truncate: bool = False
    ) -> Classification: ...
    @overload
    def classify(self, texts: TextInputs, *, truncate: bool = False) -> list[Classification]: ...
    @torch.no_grad()
    def classify(self, texts: TextInputs, *, truncate: bool = False) -> Classification | list[Classification]:
        """Of each text or pair the class, the labels or the number, as the model was trained for."""
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
        """Numbers from 0 where the model has no names for its classes."""
        config = self.model.config
        return config.class_names or tuple(str(number) for number in range(config.n_classes or 0))

    @torch.no_grad()
    def next_sentence_probability(self, pairs: TextInputs, *, truncate: bool = False) -> list[float]:
        """Of each pair, the probability that the second text is what follows the first."""
        self._needs("next_sentence", "next-sentence head", "tell what follows")
        read = self.encode(pairs, truncate=truncate)
        for one in read:
            if len(one.texts) != 2:
                raise InputError(f"text {one.number} is one text; what follows is asked of a pair")
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
        return Classification(labels=tuple(name for name, p in probabilities.items() if p >= 0.5), probabilities=probabilities)

    def compile(self) -> None:
        """Spend many seconds at each new size of batch, to read all texts after it faster: on a GPU, in bfloat16."""
        self._reader.compile()

    def _batches(self, read: Sequence[EncodedText]) -> Iterator[EncodedBatch]:
        """The last states of all, in batches of like length."""
        has_pairs = self.model.config.uses_segment_ids and any(len(one.texts) == 2 for one in read)
        segments = [one.segments for one in read] if has_pairs else None
        return self._reader.batches([one.ids for one in read], segments)

    def _needs(self, part: str, head: str, verb: str) -> None:
        if getattr(self.model, part) is None:
            can = ", ".join(self.capabilities)
            raise InputError(f"{self.name or 'this model'} has no {head}, so it cannot {verb}; it can {can}")

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
        raise InputError(f"pooling={word!r} is not known; it is one of {', '.join(Pooling)}")
    return Pooling(word)
