"""What a sentence-transformers folder says beside its model: how the states become one vector."""

import json
from pathlib import Path
from typing import Any

from qkv.choices import Pooling
from qkv.config import BERTConfig, SentenceEmbedding
from qkv.errors import ConfigError, WeightsError
from qkv.text.files import CONFIG_FILE
from qkv.weights.folder import read_json, read_settings

MODULES = "modules.json"
_SETTINGS = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_POOLING = "1_Pooling"
_KEYS = {"pooling_mode_mean_tokens": Pooling.MEAN, "pooling_mode_cls_token": Pooling.CLS}
_MODES = {**_KEYS, "mean": Pooling.MEAN, "cls": Pooling.CLS}
"""The second two: version 5 has one word where earlier ones have a switch for each."""


def model_folder(folder: Path) -> Path:
    """Where the Transformer itself lies: here, or one folder down, as in the first versions."""
    return _path_of(folder, "Transformer") if (folder / MODULES).is_file() else folder


def read_sentence_embedding(folder: Path) -> tuple[SentenceEmbedding | None, list[str]]:
    """None where the folder is not of this kind; and remarks.

    Transformer, Pooling and perhaps Normalize, in this order: any other module would change the vectors.
    """
    if not (folder / MODULES).is_file():
        return None, []
    kinds = [_kind(module) for module in _modules(folder)]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise WeightsError(
            f"{folder / MODULES}: the modules are {', '.join(kinds)}; supported: Transformer, Pooling, Normalize"
        )
    settings = _if_there(model_folder(folder) / _SETTINGS)
    if settings.get("do_lower_case"):
        raise WeightsError(f"{folder}: {_SETTINGS} says do_lower_case, which is not supported")
    pooling = _pooling(_path_of(folder, "Pooling") / "config.json")
    # Version 6 leaves the longest text to the tokenizer.
    longest = settings.get("max_seq_length", _if_there(model_folder(folder) / CONFIG_FILE).get("model_max_length"))
    try:
        embedding = SentenceEmbedding(pooling=pooling, normalise="Normalize" in kinds, max_tokens=longest)
    except ConfigError:
        raise WeightsError(f"{folder}: the longest text is {longest!r}, not a number of tokens") from None
    prompt = _if_there(folder / _PROMPTS).get("default_prompt_name")
    remark = f"{_PROMPTS} has a default prompt, {prompt!r}; it is not put before your texts"
    return embedding, [] if prompt is None else [remark]


def sentence_files(config: BERTConfig) -> dict[str, str]:
    """The files that make a Hugging Face folder one of sentence-transformers', by name; none without the setting."""
    embedding = config.sentence_embedding
    if embedding is None:
        return {}
    kinds = {"Transformer": "", "Pooling": _POOLING, **({"Normalize": "2_Normalize"} if embedding.normalise else {})}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": config.d_model, **{k: m is embedding.pooling for k, m in _KEYS.items()}}
    longest = {"max_seq_length": embedding.max_tokens or config.context_length, "do_lower_case": False}
    files = {MODULES: modules, f"{_POOLING}/config.json": pooling, _SETTINGS: longest}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = read_json(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise WeightsError(f"{folder / MODULES}: must be a list of modules, each with type and path")
    return modules


def _if_there(path: Path) -> dict[str, Any]:
    return read_settings(path) if path.is_file() else {}


def _kind(module: dict[str, Any]) -> str:
    return str(module.get("type")).rpartition(".")[2]


def _path_of(folder: Path, kind: str) -> Path:
    paths = [module.get("path") for module in _modules(folder) if _kind(module) == kind]
    if not paths or not isinstance(paths[0], str):
        raise WeightsError(f"{folder / MODULES}: names no path of a {kind}")
    if paths[0] and Path(paths[0]).name != paths[0]:
        raise WeightsError(f"{folder / MODULES}: {paths[0]!r} points outside the folder")
    return folder / paths[0]


def _pooling(path: Path) -> Pooling:
    """One way of pooling; several would be laid side by side, in a wider vector."""
    settings = read_settings(path)
    newer = settings.get("pooling_mode")
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    chosen = chosen if newer is None else [str(newer)]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise WeightsError(f"{path}: pools by {', '.join(chosen) or 'nothing'}; supported: one of {', '.join(_MODES)}")
    return _MODES[chosen[0]]
