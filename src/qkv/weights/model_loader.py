"""Load models from native and Hugging Face folders, and convert weights to and from their published names and layouts.

A folder contains config.json, the weights (model.safetensors or shards) and usually a tokenizer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from qkv.config import BERTConfig, ModelConfig, RNNConfig, SentenceEmbedding, Seq2SeqConfig, config_from_dict
from qkv.errors import ConfigError, InputError, QKVError, WeightsError
from qkv.models import Model, RNNSeq2Seq, Seq2Seq, build
from qkv.text import Tokenizer, load_tokenizer
from qkv.text.tokenizer_files import FOLDER_FILES, SOURCE_SPM
from qkv.weights.checkpoint_folder import read_json_object, read_weights
from qkv.weights.generation_config import GenerationConfig, read_generation_config
from qkv.weights.name_table import Layout, NameMapping, NameTable
from qkv.weights.sentence_transformers import MODULES_FILE, read_sentence_embedding_and_remarks, transformer_folder

SOURCE_TOKENIZER = "source_tokenizer.json"
SOURCE_TOKENIZER_FILES = (SOURCE_TOKENIZER, SOURCE_SPM)
MAX_LISTED = 20
"""Default number of problems of each kind that an error lists."""


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


def load_published_weights(model: Model, tensors: Mapping[str, Tensor]) -> list[str]:
    """Load published tensors into a model.

    If any tensor does not match, a `WeightsError` is raised and the model is unchanged. Returns the names of the
    tensors that were ignored because they are not learned (stored masks and fixed positions).
    """
    from qkv.weights.families import name_table_for

    return load_into(model, tensors, name_table_for(model.config))


def to_published_weights(model: Model) -> dict[str, Tensor]:
    """Return copies of all weights, keyed by their published names. Tied weights are included once."""
    from qkv.weights.families import name_table_for, to_lossless_published_config

    to_lossless_published_config(model.config)  # raises an error if the config has no published form
    return to_published_state(model, name_table_for(model.config))


def load_into(
    model: nn.Module, tensors: Mapping[str, Tensor], table: NameTable, *, max_listed: int = MAX_LISTED
) -> list[str]:
    """Copy published tensors into the parameters of a model.

    If any tensor does not match, no parameter is changed, and the error lists up to `max_listed` problems of each kind.
    A file for a different model may have hundreds of problems. Returns the names of the tensors that were ignored
    because they are not learned.
    """
    targets = _build_load_targets(model, table)
    file_names = _file_names_by_canonical_name(tensors, table)
    expected = {_canonical_name(table, name) for target in targets for name in target.alternative_names}
    others = [name for name in file_names if name not in expected]
    problems = [
        ("unexpected", f"{file_names[name]} {tuple(tensors[file_names[name]].shape)}")
        for name in others
        if not any(re.fullmatch(pattern, name) for pattern in table.ignored_patterns)
    ]
    for target in targets:
        names = [
            file_names[_canonical_name(table, name)]
            for name in target.alternative_names
            if _canonical_name(table, name) in file_names
        ]
        problems += target.find_problems_with_kind({name: tensors[name] for name in names})
    if problems:
        raise WeightsError(_summarize_problems_by_kind(problems, max_listed))
    with torch.no_grad():
        for target in targets:
            canonical = (_canonical_name(table, name) for name in target.alternative_names)
            target.load(tensors[next(file_names[name] for name in canonical if name in file_names)])
    return [file_names[name] for name in others]


def to_published_state(model: nn.Module, table: NameTable) -> dict[str, Tensor]:
    """Return copies of all parameters, keyed by their published names. Tied parameters are included once."""
    return {target.alternative_names[0]: target.to_published_tensor() for target in _build_load_targets(model, table)}


def _to_published_layout(tensor: Tensor, layout: Layout) -> Tensor:
    match layout:
        case Layout.SAME:
            return tensor
        case Layout.TRANSPOSED:
            return tensor.T
        case Layout.SINGLE_ROW:
            return tensor[None]


def _from_published_layout(tensor: Tensor, layout: Layout) -> Tensor:
    return tensor[0] if layout is Layout.SINGLE_ROW else _to_published_layout(tensor, layout)


@dataclass(frozen=True, kw_only=True)
class _LoadTarget:
    """The parameters into which one published tensor is loaded, and the tensor's possible names.

    A tied weight has several names.
    """

    parameters: list[nn.Parameter]
    layout: Layout
    alternative_names: list[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the published tensor."""
        rows = sum(parameter.shape[0] for parameter in self.parameters)
        combined = torch.empty(rows, *self.parameters[0].shape[1:], device="meta")
        return tuple(_to_published_layout(combined, self.layout).shape)

    def find_problems_with_kind(self, tensors: dict[str, Tensor]) -> list[tuple[str, str]]:
        """Return a (kind, description) pair for each problem with the tensor.

        `tensors` contains the tensor under each of its names in the file.
        """
        if not tensors:
            return [("missing", f"{self.alternative_names[0]} {self.shape}")]
        problems = [
            ("with the wrong shape", f"{name} has {tuple(tensor.shape)}, expected {self.shape}")
            for name, tensor in tensors.items()
            if tuple(tensor.shape) != self.shape
        ]
        problems += [
            ("not floating-point", f"{name} is {tensor.dtype}")
            for name, tensor in tensors.items()
            if not tensor.is_floating_point()
        ]
        if problems:
            return problems
        if non_finite := [("not finite", name) for name, tensor in tensors.items() if not _is_finite(tensor)]:
            return non_finite
        first = next(iter(tensors.values()))
        if not all(torch.equal(first, tensor) for tensor in tensors.values()):
            return [("tied in the model but different", " and ".join(tensors))]
        return []

    def load(self, tensor: Tensor) -> None:
        rows = [parameter.shape[0] for parameter in self.parameters]
        parts = _from_published_layout(tensor, self.layout).split(rows)
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part)

    def to_published_tensor(self) -> Tensor:
        combined = torch.cat([parameter.detach() for parameter in self.parameters])
        return _to_published_layout(combined, self.layout).contiguous()


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite.

    Checking only the minimum and maximum avoids allocating a mask as large as the tensor.
    """
    return all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _build_load_targets(model: nn.Module, table: NameTable) -> list[_LoadTarget]:
    """Return one load target for each published tensor that the model has parameters for.

    Entries of the table with the same parameters (tied weights) are merged.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    on_meta = [name for name, parameter in parameters.items() if parameter.is_meta]
    if on_meta:
        raise WeightsError(
            f"{len(on_meta)} parameters are on the meta device and have no data (for example {on_meta[0]})"
        )
    targets: dict[tuple[int, ...], _LoadTarget] = {}
    mapped: set[str] = set()
    for mapping in table.mappings:
        if not all(name in parameters for name in mapping.parameters):
            continue
        mapped.update(mapping.parameters)
        mapping_parameters = [parameters[name] for name in mapping.parameters]
        target = targets.setdefault(
            tuple(id(parameter) for parameter in mapping_parameters),
            _LoadTarget(parameters=mapping_parameters, layout=mapping.layout, alternative_names=[]),
        )
        target.alternative_names.append(mapping.published)
    unmapped = [name for name in parameters if name not in mapped]
    if unmapped:
        raise WeightsError(
            f"{len(unmapped)} of {len(parameters)} parameters have no Hugging Face name: {_join_first(unmapped)}"
        )
    return list(targets.values())


