"""Fill masks, classify texts and compute embeddings with a BERT model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from qkv.choices import BackendName, Pooling, ProblemType, SpecialToken
from qkv.config import SentenceEmbedding
from qkv.errors import ContextLengthError, InputError
from qkv.models import BERT
from qkv.tasks.batch_encoder import BERTBatchEncoder, EncodedBatch
from qkv.tasks.description import task_repr_prefix
from qkv.tasks.similarity import SimilarText, find_nearest_by_dot_product
from qkv.text import Tokenizer, encode_texts, encode_truncated

TextOrPair = str | tuple[str, str]
"""A text or a pair of texts."""


@dataclass(frozen=True, kw_only=True)
class TokenizedInput:
    """A tokenized text or pair of texts."""

    texts: tuple[str, ...]
    number: int
    """The number that identifies the text in error messages."""
    ids: list[int]
    segments: list[int]
    n_truncated: int = 0
    """The number of tokens that were removed by truncation."""


TextInputs = Sequence[TextOrPair | TokenizedInput]


@dataclass(frozen=True, slots=True)
class MaskPrediction:
    """A candidate token for a mask."""

    id: int
    token: str
    """The text of the token, with a leading ## if it continues a word."""
    probability: float


@dataclass(frozen=True, kw_only=True)
class FilledText:
    """A text whose masks have been filled, together with the predictions for each mask."""

    text: str
    """The text in which each mask is replaced with its most likely token, independently of the other masks."""
    predictions: list[list[MaskPrediction]]
    """The most likely tokens for each mask, best first. Masks are in order from left to right."""


@dataclass(frozen=True, kw_only=True)
class Classification:
    """The output of a classification head for one text."""

    labels: tuple[str, ...]
    """The most likely class or, for multi-label models, all labels with a probability of at least 0.5.

    The tuple is empty for regression models.
    """
    probabilities: dict[str, float]
    """The probability of each class, in the order of the classes in the config. Empty for regression models."""
    value: float | None = None


