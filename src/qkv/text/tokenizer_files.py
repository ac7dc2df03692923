"""Load and save tokenizers.

Supported files are `tokenizer.json`, SentencePiece models, `vocab.json` with `merges.txt` (GPT-2) and `vocab.txt`
(BERT).
"""

import json
import os
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from qkv.choices import SpecialToken
from qkv.errors import DiskError, InputError
from qkv.text.sentencepiece import build_unigram_sentencepiece_backend
from qkv.text.tokenizer import Tokenizer, convert_errors_to_input_error, parse_encodable_json, suppress_stderr

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SOURCE_SPM, TARGET_SPM = "source.spm", "target.spm"
"""File names of Marian's SentencePiece models, one per language.

Token ids are stored separately, in a joint vocab.json or in target_vocab.json.
"""
T5_SPM = "spiece.model"
FOLDER_FILES = (TARGET_SPM, TOKENIZER_FILE, T5_SPM, "vocab.json", "vocab.txt")
"""Tokenizer files in order of precedence. In Marian folders, tokenizer.json covers only one language."""
N_SENTINELS = 100
"""Default number of T5 sentinel tokens. The key `extra_ids` of the tokenizer config overrides it."""
MAX_ID = 1 << 24
"""Upper limit for token ids. Larger ids indicate a corrupt file and would require huge embeddings."""

# Roles of common special tokens. They are used if tokenizer_config.json does not define any roles.
_COMMON_SPELLINGS: dict[SpecialToken, tuple[str, ...]] = {
    SpecialToken.BOS: ("<bos>", "<s>", "<|begin_of_text|>", "<|endoftext|>"),
    SpecialToken.EOS: ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>"),
    SpecialToken.PAD: ("<pad>", "[PAD]"),
    SpecialToken.UNK: ("<unk>", "[UNK]"),
    SpecialToken.CLS: ("[CLS]",),
    SpecialToken.SEP: ("[SEP]",),
    SpecialToken.MASK: ("[MASK]", "<mask>"),
}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a file or from a folder that contains one.

    The file may be a tokenizer.json, .spm, spiece.model, vocab.json (with merges.txt in the same folder) or vocab.txt.
    The roles of special tokens come from tokenizer_config.json in the same folder, or from common spellings.
    """
    path = Path(path)
    with suppress_stderr():
        return _load_and_test_tokenizer_file(_find_tokenizer_file(path) if path.is_dir() else path)


def _load_and_test_tokenizer_file(file: Path) -> Tokenizer:
    settings = _read_json_object(file.parent / CONFIG_FILE) if (file.parent / CONFIG_FILE).is_file() else {}
    if file.name.endswith("vocab.txt"):
        backend = _load_bert_vocabulary(file, settings)
    elif file.name.endswith(("vocab.json", "merges.txt")):
        backend = _load_byte_level_bpe_files(file)
    elif file.suffix in (".spm", ".model"):
        backend = _load_sentencepiece_files(file, settings)
    else:
        backend = _validate_and_load_tokenizer_json(file)
    try:
        tokenizer = Tokenizer(backend, _special_tokens_from_settings_or_spellings(backend, settings), name=str(file))
        # A readable file may still fail during encoding. Trigger such errors here, where the file name is known.
        tokenizer.decode(tokenizer.encode_pair("a é", "B.").ids)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json in the format of `transformers`."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in tokenizer_files(tokenizer).items():
            _write_atomically(folder / name, text)
    except OSError as error:
        raise DiskError(f"{folder}: cannot write the tokenizer: {error.strerror}") from None


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the contents of tokenizer_config.json and tokenizer.json by file name."""
    settings: dict[str, str] = {role.value: token for role, token in tokenizer.special_tokens.items()}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    return {
        CONFIG_FILE: json.dumps(settings, indent=2, sort_keys=True) + "\n",
        TOKENIZER_FILE: tokenizer.backend.to_str(pretty=True) + "\n",
    }


def _find_tokenizer_file(folder: Path) -> Path:
    for name in FOLDER_FILES:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder}: no tokenizer found; expected one of {', '.join(FOLDER_FILES)}")


