"""MODEL, as every command takes it: a shipped name, a run or model folder, a file, or a name on the hub."""

import re
from pathlib import Path
from typing import TypeVar

from qkv.choices import DType
from qkv.config.base import suggest_closest
from qkv.errors import InputError
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import check_int8
from qkv.tasks.devices import resolve_dtype, resolve_int8_device, resolve_device
from qkv.tasks.language_model import LanguageModel
from qkv.tasks.text_encoder import TextEncoder
from qkv.tasks.translator import Translator
from qkv.training.run_folder import RunFolder
from qkv.weights.hub import download
from qkv.weights.int8 import in_int8
from qkv.weights.models import Loaded, load_model, needs_tokenizer
from qkv.weights.single_file import load_file_model
from qkv.zoo import shipped

Task = LanguageModel | TextEncoder | Translator
AnyTask = TypeVar("AnyTask", LanguageModel, TextEncoder, Translator)

_TASK_DESCRIPTIONS = {
    LanguageModel: "a language model (GPT)",
    TextEncoder: "a text encoder (BERT)",
    Translator: "a translator (encoder–decoder)",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model_path(name: str | Path) -> Path:
    """Where MODEL lies: a folder with config.json and weights (of a run, its best checkpoint), or one file.

    A folder here with a shipped model's name is meant where it holds a model; else the shipped one is.
    """
    path = Path(name)
    zoo = shipped()
    if path.is_file():
        return path
    if path.is_dir() and (_is_model_folder(path) or str(name) not in zoo):
        return _model_folder_in(path)
    if str(name) in zoo:
        return zoo[str(name)]
    if _HUB_NAME.fullmatch(str(name)):
        return download(str(name))
    hint = suggest_closest(str(name), list(zoo))
    raise InputError(f"{path}: there is no such folder or file, nor a shipped model of that name{hint}")


def resolve_model_folder(name: str | Path) -> Path:
    """As `find_model`, for those who need a folder."""
    found = resolve_model_path(name)
    if found.is_file():
        raise InputError(f"{found}: is a file; a folder with config.json and model.safetensors is needed here")
    return found


def load_pretrained(name: str | Path) -> Loaded:
    found = resolve_model_path(name)
    return load_file_model(found) if found.is_file() else load_model(found)


def load(
    name: str | Path, *, int8: bool = False, device: str = "cpu", dtype: DType | str = DType.FLOAT32
) -> Task:
    """The model with its tokenizer, ready for its task: `qkv.load("stories").generate("Once upon a time")`.

    `int8`: it computes in 8-bit whole numbers, faster and a little less exactly; on x86 alone (`qkv.nn.int8`).
    `device`: `cpu`, `cuda`, or `auto`, a GPU where there is one. `dtype`: `bfloat16` for a GPU that shall be fast.
    """
    where = resolve_int8_device(device) if int8 else resolve_device(device)
    numbers = resolve_dtype(dtype, where)
    if int8:
        check_int8()
    loaded = load_pretrained(name)
    if int8:
        in_int8(loaded.model)
    loaded.model.to(where, numbers)
    tokenizer = needs_tokenizer(loaded, Path(name))
    match loaded.model:
        case GPT():
            return LanguageModel(loaded.model, tokenizer, name=str(name), remarks=loaded.remarks)
        case BERT():
            return TextEncoder(loaded.model, tokenizer, name=str(name), remarks=loaded.remarks)
        case Seq2Seq() | RNNSeq2Seq():
            return Translator(
                loaded.model, tokenizer, source=loaded.source_tokenizer, name=str(name), decoding=loaded.decoding
            )


def load_as(
    kind: type[AnyTask], name: str | Path, *, int8: bool = False, device: str = "cpu",
    dtype: DType | str = DType.FLOAT32,
) -> AnyTask:  # fmt: skip
    """As `load`, for those who need one kind of task alone."""
    task = load(name, int8=int8, device=device, dtype=dtype)
    if not isinstance(task, kind):
        raise InputError(
            f"{name}: is {_TASK_DESCRIPTIONS[type(task)]}; {_TASK_DESCRIPTIONS[kind]} is needed here (`qkv models` lists the shipped)"
        )
    return task


def _is_model_folder(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir() or (folder / "config.json").is_file()


def _model_folder_in(folder: Path) -> Path:
    if (folder / "checkpoints").is_dir():
        return RunFolder(folder).best_checkpoint()
    if not _is_model_folder(folder):
        raise InputError(f"{folder}: holds no model (config.json) and no run (checkpoints/)")
    return folder