def _file_names_by_canonical_name(tensors: Mapping[str, Tensor], table: NameTable) -> dict[str, str]:
    """Return a map from canonical tensor names to the names in the file."""
    file_names: dict[str, str] = {}
    for name in tensors:
        canonical = _canonical_name(table, name)
        if canonical in file_names:
            raise WeightsError(f"the file contains the same tensor twice: {file_names[canonical]} and {name}")
        file_names[canonical] = name
    return file_names


def _canonical_name(table: NameTable, name: str) -> str:
    """Return a tensor name without the prefix and with the current suffix."""
    name = name.removeprefix(table.prefix)
    for legacy, current in table.legacy_suffixes.items():
        if name.endswith(legacy):
            return name.removesuffix(legacy) + current
    return name


def _summarize_problems_by_kind(problems: list[tuple[str, str]], max_listed: int) -> str:
    by_kind: dict[str, list[str]] = {}
    for kind, description in problems:
        by_kind.setdefault(kind, []).append(description)
    return "the weights do not match the model: " + "; ".join(
        f"{len(descriptions)} {kind}: {_join_first(descriptions, max_listed)}" for kind, descriptions in by_kind.items()
    )


def _join_first(items: list[str], max_listed: int = MAX_LISTED) -> str:
    listed = ", ".join(items[:max_listed])
    return listed if len(items) <= max_listed else f"{listed} and {len(items) - max_listed} more"
