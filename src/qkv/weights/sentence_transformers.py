"""Read and write the files with which sentence-transformers folders define how sentence embeddings are computed."""

import json
from pathlib import Path
from typing import Any

from qkv.choices import Pooling
from qkv.config import BERTConfig, SentenceEmbedding
from qkv.errors import ConfigError, WeightsError
from qkv.text.tokenizer_files import CONFIG_FILE
from qkv.weights.checkpoint_folder import read_json, read_json_object

MODULES_FILE = "modules.json"
_SETTINGS_FILE = "sentence_bert_config.json"
_PROMPTS_FILE = "config_sentence_transformers.json"
_POOLING_FOLDER = "1_Pooling"
_POOLING_SWITCHES = {"pooling_mode_mean_tokens": Pooling.MEAN, "pooling_mode_cls_token": Pooling.CLS}
_POOLING_MODES = {**_POOLING_SWITCHES, "mean": Pooling.MEAN, "cls": Pooling.CLS}
"""The supported pooling modes, keyed by their published names.

These include the names from version 5, which uses a single setting instead of one switch per mode.
"""


def transformer_folder(folder: Path) -> Path:
    """Return the folder that contains the Transformer: the folder itself or, in early versions, a subfolder."""
    return _module_path(folder, "Transformer") if (folder / MODULES_FILE).is_file() else folder


def read_sentence_embedding_and_remarks(folder: Path) -> tuple[SentenceEmbedding | None, list[str]]:
    """Read the sentence-embedding settings from a folder, and return them with notes for the user.

    The settings are `None` if the folder is not from sentence-transformers. Only the modules Transformer, Pooling and
    optionally Normalize are supported, in this order, because any other module would change the embeddings.
    """
    if not (folder / MODULES_FILE).is_file():
        return None, []
    kinds = [_module_kind(module) for module in _read_modules(folder)]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise WeightsError(
            f"{folder / MODULES_FILE}: the modules must be Transformer, Pooling and optionally Normalize, "
            f"got {', '.join(kinds)}"
        )
    settings = _read_optional_json(transformer_folder(folder) / _SETTINGS_FILE)
    if settings.get("do_lower_case"):
        raise WeightsError(f"{folder}: do_lower_case in {_SETTINGS_FILE} is not supported")
    pooling = _read_pooling_mode(_module_path(folder, "Pooling") / "config.json")
    # Version 6 stores the maximum length in the tokenizer config.
    tokenizer_settings = _read_optional_json(transformer_folder(folder) / CONFIG_FILE)
    max_tokens = settings.get("max_seq_length", tokenizer_settings.get("model_max_length"))
    try:
        embedding = SentenceEmbedding(pooling=pooling, normalize="Normalize" in kinds, max_tokens=max_tokens)
    except ConfigError:
        raise WeightsError(f"{folder}: max_seq_length must be a positive integer, got {max_tokens!r}") from None
    prompt = _read_optional_json(folder / _PROMPTS_FILE).get("default_prompt_name")
    remark = f"{_PROMPTS_FILE} defines the default prompt {prompt!r}, which is not added to texts"
    return embedding, [] if prompt is None else [remark]


def sentence_transformers_files(config: BERTConfig) -> dict[str, str]:
    """Return the contents of the files that turn a Hugging Face folder into a sentence-transformers folder.

    The result is keyed by file name and is empty if the config has no sentence embedding.
    """
    embedding = config.sentence_embedding
    if embedding is None:
        return {}
    paths = {
        "Transformer": "",
        "Pooling": _POOLING_FOLDER,
        **({"Normalize": "2_Normalize"} if embedding.normalize else {}),
    }
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(paths.items())
    ]
    switches = {key: mode is embedding.pooling for key, mode in _POOLING_SWITCHES.items()}
    pooling = {"word_embedding_dimension": config.d_model, **switches}
    settings = {"max_seq_length": embedding.max_tokens or config.context_length, "do_lower_case": False}
    files = {MODULES_FILE: modules, f"{_POOLING_FOLDER}/config.json": pooling, _SETTINGS_FILE: settings}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}


def _read_modules(folder: Path) -> list[dict[str, Any]]:
    modules = read_json(folder / MODULES_FILE)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise WeightsError(f"{folder / MODULES_FILE}: expected a list of modules with type and path")
    return modules


def _read_optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _module_kind(module: dict[str, Any]) -> str:
    return str(module.get("type")).rpartition(".")[2]


def _module_path(folder: Path, kind: str) -> Path:
    paths = [module.get("path") for module in _read_modules(folder) if _module_kind(module) == kind]
    if not paths or not isinstance(paths[0], str):
        raise WeightsError(f"{folder / MODULES_FILE}: does not contain the path of a {kind} module")
    if paths[0] and Path(paths[0]).name != paths[0]:
        raise WeightsError(f"{folder / MODULES_FILE}: {paths[0]!r} is outside the folder")
    return folder / paths[0]


def _read_pooling_mode(path: Path) -> Pooling:
    """Read the pooling mode, and raise an error if there are several.

    sentence-transformers would concatenate the results of several modes, which is not supported.
    """
    settings = read_json_object(path)
    mode = settings.get("pooling_mode")
    switches = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    modes = switches if mode is None else [str(mode)]
    if len(modes) != 1 or modes[0] not in _POOLING_MODES:
        raise WeightsError(
            f"{path}: the pooling mode must be one of {', '.join(_POOLING_MODES)}, got {', '.join(modes) or 'none'}"
        )
    return _POOLING_MODES[modes[0]]
