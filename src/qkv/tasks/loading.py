"""MODEL, as every command takes it: a shipped name, a run or model folder, a file, or a name on the hub."""

import re
from pathlib import Path
from typing import TypeVar

from qkv.choices import FloatKind
from qkv.config.base import nearest
from qkv.errors import InputError
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq
from qkv.nn import check_int8
from qkv.tasks.devices import find_dtype, place_of_int8, torch_device
from qkv.tasks.language_model import LanguageModel
from qkv.tasks.text_encoder import TextEncoder
from qkv.tasks.translator import Translator
from qkv.training.run import RunFolder
from qkv.weights.hub import download
from qkv.weights.int8 import in_int8
from qkv.weights.models import Loaded, load_model, needs_tokenizer
from qkv.weights.single_file import load_file_model
from qkv.zoo import shipped

Task = LanguageModel | TextEncoder | Translator
AnyTask = TypeVar("AnyTask", LanguageModel, TextEncoder, Translator)

_KINDS = {
    LanguageModel: "a language model (GPT)",
    TextEncoder: "a text encoder (BERT)",
    Translator: "a translator (encoder–decoder)",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(name: str | Path) -> Path:
    """Where MODEL lies: a folder with config.json and weights (of a run, its best checkpoint), or one file.

    A folder here with a shipped model's name is meant where it holds a model; else the shipped one is.
    """
    path = Path(name)
    zoo = shipped()
    if path.is_file():
        return path
    if path.is_dir() and (_holds_model(path) or str(name) not in zoo):
        return _model_in(path)
    if str(name) in zoo:
        return zoo[str(name)]
    if _HUB_NAME.fullmatch(str(name)):
        return download(str(name))
    hint = nearest(str(name), list(zoo))
    raise InputError(f"{path}: there is no such folder or file, nor a shipped model of that name{hint}")


def find_folder(name: str | Path) -> Path:
    """As `find_model`, for those who need a folder."""
    found = find_model(name)
    if found.is_file():
        raise InputError(f"{found}: is a file; a folder with config.json and model.safetensors is needed here")
    return found


def load_weights(name: str | Path) -> Loaded:
    found = find_model(name)
    return load_file_model(found) if found.is_file() else load_model(found)


def load(
    name: str | Path, *, int8: bool = False, device: str = "cpu", dtype: FloatKind | str = FloatKind.FLOAT32
) -> Task:
    """The model with its tokenizer, ready for its task: `qkv.load("stories").generate("Once upon a time")`.

    `int8`: it computes in 8-bit whole numbers, faster and a little less exactly; on x86 alone (`qkv.nn.int8`).
    `device`: `cpu`, `cuda`, or `auto`, a GPU where there is one. `dtype`: `bfloat16` for a GPU that shall be fast.
    """
    where = place_of_int8(device) if int8 else torch_device(device)
    numbers = find_dtype(dtype, where)
    if int8:
        check_int8()
    loaded = load_weights(name)
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
    dtype: FloatKind | str = FloatKind.FLOAT32,
) -> AnyTask:  # fmt: skip
    """As `load`, for those who need one kind of task alone."""
    task = load(name, int8=int8, device=device, dtype=dtype)
    if not isinstance(task, kind):
        raise InputError(
            f"{name}: is {_KINDS[type(task)]}; {_KINDS[kind]} is needed here (`qkv models` lists the shipped)"
        )
    return task


def _holds_model(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir() or (folder / "config.json").is_file()


def _model_in(folder: Path) -> Path:
    if (folder / "checkpoints").is_dir():
        return RunFolder(folder).best()
    if not _holds_model(folder):
        raise InputError(f"{folder}: holds no model (config.json) and no run (checkpoints/)")
    return folder
