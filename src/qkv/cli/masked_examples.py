"""Print BERT pre-training batches: sentence pairs and masked tokens."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkv.config import MaskingConfig
    from qkv.text import Tokenizer


def print_masked_batch(
    folder: Path,
    config: "MaskingConfig",
    *,
    batch_index: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    as_json: bool,
) -> None:
    """Print the rows of a masked-language-modeling batch with the original token at each masked position."""
    from qkv.data.masked_batches import MaskedBatches
    from qkv.data.sentence_store import SentenceStore

    store = SentenceStore.open(folder)
    tokenizer = store.store.tokenizer()
    batches = MaskedBatches(
        source=store, tokenizer=tokenizer, config=config, seq_len=seq_len, batch_size=batch_size, seed=seed
    )
    batch, pairs = batches.batch(batch_index), batches.pair_sampler(batches.rank_example_numbers(batch_index))
    documents = zip(store.document_at(pairs.a_starts).tolist(), store.document_at(pairs.b_starts).tolist(), strict=True)
    for row, (document_a, document_b) in enumerate(documents):
        n_tokens = int(batch.attention_mask[row].sum())
        ids, segments = batch.ids[row, :n_tokens].tolist(), batch.segments[row, :n_tokens].tolist()
        used = batch.targets[row] >= 0
        targets = dict(zip(batch.masked_positions[row][used].tolist(), batch.targets[row][used].tolist(), strict=True))
        is_random = None if batch.next_sentence_labels is None else bool(batch.next_sentence_labels[row])
        if as_json:
            line = {
                "ids": ids,
                "segments": segments,
                "targets": targets,
                "is_random_next": is_random,
                "documents": [document_a] if is_random is None else [document_a, document_b],
            }
            print(json.dumps(line))
            continue
        n_maskable = len(ids) - (2 if is_random is None else 3)  # [CLS] and [SEP] are never masked
        origin = _describe_origin(is_random, document_a, document_b)
        print(f"row {row}: {origin}; {len(targets)} of {n_maskable} tokens are prediction targets")
        for position, (token_id, segment) in enumerate(zip(ids, segments, strict=True)):
            note = _describe_masking(tokenizer, token_id, targets[position]) if position in targets else ""
            print(f"{position:>5}  {'AB'[segment]}  {tokenizer.id_to_token(token_id):<14} {note}".rstrip())


def _describe_origin(is_random_next: bool | None, document_a: int, document_b: int) -> str:
    match is_random_next:
        case None:
            return f"document {document_a}"
        case True:
            return f"B does not follow A (A is from document {document_a}, B from document {document_b})"
        case False:
            return f"B follows A in document {document_a}"


def _describe_masking(tokenizer: "Tokenizer", input_id: int, target_id: int) -> str:
    from qkv.choices import SpecialToken

    if input_id == tokenizer.special_id(SpecialToken.MASK):
        return f"← {tokenizer.id_to_token(target_id)}, masked"
    if input_id == target_id:
        return "← unchanged"
    return f"← {tokenizer.id_to_token(target_id)}, replaced by a random token"