def _validate_and_load_tokenizer_json(file: Path) -> tokenizers.Tokenizer:
    state = _read_json_object(file)
    model = state.get("model")
    if not isinstance(model, dict):
        raise InputError(f"{file}: not a tokenizer.json: missing field 'model'")
    vocabulary = model.get("vocab")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    added = state.get("added_tokens")
    ids += [entry.get("id") for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    for number in ids:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < MAX_ID:
            raise InputError(f"{file}: invalid token id {number!r}; ids must be integers from 0 to {MAX_ID - 1}")
    _check_template_tokens(file, state.get("post_processor"))
    _check_merges_have_subword_prefix(file, model)
    with convert_errors_to_input_error(str(file)):
        return tokenizers.Tokenizer.from_str(json.dumps(state))


def _check_template_tokens(file: Path, processor: Any) -> None:  # noqa: ANN401 - any JSON value
    """Check that all special tokens in a template have an id. Otherwise, `tokenizers` would panic."""
    if isinstance(processor, list):
        for element in processor:
            _check_template_tokens(file, element)
    elif isinstance(processor, dict):
        _check_template_tokens(file, processor.get("processors"))
        template_items = [*_as_list(processor.get("single")), *_as_list(processor.get("pair"))]
        entries = [item.get("SpecialToken") for item in template_items if isinstance(item, dict)]
        special_tokens = processor.get("special_tokens")
        for token in (entry.get("id") for entry in entries if isinstance(entry, dict)):
            if not isinstance(token, str) or not isinstance(special_tokens, dict) or token not in special_tokens:
                raise InputError(
                    f"{file}: {token!r} is used in the template but missing from post_processor.special_tokens"
                )


def _check_merges_have_subword_prefix(file: Path, model: dict[str, Any]) -> None:
    """Check that the second part of each merge starts with the continuation prefix.

    `tokenizers` removes the prefix without checking that it is present, and aborts the process if the removal fails.
    """
    prefix = model.get("continuing_subword_prefix")
    if not prefix or not isinstance(prefix, str):
        return
    for merge in _as_list(model.get("merges")):
        parts = merge.split(" ") if isinstance(merge, str) else _as_list(merge)
        if len(parts) != 2 or not str(parts[1]).startswith(prefix):
            raise InputError(
                f"{file}: the second part of {merge!r} in model.merges must start with "
                f"continuing_subword_prefix={prefix!r}"
            )


def _as_list(value: Any) -> list[Any]:  # noqa: ANN401
    return value if isinstance(value, list) else []


def _load_byte_level_bpe_files(file: Path) -> tokenizers.Tokenizer:
    prefix = file.name.removesuffix("vocab.json").removesuffix("merges.txt")
    vocabulary, merges = (file.with_name(prefix + name) for name in ("vocab.json", "merges.txt"))
    for needed in (vocabulary, merges):
        if not needed.is_file():
            raise InputError(f"{needed}: file not found; a GPT-2 tokenizer requires both vocab.json and merges.txt")
    _read_json_object(vocabulary)
    with convert_errors_to_input_error(str(file)):
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        begin, end = (backend.token_to_id(token) for token in ("<s>", "</s>"))
        if begin is not None and end is not None:
            # In BART and RoBERTa, <s> and </s> surround each text. GPT-2's vocabulary does not contain these tokens.
            backend.post_processor = processors.RobertaProcessing(("</s>", end), ("<s>", begin), add_prefix_space=False)
        _register_common_special_tokens(backend)
        return backend


def _load_sentencepiece_files(file: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """Load a SentencePiece model. The ids are stored in a separate file for Marian and in the model itself for T5."""
    if file.name == T5_SPM:
        n_sentinels = settings.get("extra_ids", N_SENTINELS)
        if not isinstance(n_sentinels, int) or not 0 <= n_sentinels < MAX_ID:
            raise InputError(
                f"{file.parent / CONFIG_FILE}: extra_ids must be a non-negative integer, got {n_sentinels!r}"
            )
        with convert_errors_to_input_error(str(file)):
            return build_unigram_sentencepiece_backend(file, n_sentinels=n_sentinels)
    is_separate = file.name == TARGET_SPM and bool(settings.get("separate_vocabs"))
    vocabulary_file = file.with_name("target_vocab.json" if is_separate else "vocab.json")
    vocabulary = _read_json_object(vocabulary_file) if vocabulary_file.is_file() or is_separate else None
    for token, number in (vocabulary or {}).items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise InputError(f"{vocabulary_file}: the id of {token!r} must be an integer, got {number!r}")
    with convert_errors_to_input_error(str(file)):
        return build_unigram_sentencepiece_backend(file, vocabulary)


def _load_bert_vocabulary(file: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    lines = _read_utf8(file).split("\n")
    words = {word: number for number, line in enumerate(lines) if (word := line.removesuffix("\r"))}
    missing = [word for word in ("[UNK]", "[CLS]", "[SEP]") if word not in words]
    if missing:
        raise InputError(f"{file}: not a BERT vocabulary: missing {' '.join(missing)}")
    # A cased vocabulary contains capital letters in tokens other than special tokens.
    cased = any(word != word.lower() for word in words if not word.startswith("["))
    lowercase = settings.get("do_lower_case", not cased)
    with convert_errors_to_input_error(str(file)):
        backend = tokenizers.Tokenizer(models.WordPiece(vocab=words, unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=bool(lowercase))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, words[token]) for token in ("[CLS]", "[SEP]")],
        )
        _register_common_special_tokens(backend)
        return backend


def _register_common_special_tokens(backend: tokenizers.Tokenizer) -> None:
    """Register common special tokens because vocabulary files do not indicate which tokens are special."""
    spellings = [spelling for group in _COMMON_SPELLINGS.values() for spelling in group]
    present = [spelling for spelling in dict.fromkeys(spellings) if backend.token_to_id(spelling) is not None]
    backend.add_special_tokens(present)


def _special_tokens_from_settings_or_spellings(
    backend: tokenizers.Tokenizer, settings: dict[str, Any]
) -> dict[SpecialToken, str]:
    roles = {}
    has_roles = any(role.value in settings for role in SpecialToken)
    for role in SpecialToken:
        entry = settings.get(role.value)
        token = entry.get("content") if isinstance(entry, dict) else entry
        candidates = (token,) if isinstance(token, str) else () if has_roles else _COMMON_SPELLINGS[role]
        for spelling in candidates:
            if backend.token_to_id(spelling) is not None:
                roles[role] = spelling
                break
    return roles


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        state = parse_encodable_json(_read_utf8(file))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: invalid JSON: {error}") from None
    if not isinstance(state, dict):
        raise InputError(f"{file}: expected a JSON object, got {type(state).__name__}")
    return state


def _read_utf8(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: invalid UTF-8 at byte {error.start}") from None


def _write_atomically(file: Path, text: str) -> None:
    temporary = file.with_name(file.name + ".partial")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
