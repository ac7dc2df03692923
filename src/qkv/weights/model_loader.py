"""Load models from native and Hugging Face folders.

A folder contains config.json, the weights (model.safetensors or shards) and usually a tokenizer.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from qkv.config import BERTConfig, ModelConfig, RNNConfig, SentenceEmbedding, Seq2SeqConfig, config_from_dict
from qkv.errors import ConfigError, InputError, QKVError, WeightsError
from qkv.models import Model, RNNSeq2Seq, Seq2Seq
from qkv.text import Tokenizer, load_tokenizer
from qkv.text.tokenizer_files import FOLDER_FILES, SOURCE_SPM
from qkv.weights.atomic_folder import read_json_object, read_safetensors, read_safetensors_metadata
from qkv.weights.families import config_from_published_with_remarks
from qkv.weights.generation_config import GenerationConfig, read_generation_config
from qkv.weights.int8_storage import INT8_ROWS, STORAGE_KEY, dequantize_int8_matrices
from qkv.weights.name_table import NameMapping, NameTable
from qkv.weights.published_weights import load_published_weights
from qkv.weights.sentence_transformers import MODULES_FILE, read_sentence_embedding_and_remarks, transformer_folder
from qkv.weights.size_check import build_unless_config_exceeds_tensors
from qkv.weights.state_dict import load_into

WEIGHTS_FILE = "model.safetensors"
SHARD_INDEX_FILE = "model.safetensors.index.json"
SOURCE_TOKENIZER = "source_tokenizer.json"
SOURCE_TOKENIZER_FILES = (SOURCE_TOKENIZER, SOURCE_SPM)


@dataclass(frozen=True)
class ModelBundle:
    """A model in evaluation mode, together with its tokenizers and generation settings."""

    model: Model
    tokenizer: Tokenizer | None
    """The tokenizer, or `None` if the folder has no tokenizer. For an encoder–decoder, this is the target tokenizer."""
    remarks: tuple[str, ...] = ()
    """Notes for the user, for example about heads that the config specifies but the weights do not contain."""
    source_tokenizer: Tokenizer | None = None
    """The source tokenizer of a translation model, if separate (`source_tokenizer.json` or `source.spm`)."""
    generation_config: GenerationConfig = field(default_factory=GenerationConfig)
    """The generation settings of an encoder–decoder."""


def load_model(folder: Path) -> ModelBundle:
    """Load a model from a native or Hugging Face folder.

    The `config.json` in a native folder has the key `family`, and that in a Hugging Face folder has `model_type`.
    """
    embedding, remarks = read_sentence_embedding_and_remarks(folder)
    folder = transformer_folder(folder)
    settings = read_json_object(folder / "config.json")
    tensors = read_weights(folder)
    try:
        if "family" in settings:
            model = build_unless_config_exceeds_tensors(config_from_dict(settings), tensors)
            load_into(model, tensors, native_name_table(model))
        else:
            config, config_remarks = config_from_published_with_remarks(settings, tensors)
            remarks += config_remarks
            config = config if embedding is None else _add_sentence_embedding(config, embedding)
            model = build_unless_config_exceeds_tensors(config, tensors)
            load_published_weights(model, tensors)
    except QKVError as error:
        path = folder / "config.json" if isinstance(error, ConfigError) else folder
        raise type(error)(f"{path}: {error}") from None
    remarks = [*remarks, *_dtype_remarks(tensors)]
    is_encoder_decoder = isinstance(model, Seq2Seq | RNNSeq2Seq)
    source_file = next((folder / name for name in SOURCE_TOKENIZER_FILES if (folder / name).is_file()), None)
    bundle = ModelBundle(
        model.eval(),
        _load_folder_tokenizer(folder),
        tuple(remarks),
        source_tokenizer=None if source_file is None else load_tokenizer(source_file),
        generation_config=read_generation_config(folder, settings) if is_encoder_decoder else GenerationConfig(),
    )
    check_token_ids_within_vocabulary(bundle, folder)
    return bundle


def _dtype_remarks(tensors: dict[str, Tensor]) -> list[str]:
    """Return a note for the user if the weights are stored in 16-bit precision.

    The weights are converted to float32 because 16-bit matmuls are up to 60 times slower on CPUs.
    """
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.dtype.itemsize < 4}
    return [f"the weights are {' and '.join(sorted(dtypes))} and were converted to float32"] if dtypes else []


def _add_sentence_embedding(config: ModelConfig, embedding: SentenceEmbedding) -> ModelConfig:
    if not isinstance(config, BERTConfig):
        raise ConfigError(f"{MODULES_FILE}: sentence embeddings are only supported for bert, not for {config.family}")
    if embedding.max_tokens is not None and embedding.max_tokens >= config.context_length:
        embedding = embedding.replace(max_tokens=None)
    return config.replace(sentence_embedding=embedding)


def check_token_ids_within_vocabulary(bundle: ModelBundle, path: Path) -> None:
    """Check that all token ids in the tokenizers and generation config are within the model's vocabulary.

    A tokenizer may have fewer ids than the model, but not more.
    """
    config = bundle.model.config
    tokenizers = {"tokenizer": (bundle.tokenizer, config.vocab_size)}
    if isinstance(config, Seq2SeqConfig | RNNConfig):
        source_tokenizer = bundle.source_tokenizer or bundle.tokenizer
        tokenizers["source tokenizer"] = (source_tokenizer, config.source_vocab_size)
    for name, (tokenizer, vocab_size) in tokenizers.items():
        if tokenizer is not None and tokenizer.vocab_size > vocab_size:
            raise WeightsError(f"{path}: the {name} has {tokenizer.vocab_size} ids, but the model has {vocab_size}")
    settings = bundle.generation_config
    for token_id in (settings.decoder_start_id, settings.forced_bos_id, *settings.suppressed_ids):
        if token_id is not None and token_id >= config.vocab_size:
            raise WeightsError(
                f"{path}: the generation settings contain token id {token_id}, "
                f"but the vocabulary has {config.vocab_size} tokens"
            )


def native_name_table(model: Model) -> NameTable:
    """Return a table that maps each parameter name to itself. A file may use any of the names of a tied parameter."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return NameTable(mappings=[NameMapping(name, (name,)) for name in names])


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights in a folder from a single file or from shards, and dequantize them if necessary."""
    if (folder / WEIGHTS_FILE).is_file():
        return _read_safetensors_dequantized(folder / WEIGHTS_FILE)
    if (folder / SHARD_INDEX_FILE).is_file():
        return _read_sharded_safetensors(folder)
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        raise_pickle_error(folder / pickled[0])
    raise WeightsError(f"{folder}: contains neither {WEIGHTS_FILE} nor {SHARD_INDEX_FILE}")


def raise_pickle_error(file: Path) -> NoReturn:
    """Raise an error for a pickled file because loading it could execute arbitrary code."""
    raise WeightsError(
        f"{file}: pickled weights are not supported because loading them can execute arbitrary code; "
        "save the model with `save_pretrained(folder, safe_serialization=True)`"
    )


def _read_safetensors_dequantized(path: Path) -> dict[str, Tensor]:
    storage = read_safetensors_metadata(path).get(STORAGE_KEY)
    tensors = read_safetensors(path)
    if storage is None:
        return tensors
    if storage != INT8_ROWS:
        raise WeightsError(f"{path}: {STORAGE_KEY} must be {INT8_ROWS!r}, got {storage!r}")
    try:
        return dequantize_int8_matrices(tensors)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None


def _read_sharded_safetensors(folder: Path) -> dict[str, Tensor]:
    index_file = folder / SHARD_INDEX_FILE
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(part, str) for pair in weight_map.items() for part in pair
    ):
        raise WeightsError(f"{index_file}: weight_map must be an object that maps tensor names to file names")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise WeightsError(f"{index_file}: '{shard}' is outside the folder")
        tensors |= read_safetensors(folder / shard)
    if tensors.keys() != weight_map.keys():
        different = sorted(tensors.keys() ^ weight_map.keys())
        raise WeightsError(
            f"{index_file}: lists {len(weight_map)} tensors, but the shards contain {len(tensors)}; "
            f"the first difference is {different[0]}"
        )
    return tensors


def _load_folder_tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if any((folder / name).is_file() for name in FOLDER_FILES) else None


def require_tokenizer(bundle: ModelBundle, folder: Path) -> Tokenizer:
    """Return the tokenizer of a model, or raise an error if the model has none."""
    if bundle.tokenizer is None:
        raise InputError(f"{folder}: no tokenizer found; expected one of {', '.join(FOLDER_FILES)}")
    return bundle.tokenizer
