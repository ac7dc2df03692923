"""Load models from native and Hugging Face folders.

A folder contains config.json, the weights (model.safetensors or shards) and usually a tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from qkv.config import BERTConfig, ModelConfig, RNNConfig, SentenceEmbedding, Seq2SeqConfig, config_from_dict
from qkv.errors import ConfigError, InputError, QKVError, WeightsError
from qkv.models import Model, RNNSeq2Seq, Seq2Seq, build
from qkv.text import Tokenizer, load_tokenizer
from qkv.text.tokenizer_files import FOLDER_FILES, SOURCE_SPM
from qkv.weights.checkpoint_folder import read_json_object, read_weights
from qkv.weights.generation_config import GenerationConfig, read_generation_config
from qkv.weights.name_table import NameMapping, NameTable
from qkv.weights.sentence_transformers import MODULES_FILE, read_sentence_embedding_and_remarks, transformer_folder
from qkv.weights.state_dict import load_into

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
    embedding, remarks = None, list[str]()
    if (folder / MODULES_FILE).is_file():
        embedding, remarks = read_sentence_embedding_and_remarks(folder)
        folder = transformer_folder(folder)
    settings = read_json_object(folder / "config.json")
    tensors = read_weights(folder)
    try:
        if "family" in settings:
            model = build_unless_config_exceeds_tensors(config_from_dict(settings), tensors)
            load_into(model, tensors, native_name_table(model))
        else:
            from qkv.weights.families import config_from_published_with_remarks
            from qkv.weights.published_weights import load_published_weights

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


def _load_folder_tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if any((folder / name).is_file() for name in FOLDER_FILES) else None


def require_tokenizer(bundle: ModelBundle, folder: Path) -> Tokenizer:
    """Return the tokenizer of a model, or raise an error if the model has none."""
    if bundle.tokenizer is None:
        raise InputError(f"{folder}: no tokenizer found; expected one of {', '.join(FOLDER_FILES)}")
    return bundle.tokenizer


def build_unless_config_exceeds_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Model:
    """Build a randomly initialized model, or raise an error if the config is far too large for the tensors.

    The numbers in a config are arbitrary, so building a model from an unchecked config could allocate any amount of
    memory. This function does not detect individual missing tensors, which `load_into` lists.
    """
    is_encoder_decoder = isinstance(config, Seq2SeqConfig | RNNConfig)
    n_layers = config.n_encoder_layers + config.n_decoder_layers if is_encoder_decoder else config.n_layers
    if n_layers > len(tensors):
        raise WeightsError(f"the config specifies {n_layers:,} layers, but there are only {len(tensors):,} tensors")
    n_elements = sum(tensor.numel() for tensor in tensors.values())
    try:
        with torch.device("meta"):  # tensors on this device have a shape but no memory
            n_expected = sum(parameter.numel() for parameter in build(config).parameters())
    except (RuntimeError, TypeError):  # the size of a tensor exceeds 64 bits
        raise WeightsError(
            f"the config specifies tensors of more than 2^63 bytes, but there are only {n_elements:,} elements"
        ) from None
    if n_expected > 2 * n_elements:
        raise WeightsError(
            f"the config specifies {n_expected:,} parameters, but the tensors contain only {n_elements:,} elements"
        )
    return build(config)
