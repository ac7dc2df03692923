"""BERT's examples as training sees them: which words are asked for, what stands there instead, and why."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkv.config import MaskingConfig
    from qkv.text import Tokenizer


def show_masked(
    folder: Path, config: "MaskingConfig", *, batch: int, rows: int, length: int, seed: int, as_json: bool
) -> None:
    from qkv.data.masked_batches import MaskedBatches
    from qkv.data.sentence_store import SentenceStore

    store = SentenceStore.open(folder)
    tokenizer = store.store.tokenizer()
    batches = MaskedBatches(source=store, tokenizer=tokenizer, config=config, length=length, batch_size=rows, seed=seed)
    made, pairs = batches.batch(batch), batches.pair_sampler(batches.example_indices(batch))
    documents = zip(store.document_at(pairs.a).tolist(), store.document_at(pairs.b).tolist(), strict=True)
    for row, (of_a, of_b) in enumerate(documents):
        n = int(made.attention_mask[row].sum())
        ids, segments = made.ids[row, :n].tolist(), made.segments[row, :n].tolist()
        used = made.targets[row] >= 0
        asked = dict(zip(made.masked_positions[row][used].tolist(), made.targets[row][used].tolist(), strict=True))
        is_wrong = None if made.next_sentence_labels is None else bool(made.next_sentence_labels[row])
        if as_json:
            of = [of_a] if is_wrong is None else [of_a, of_b]
            print(json.dumps({"ids": ids, "segments": segments, "asked": asked, "is_wrong": is_wrong, "documents": of}))
            continue
        n_words = len(ids) - (2 if is_wrong is None else 3)
        print(f"row {row}: {_origin(is_wrong, of_a, of_b)}; {len(asked)} of {n_words} words are asked for")
        for place, (number, segment) in enumerate(zip(ids, segments, strict=True)):
            why = _why(tokenizer, number, asked[place]) if place in asked else ""
            print(f"{place:>5}  {'AB'[segment]}  {tokenizer.id_to_token(number):<14} {why}".rstrip())


def _origin(is_wrong: bool | None, of_a: int, of_b: int) -> str:
    match is_wrong:
        case None:
            return f"document {of_a}"
        case True:
            return f"B does not follow A: A is of document {of_a}, B of {of_b}"
        case False:
            return f"B follows A in document {of_a}"


def _why(tokenizer: "Tokenizer", shown: int, asked: int) -> str:
    from qkv.choices import SpecialToken

    if shown == tokenizer.special_id(SpecialToken.MASK):
        return f"← {tokenizer.id_to_token(asked)}, hidden"
    if shown == asked:
        return "← asked for, but left as it is"
    return f"← {tokenizer.id_to_token(asked)}, replaced by any word"
