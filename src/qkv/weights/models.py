"""A model's folder: config.json, model.safetensors (one file or shards), tokenizer.json. Ours, or Hugging Face's."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from qkv.config import BERTConfig, ModelConfig, RNNConfig, SentenceEmbedding, Seq2SeqConfig, config_from_dict
from qkv.errors import ConfigError, InputError, QKVError, WeightsError
from qkv.models import Model, RNNSeq2Seq, Seq2Seq
from qkv.text import Tokenizer, load_tokenizer
from qkv.text.files import FOLDER_FILES, SOURCE_SPM
from qkv.weights.decoding import Decoding, read_decoding
from qkv.weights.families import read_published
from qkv.weights.folder import read_metadata, read_settings, read_tensors
from qkv.weights.int8 import INT8_ROWS, STORAGE_KEY, from_int8
from qkv.weights.names import NameTable, Rename
from qkv.weights.published import load_published
from qkv.weights.sentence_transformers import MODULES, model_folder, read_sentence_embedding
from qkv.weights.sizing import build_to_fill
from qkv.weights.tensors import fill

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SOURCE_TOKENIZER = "source_tokenizer.json"
SOURCE_TOKENIZERS = (SOURCE_TOKENIZER, SOURCE_SPM)


@dataclass(frozen=True)
class Loaded:
    """A model ready for use (`eval`), and its tokenizer where the folder has one."""

    model: Model
    tokenizer: Tokenizer | None
    remarks: tuple[str, ...] = ()
    """What the user should be told: heads that the config promises and the weights lack, a prompt left out."""
    source_tokenizer: Tokenizer | None = None
    """A translator's, where the source has one of its own (`source_tokenizer.json`, `source.spm`)."""
    decoding: Decoding = field(default_factory=Decoding)
    """An encoder–decoder's: how its texts begin."""


def load_model(folder: Path) -> Loaded:
    """`config.json` says which kind it is: `family` for ours, `model_type` for Hugging Face's."""
    embedding, remarks = read_sentence_embedding(folder)
    folder = model_folder(folder)
    settings = read_settings(folder / "config.json")
    tensors = read_weights(folder)
    try:
        if "family" in settings:
            model = build_to_fill(config_from_dict(settings), tensors)
            fill(model, tensors, own_names(model))
        else:
            config, more = read_published(settings, tensors)
            remarks += more
            model = build_to_fill(config if embedding is None else _with(embedding, config), tensors)
            load_published(model, tensors)
    except QKVError as error:
        place = folder / "config.json" if isinstance(error, ConfigError) else folder
        raise type(error)(f"{place}: {error}") from None
    remarks = [*remarks, *_of_numbers(tensors)]
    is_pair = isinstance(model, Seq2Seq | RNNSeq2Seq)
    of_source = next((folder / name for name in SOURCE_TOKENIZERS if (folder / name).is_file()), None)
    loaded = Loaded(
        model.eval(),
        _tokenizer(folder),
        tuple(remarks),
        source_tokenizer=None if of_source is None else load_tokenizer(of_source),
        decoding=read_decoding(folder, settings) if is_pair else Decoding(),
    )
    check_vocabulary(loaded, folder)
    return loaded


def _of_numbers(tensors: dict[str, Tensor]) -> list[str]:
    """A CPU multiplies 16-bit numbers up to 60 times as slowly as 32-bit ones, so a model is always built of these."""
    few = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.dtype.itemsize < 4}
    return [f"its weights are {' and '.join(sorted(few))}; they are computed with in float32"] if few else []


def _with(embedding: SentenceEmbedding, config: ModelConfig) -> ModelConfig:
    if not isinstance(config, BERTConfig):
        raise ConfigError(f"{MODULES} makes sentence vectors of a {config.family}; supported: bert")
    if embedding.max_tokens is not None and embedding.max_tokens >= config.context_length:
        embedding = embedding.replace(max_tokens=None)
    return config.replace(sentence_embedding=embedding)


def check_vocabulary(loaded: Loaded, place: Path) -> None:
    """A tokenizer may have fewer ids than the model (rows left empty), never more."""
    config = loaded.model.config
    rows = {"tokenizer": (loaded.tokenizer, config.vocab_size)}
    if isinstance(config, Seq2SeqConfig | RNNConfig):
        of_source = loaded.source_tokenizer or loaded.tokenizer
        rows["source's tokenizer"] = (of_source, config.source_vocab_size)
    for name, (tokenizer, n_rows) in rows.items():
        if tokenizer is not None and tokenizer.vocab_size > n_rows:
            raise WeightsError(f"{place}: the {name} has {tokenizer.vocab_size} ids, the model {n_rows}")
    for number in (loaded.decoding.first, loaded.decoding.then, *loaded.decoding.never):
        if number is not None and number >= config.vocab_size:
            raise WeightsError(f"{place}: token id {number} of its settings; the model has {config.vocab_size}")


def own_names(model: Model) -> NameTable:
    """Our own names; tied weights may be named once."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return NameTable(renames=[Rename(name, (name,)) for name in names])


def read_weights(folder: Path) -> dict[str, Tensor]:
    """One file or shards, as floating-point numbers whatever they are stored as."""
    if (folder / SINGLE).is_file():
        return _read_single(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        refuse_pickle(folder / pickled[0])
    raise WeightsError(f"{folder}: holds neither {SINGLE} nor {INDEX}")


def refuse_pickle(file: Path) -> NoReturn:
    raise WeightsError(
        f"{file}: pickled weights can run code when opened, so they are not; "
        "save them anew with `save_pretrained(folder, safe_serialization=True)`"
    )


def _read_single(path: Path) -> dict[str, Tensor]:
    storage = read_metadata(path).get(STORAGE_KEY)
    tensors = read_tensors(path)
    if storage is None:
        return tensors
    if storage != INT8_ROWS:
        raise WeightsError(f"{path}: is stored as {storage!r}; this version reads {INT8_ROWS!r}")
    try:
        return from_int8(tensors)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = read_settings(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(part, str) for pair in index.items() for part in pair):
        raise WeightsError(f"{folder / INDEX}: weight_map must be a table of tensor name to file name")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(index.values())):
        if Path(shard).name != shard:
            raise WeightsError(f"{folder / INDEX}: '{shard}' points outside the folder")
        tensors |= read_tensors(folder / shard)
    if tensors.keys() != index.keys():
        odd = sorted(tensors.keys() ^ index.keys())
        raise WeightsError(
            f"{folder / INDEX}: lists {len(index)} tensors, the shards hold {len(tensors)}; {odd[0]} is odd"
        )
    return tensors


def _tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if any((folder / name).is_file() for name in FOLDER_FILES) else None


def needs_tokenizer(loaded: Loaded, folder: Path) -> Tokenizer:
    if loaded.tokenizer is None:
        raise InputError(f"{folder}: has no tokenizer ({', '.join(FOLDER_FILES)})")
    return loaded.tokenizer
