"""Implementations of the forward pass that must agree. `qkv verify` and tests/agreement compare them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.models import BERT, GPT, Model, RNNSeq2Seq, Seq2Seq
from qkv.nn.cache import LayerSourceCache
from qkv.tensors import AttentionMask, Ids, Logits, SourceAttentionMask, SourceIds


@dataclass(frozen=True)
class Example:
    """One tokenized text: a row of ids and, for an encoder–decoder, the source ids."""

    ids: Ids
    source: SourceIds | None = None


def forward(
    model: Model,
    ids: Ids,
    source: SourceIds | None = None,
    *,
    attention_mask: AttentionMask | None = None,
    source_attention_mask: SourceAttentionMask | None = None,
) -> Tensor:
    """Return the logits or, for a BERT model, the final states.

    RNNs do not take a target mask because their target ids are only padded on the right.
    """
    if isinstance(model, GPT | BERT):
        return model(ids, attention_mask=attention_mask)
    assert source is not None
    if isinstance(model, Seq2Seq):
        return model(source, ids, source_attention_mask=source_attention_mask, attention_mask=attention_mask)
    return model(source, ids, source_attention_mask=source_attention_mask)


def forward_in_chunks(
    model: GPT | Seq2Seq | RNNSeq2Seq, ids: Ids, split_points: Iterable[int], *, source: SourceIds | None = None
) -> Logits:
    """Process the ids in chunks, using a KV cache or, for an RNN, the state after the previous chunk."""
    chunks = torch.tensor_split(ids, list(split_points), dim=1)
    if isinstance(model, GPT):
        cache = model.new_cache(batch=ids.shape[0], capacity=ids.shape[1])
        return torch.cat([model(chunk, cache=cache) for chunk in chunks], dim=1)
    assert source is not None
    if isinstance(model, Seq2Seq):
        states, cache = model.encode(source), model.new_cache(batch=ids.shape[0], capacity=ids.shape[1])
        return torch.cat([model.decode(chunk, states, cache=cache) for chunk in chunks], dim=1)
    encoded, source_cache, step_logits = model.encode(source), LayerSourceCache(), []
    state = encoded.state
    for chunk in chunks:
        logits, state = model.decode(chunk, encoded.source, state, cache=source_cache)
        step_logits.append(logits)
    return torch.cat(step_logits, dim=1)


def forward_packed(model: GPT | BERT, texts: Sequence[Tensor]) -> list[Tensor]:
    """Process all texts in one row, using document ids to prevent attention between texts."""
    lengths = [text.shape[1] for text in texts]
    documents = torch.cat([torch.full((n,), document, device=texts[0].device) for document, n in enumerate(lengths)])[
        None
    ]
    return list(model(torch.cat(list(texts), dim=1), documents=documents)[0].split(lengths))


def forward_padded(model: Model, examples: Sequence[Example]) -> list[Tensor]:
    """Process all texts in one batch, using random ids as padding."""
    source = source_attention_mask = None
    right_only = isinstance(model, RNNSeq2Seq)
    ids, attention_mask = _randomly_padded_ids_and_mask(
        [example.ids for example in examples], model.config.vocab_size, right_only=right_only
    )
    if isinstance(model, Seq2Seq | RNNSeq2Seq):
        sources = [example.source for example in examples if example.source is not None]
        source, source_attention_mask = _randomly_padded_ids_and_mask(
            sources, model.config.source_vocab_size, right_only=False
        )
    logits = forward(model, ids, source, attention_mask=attention_mask, source_attention_mask=source_attention_mask)
    return [row[is_token] for row, is_token in zip(logits, attention_mask, strict=True)]


def _randomly_padded_ids_and_mask(
    texts: Sequence[Tensor], vocab_size: int, *, right_only: bool
) -> tuple[Tensor, Tensor]:
    """Pad the texts with random ids, alternately on the right, on both sides and on the left.

    Even the longest text gets two padding columns.
    """
    n_columns = 2 + max(text.shape[1] for text in texts)
    ids = torch.randint(vocab_size, (len(texts), n_columns), generator=torch.Generator().manual_seed(0))
    ids = ids.to(texts[0].device)
    attention_mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, text in enumerate(texts):
        start = 0 if right_only else (n_columns - text.shape[1]) * (row % 3) // 2
        text_slice = slice(start, start + text.shape[1])
        ids[row, text_slice], attention_mask[row, text_slice] = text[0], True
    return ids, attention_mask