class TextEncoder:
    """A BERT model with its tokenizer.

    `embed` and `find_similar` work with every BERT model. `fill_mask`, `classify` and `next_sentence_probability`
    require the corresponding head. All of these methods take texts or the result of `tokenize`. For a single string,
    they return a single result instead of a list. Texts of similar length are batched, which does not change the
    results. Texts longer than the context raise an error unless `truncate` is set.
    """

    def __init__(
        self,
        model: BERT,
        tokenizer: Tokenizer,
        *,
        name: str = "",
        remarks: tuple[str, ...] = (),
        backend: str = BackendName.AUTO,
    ) -> None:
        self.model = model.eval()
        self._encoder = BERTBatchEncoder(self.model, backend=backend)
        self.tokenizer = tokenizer
        self.name = name
        self.remarks = remarks
        """Notes about the loaded weights, such as a head that the config specifies but the weights do not contain."""

    def __repr__(self) -> str:
        return f"{task_repr_prefix('TextEncoder', self.model, self.name)}: {', '.join(self.capabilities)})"

    @property
    def capabilities(self) -> list[str]:
        heads = {
            "fill": self.model.masked_lm,
            "classify": self.model.classifier,
            "next_sentence": self.model.next_sentence,
        }
        return ["embed", *(task for task, head in heads.items() if head is not None)]

    def tokenize(
        self,
        texts: TextInputs,
        *,
        truncate: bool = False,
        max_tokens: int | None = None,
        parse_special_tokens: bool = False,
        first_number: int = 1,
    ) -> list[TokenizedInput]:
        """Tokenize texts. Texts that are already tokenized are returned unchanged.

        `max_tokens` sets a limit below the context length. `first_number` is the number that identifies the first text
        in error messages.
        """
        texts = [texts] if isinstance(texts, str) else texts
        limit = min(self.model.config.context_length, max_tokens or self.model.config.context_length)
        rows = [(text,) if isinstance(text, str) else text for text in texts if not isinstance(text, TokenizedInput)]
        encodings = zip(
            rows, encode_texts(self.tokenizer, rows, parse_special_tokens=parse_special_tokens), strict=True
        )
        tokenized_texts = []
        for number, text in enumerate(texts, start=first_number):
            if isinstance(text, TokenizedInput):
                tokenized = text
            else:
                row, ids = next(encodings)
                tokenized = TokenizedInput(texts=row, number=number, ids=ids.ids, segments=ids.segments)
                if truncate and len(tokenized.ids) > limit:
                    truncated = encode_truncated(self.tokenizer, row, limit, parse_special_tokens=parse_special_tokens)
                    tokenized = replace(
                        tokenized,
                        ids=truncated.ids,
                        segments=truncated.segments,
                        n_truncated=len(tokenized.ids) - limit,
                    )
            if len(tokenized.ids) > limit:
                raise ContextLengthError(
                    f"text {tokenized.number} has {len(tokenized.ids):,} tokens, which exceeds the limit "
                    f"of {limit:,}; use --truncate or truncate=True to truncate the text"
                )
            tokenized_texts.append(tokenized)
        return tokenized_texts

    @torch.no_grad()
    def embed(
        self,
        texts: TextInputs,
        *,
        pooling: Pooling | str | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> Float[Tensor, "*text d_model"]:
        """Compute one embedding vector per text.

        By default, this method uses the pooling and normalization that the model was trained with. If the model does
        not specify them, it uses normalized mean pooling.
        """
        if isinstance(texts, str):
            return self.embed([texts], pooling=pooling, normalize=normalize, truncate=truncate)[0]
        settings = self.embedding
        pooling = settings.pooling if pooling is None else _parse_pooling(pooling)
        tokenized_texts = self.tokenize(texts, max_tokens=settings.max_tokens, truncate=truncate)
        vectors = self.model.embedding.token.weight.new_empty(len(tokenized_texts), self.model.config.d_model)
        for batch in self._encode_batches(tokenized_texts):
            match pooling:
                case Pooling.CLS:
                    vectors[batch.indices] = batch.states[:, 0]
                case Pooling.MEAN:
                    sums = (batch.states * batch.attention_mask[..., None]).sum(1)
                    vectors[batch.indices] = sums / batch.attention_mask.sum(1, keepdim=True)
        return F.normalize(vectors, dim=-1) if (settings.normalize if normalize is None else normalize) else vectors

    @property
    def embedding(self) -> SentenceEmbedding:
        """The default pooling and normalization settings for `embed`."""
        return self.model.config.sentence_embedding or SentenceEmbedding(normalize=True)

    @overload
    def find_similar(  # pyright: ignore[reportOverlappingOverload] - a string is a sequence too
        self, queries: str, candidates: TextInputs, *, n: int = 5
    ) -> list[SimilarText]: ...
    @overload
    def find_similar(self, queries: TextInputs, candidates: TextInputs, *, n: int = 5) -> list[list[SimilarText]]: ...
    def find_similar(
        self, queries: TextInputs, candidates: TextInputs, *, n: int = 5
    ) -> list[SimilarText] | list[list[SimilarText]]:
        """Return the `n` candidates with the highest cosine similarity to each query, best first."""
        if isinstance(queries, str):
            return self.find_similar([queries], candidates, n=n)[0]
        if not candidates:
            raise InputError("at least 1 candidate text is required, got 0")
        others = [candidates] if isinstance(candidates, str) else candidates
        return find_nearest_by_dot_product(self.embed(queries, normalize=True), self.embed(others, normalize=True), n=n)

    @overload
    def fill_mask(  # pyright: ignore[reportOverlappingOverload] - a string is a sequence too
        self, texts: str, *, n: int = 5, truncate: bool = False
    ) -> FilledText: ...
    @overload
    def fill_mask(self, texts: TextInputs, *, n: int = 5, truncate: bool = False) -> list[FilledText]: ...
    @torch.no_grad()
    def fill_mask(self, texts: TextInputs, *, n: int = 5, truncate: bool = False) -> FilledText | list[FilledText]:
        """Predict the `n` most likely tokens for each mask token ([MASK]) in each text.

        Continuation tokens, such as ##s, are only predicted for masks that directly follow a word.
        """
        if isinstance(texts, str):
            return self.fill_mask([texts], n=n, truncate=truncate)[0]
        self._require_head("masked_lm", "masked-word head", "fill masks")
        mask = self.tokenizer.special_id(SpecialToken.MASK)
        tokenized_texts = self.tokenize(texts, parse_special_tokens=True, truncate=truncate)
        for tokenized in tokenized_texts:
            if not self.has_mask(tokenized):
                scope = f" in its first {len(tokenized.ids)} tokens" if tokenized.n_truncated else ""
                raise InputError(f"text {tokenized.number}: contains no {self.tokenizer.id_to_token(mask)}{scope}")
        predictions: list[list[list[MaskPrediction]]] = [[] for _ in tokenized_texts]
        for batch in self._encode_batches(tokenized_texts):
            rows, columns = (batch.ids == mask).nonzero(as_tuple=True)
            logits = self.model.masked_lm_logits(batch.states[rows, columns][None])[0].float()
            # The unembedding may have more rows than the tokenizer has ids. The extra rows are never predicted.
            probabilities = logits.softmax(-1)[:, : self.tokenizer.vocab_size]
            needs_word = torch.tensor(
                [
                    not follows_word
                    for index in batch.indices
                    for follows_word in self._mask_follows_word(tokenized_texts[index])
                ]
            )
            probabilities[
                needs_word.to(probabilities.device)[:, None] & self._is_continuation.to(probabilities.device)
            ] = 0.0
            best = probabilities.topk(min(n, self.tokenizer.vocab_size))
            for row, ids, values in zip(rows.tolist(), best.indices.tolist(), best.values.tolist(), strict=True):
                pairs = zip(ids, values, strict=True)
                predictions[batch.indices[row]].append([MaskPrediction(i, self._display_token(i), p) for i, p in pairs])
        return [
            FilledText(text=self._fill_text(tokenized, masks), predictions=masks)
            for tokenized, masks in zip(tokenized_texts, predictions, strict=True)
        ]

    @cached_property
    def _is_continuation(self) -> Bool[Tensor, " id"]:
        """Whether the token with each id continues a word."""
        names = (self.tokenizer.id_to_token(token_id) for token_id in range(self.tokenizer.vocab_size))
        return torch.tensor([name.startswith("##") for name in names])

    def _mask_follows_word(self, tokenized: TokenizedInput) -> list[bool]:
        """Return a list that indicates whether each mask directly follows a word."""
        before = "\t".join(tokenized.texts).split(self.tokenizer.special_tokens[SpecialToken.MASK])[:-1]
        n_masks = tokenized.ids.count(self.tokenizer.special_id(SpecialToken.MASK))
        follows_word = [part[-1:].isalnum() for part in before][:n_masks]
        return follows_word + [False] * (n_masks - len(follows_word))

    def has_mask(self, text: TokenizedInput) -> bool:
        """Return whether a text contains a mask token."""
        return self.tokenizer.special_id(SpecialToken.MASK) in text.ids

    @overload
    def classify(  # pyright: ignore[reportOverlappingOverload] - a string is a sequence too
        self, texts: str, *, truncate: bool = False
    ) -> Classification: ...
    @overload
    def classify(self, texts: TextInputs, *, truncate: bool = False) -> list[Classification]: ...
    @torch.no_grad()
    def classify(self, texts: TextInputs, *, truncate: bool = False) -> Classification | list[Classification]:
        """Predict the class, labels or value for each text or pair, depending on the model's problem type."""
        if isinstance(texts, str):
            return self.classify([texts], truncate=truncate)[0]
        self._require_head("classifier", "classification head", "classify")
        tokenized_texts = self.tokenize(texts, truncate=truncate)
        classifications: dict[int, Classification] = {}
        for batch in self._encode_batches(tokenized_texts):
            logits = self.model.class_logits(batch.states).float()
            classifications |= {
                index: self._to_classification(row) for index, row in zip(batch.indices, logits, strict=True)
            }
        return [classifications[index] for index in range(len(tokenized_texts))]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names, or the class numbers as strings, starting at 0, if the model has no class names."""
        config = self.model.config
        return config.class_names or tuple(str(number) for number in range(config.n_classes or 0))

    @torch.no_grad()
    def next_sentence_probability(self, pairs: TextInputs, *, truncate: bool = False) -> list[float]:
        """Return the probability that the second text of each pair follows the first."""
        self._require_head("next_sentence", "next-sentence head", "predict whether a text follows")
        tokenized_texts = self.tokenize(pairs, truncate=truncate)
        for tokenized in tokenized_texts:
            if len(tokenized.texts) != 2:
                raise InputError(f"text {tokenized.number}: expected a pair of texts, got a single text")
        follows: dict[int, float] = {}
        for batch in self._encode_batches(tokenized_texts):
            probabilities = self.model.next_sentence_logits(batch.states).float().softmax(-1)[:, 0]
            follows |= dict(zip(batch.indices, probabilities.tolist(), strict=True))
        return [follows[index] for index in range(len(tokenized_texts))]

    def _to_classification(self, logits: Float[Tensor, " class"]) -> Classification:
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
        """Compile the encoder for a GPU with 16-bit weights.

        The first batch of each size takes many seconds to compile.
        """
        self._encoder.compile()

    def _encode_batches(self, tokenized_texts: Sequence[TokenizedInput]) -> Iterator[EncodedBatch]:
        """Compute the final states of all texts, and yield them in batches of similar length."""
        has_pairs = self.model.config.has_multiple_segments and any(
            len(tokenized.texts) == 2 for tokenized in tokenized_texts
        )
        segments = [tokenized.segments for tokenized in tokenized_texts] if has_pairs else None
        return self._encoder.encode_batches([tokenized.ids for tokenized in tokenized_texts], segments)

    def _require_head(self, attribute: str, head_name: str, action: str) -> None:
        if getattr(self.model, attribute) is None:
            supported = ", ".join(self.capabilities)
            raise InputError(
                f"{self.name or 'this model'} has no {head_name}, so it cannot {action} (it supports: {supported})"
            )

    def _display_token(self, token_id: int) -> str:
        text = self.tokenizer.decode([token_id], skip_special_tokens=False).strip()
        return text if text and "\N{REPLACEMENT CHARACTER}" not in text else self.tokenizer.id_to_token(token_id)

    def _fill_text(self, tokenized: TokenizedInput, predictions: list[list[MaskPrediction]]) -> str:
        text, mask_text = "\t".join(tokenized.texts), self.tokenizer.special_tokens[SpecialToken.MASK]
        for mask_predictions in predictions:
            before, _, after = text.partition(mask_text)
            token = mask_predictions[0].token
            text = (before.rstrip() + token[2:] if token.startswith("##") else before + token) + after
        return text


def _parse_pooling(name: str) -> Pooling:
    if name not in list(Pooling):
        raise InputError(f"pooling must be one of {', '.join(Pooling)}, got {name!r}")
    return Pooling(name)
