"""Train tokenizers with Hugging Face `tokenizers`."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from qkv.choices import SpecialToken, SpecialTokenStyle, TokenizerKind
from qkv.errors import ConfigError, InputError
from qkv.text.tokenizer import Tokenizer, convert_errors_to_input_error, split_into_chunks

END_OF_TEXT = "<|endoftext|>"

_SPECIAL_TOKENS: dict[SpecialTokenStyle, dict[SpecialToken, str]] = {
    SpecialTokenStyle.GPT: {SpecialToken.BOS: END_OF_TEXT, SpecialToken.EOS: END_OF_TEXT},
    SpecialTokenStyle.BERT: {
        SpecialToken.PAD: "[PAD]",
        SpecialToken.UNK: "[UNK]",
        SpecialToken.CLS: "[CLS]",
        SpecialToken.SEP: "[SEP]",
        SpecialToken.MASK: "[MASK]",
    },
    SpecialTokenStyle.SEQ2SEQ: {
        SpecialToken.PAD: "<pad>",
        SpecialToken.BOS: "<bos>",
        SpecialToken.EOS: "<eos>",
        SpecialToken.UNK: "<unk>",
    },
}
_DEFAULT_STYLE = {
    TokenizerKind.BPE: SpecialTokenStyle.GPT,
    TokenizerKind.WORDPIECE: SpecialTokenStyle.BERT,
    TokenizerKind.UNIGRAM: SpecialTokenStyle.SEQ2SEQ,
    TokenizerKind.CHARACTER: SpecialTokenStyle.GPT,
}


def train_tokenizer(
    kind: TokenizerKind,
    texts: Iterable[str],
    *,
    vocab_size: int,
    style: SpecialTokenStyle | None = None,
    lowercase: bool = False,
    add_prefix_space: bool = False,
) -> Tokenizer:
    """Train a tokenizer with at most `vocab_size` ids, including special tokens.

    If the training text is small, the tokenizer has fewer ids.

    The default `style` is GPT for bpe and char, BERT for wordpiece, and seq2seq for unigram. With `add_prefix_space`
    (bpe only), a space is added to the start of each text and removed by decoding. The first word of a text is then
    encoded in the same way as elsewhere, so encoding concatenated sentences gives the same ids as concatenating their
    ids.

    Training of bpe and char tokenizers is deterministic. For wordpiece and unigram, `tokenizers` breaks ties randomly.
    """
    roles = dict(_SPECIAL_TOKENS[style or _DEFAULT_STYLE[kind]])
    if kind is not TokenizerKind.BPE:  # byte-level BPE can encode any text
        roles.setdefault(SpecialToken.UNK, "<unk>")
    special_tokens = list(dict.fromkeys(roles.values()))
    min_size = len(special_tokens) + (256 if kind is TokenizerKind.BPE else 1)
    if vocab_size < min_size:
        raise ConfigError(
            f"vocab_size={vocab_size} is too small: a {kind} tokenizer with special tokens requires at least {min_size}"
        )
    backend = _create_untrained_backend(kind, unknown=roles.get(SpecialToken.UNK), lowercase=lowercase)
    if add_prefix_space and kind is TokenizerKind.BPE:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with convert_errors_to_input_error(f"cannot train a {kind} tokenizer with vocab_size={vocab_size}"):
        _train_backend(kind, backend, _chunk_texts_raise_if_empty(texts), roles=roles, vocab_size=vocab_size)
        # The post-processor must be set after training because training resets it.
        if (processor := _build_template(backend, roles)) is not None:
            backend.post_processor = processor
    tokenizer = Tokenizer(backend, roles)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"vocab_size={vocab_size} is too small: the characters of the text require at least "
            f"{tokenizer.vocab_size} ids"
        )
    return tokenizer


def _create_untrained_backend(kind: TokenizerKind, *, unknown: str | None, lowercase: bool) -> tokenizers.Tokenizer:
    match kind:
        case TokenizerKind.BPE:
            backend = tokenizers.Tokenizer(models.BPE())
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
        case TokenizerKind.WORDPIECE:
            backend = tokenizers.Tokenizer(models.WordPiece(vocab={}, unk_token=unknown or ""))
            backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            backend.decoder = decoders.WordPiece()
        case TokenizerKind.UNIGRAM:
            backend = tokenizers.Tokenizer(models.Unigram())
            backend.pre_tokenizer = pre_tokenizers.Metaspace()
            backend.decoder = decoders.Metaspace()
        case TokenizerKind.CHARACTER:  # BPE without merges has one token per character
            backend = tokenizers.Tokenizer(models.BPE(vocab={}, merges=[], unk_token=unknown))
            backend.decoder = decoders.Fuse()
    if kind is TokenizerKind.WORDPIECE:
        backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    elif lowercase:
        backend.normalizer = normalizers.Lowercase()
    return backend


def _train_backend(
    kind: TokenizerKind,
    backend: tokenizers.Tokenizer,
    chunks: Iterator[str],
    *,
    roles: dict[SpecialToken, str],
    vocab_size: int,
) -> None:
    special_tokens = list(dict.fromkeys(roles.values()))
    match kind:
        case TokenizerKind.BPE:
            trainer = trainers.BpeTrainer(
                vocab_size=vocab_size,
                special_tokens=special_tokens,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
        case TokenizerKind.WORDPIECE:
            trainer = trainers.WordPieceTrainer(
                vocab_size=vocab_size,
                special_tokens=special_tokens,
                # A letter may need two entries, `a` and `##a`. The rarest letters become unknown tokens.
                limit_alphabet=max((vocab_size - len(special_tokens)) // 2, 1),
                show_progress=False,
            )
        case TokenizerKind.UNIGRAM:
            trainer = trainers.UnigramTrainer(
                vocab_size=vocab_size - len(special_tokens) + 1,
                special_tokens=[roles[SpecialToken.UNK]],
                unk_token=roles[SpecialToken.UNK],
                show_progress=False,
            )
        case TokenizerKind.CHARACTER:
            trainer = None
            _set_character_vocabulary(backend, chunks, special_tokens=special_tokens, vocab_size=vocab_size)
    if trainer is not None:
        backend.train_from_iterator(chunks, trainer)
    if kind is TokenizerKind.UNIGRAM:
        _round_and_sort_unigram_scores(backend)
    # Special tokens are added after training. Otherwise, a unigram model would match them in plain text.
    backend.add_special_tokens(special_tokens)


def _round_and_sort_unigram_scores(backend: tokenizers.Tokenizer) -> None:
    """Sort the unigram scores and round them to six decimals.

    `tokenizers` does not restore scores with more decimals exactly from JSON.
    """
    model = json.loads(backend.to_str())["model"]
    unknown, *entries = [(token, round(score, 6)) for token, score in model["vocab"]]
    entries.sort(key=lambda entry: (-entry[1], entry[0]))
    backend.model = models.Unigram([unknown, *entries], unk_id=model["unk_id"], byte_fallback=False)


def _set_character_vocabulary(
    backend: tokenizers.Tokenizer, chunks: Iterator[str], *, special_tokens: list[str], vocab_size: int
) -> None:
    counts: Counter[str] = Counter()
    for chunk in chunks:
        counts.update(chunk if backend.normalizer is None else backend.normalizer.normalize_str(chunk))
    most = sorted(counts, key=lambda character: (-counts[character], character))
    tokens = special_tokens + sorted(most[: vocab_size - len(special_tokens)])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend.model = models.BPE(vocab=vocabulary, merges=[], unk_token=backend.model.unk_token)


def _build_template(
    backend: tokenizers.Tokenizer, roles: dict[SpecialToken, str]
) -> processors.TemplateProcessing | None:
    first, last = (
        (roles.get(SpecialToken.CLS), roles.get(SpecialToken.SEP))
        if SpecialToken.CLS in roles
        else (roles.get(SpecialToken.BOS), roles.get(SpecialToken.EOS))
    )
    if first is None or last is None or first == last:  # GPT's <|endoftext|> only separates documents
        return None
    second_prefix = "" if SpecialToken.CLS in roles else f"{first}:1 "
    return processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {second_prefix}$B:1 {last}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (first, last)],
    )


def _chunk_texts_raise_if_empty(texts: Iterable[str]) -> Iterator[str]:
    """Split texts into chunks to limit memory use. Raises `InputError` if all texts are empty."""
    empty = True
    for text in texts:
        if text:
            empty = False
            yield from split_into_chunks(text)
    if empty:
        raise InputError("tokenizer training requires text, but all texts are empty")
