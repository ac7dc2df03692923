"""Load models by the name of a shipped model, a run or model folder, a file, or a name on the Hugging Face Hub."""

import re
from pathlib import Path
from typing import TypeVar

import torch

from qkv.choices import BackendName, InferenceDType
from qkv.config.base import did_you_mean_suffix
from qkv.engines import check_int8_supported, quantize_linears_to_int8, select_backend
from qkv.errors import InputError
from qkv.models import BERT, GPT, RNNSeq2Seq, Seq2Seq
from qkv.tasks.language_model import LanguageModel
from qkv.tasks.text_encoder import TextEncoder
from qkv.tasks.translator import Translator
from qkv.utils import resolve_device
from qkv.weights.model_loader import ModelBundle, load_model, require_tokenizer
from qkv.zoo import shipped_model_folders


def require_cpu_for_int8(name: str) -> torch.device:
    """Return the CPU device for `cpu` or `auto`, and raise an error for any other name.

    Int8 models only run on a CPU because they use FBGEMM.
    """
    if name == "cuda":
        raise InputError("--int8 (int8=True) requires a CPU and cannot be combined with --device cuda")
    return resolve_device("cpu" if name == "auto" else name)


def resolve_dtype(name: InferenceDType | str, device: torch.device) -> torch.dtype:
    """Return the torch dtype with a given name, and raise an error if it is not supported on the device.

    bfloat16 requires a GPU because CPUs without AMX are up to 60 times slower with bfloat16.
    """
    if name not in list(InferenceDType):
        raise InputError(f"--dtype {name}: must be one of {', '.join(InferenceDType)}")
    if name == InferenceDType.BFLOAT16 and device.type == "cpu":
        raise InputError("--dtype bfloat16 requires a GPU; on a CPU, bfloat16 is slower and less accurate than float32")
    return torch.bfloat16 if name == InferenceDType.BFLOAT16 else torch.float32


Task = LanguageModel | TextEncoder | Translator
AnyTask = TypeVar("AnyTask", LanguageModel, TextEncoder, Translator)

_TASK_DESCRIPTIONS = {
    LanguageModel: "a language model (GPT)",
    TextEncoder: "a text encoder (BERT)",
    Translator: "a translation model (encoder–decoder)",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate_or_download_checkpoint(name: str | Path) -> Path:
    """Return the path of a model file, or of the folder that contains a model's config.json and weights.

    For a run, this is the folder of the best checkpoint. A local folder that contains a model takes precedence over a
    shipped model with the same name.
    """
    path = Path(name)
    shipped_models = shipped_model_folders()
    if path.is_file():
        return path
    if path.is_dir() and (_is_model_folder(path) or str(name) not in shipped_models):
        return _resolve_model_or_run_folder(path)
    if str(name) in shipped_models:
        return shipped_models[str(name)]
    if _HUB_NAME.fullmatch(str(name)):
        from qkv.weights.hub import download_safetensors_snapshot

        return download_safetensors_snapshot(str(name))
    hint = did_you_mean_suffix(str(name), list(shipped_models))
    raise InputError(f"{path}: not a folder, file or shipped model{hint}")


def resolve_or_download_model_folder(name: str | Path) -> Path:
    """Return the model folder like `locate_or_download_checkpoint`, but raise an error for a single file."""
    path = locate_or_download_checkpoint(name)
    if path.is_file():
        raise InputError(f"{path}: expected a folder with config.json and model.safetensors, got a file")
    return path


def load_pretrained(name: str | Path) -> ModelBundle:
    path = locate_or_download_checkpoint(name)
    if path.is_file():
        from qkv.weights.single_file import load_gguf_or_llama2c

        return load_gguf_or_llama2c(path)
    return load_model(path)


def load(
    name: str | Path,
    *,
    int8: bool = False,
    device: str = "cpu",
    dtype: InferenceDType | str = InferenceDType.FLOAT32,
    backend: BackendName | str = BackendName.AUTO,
) -> Task:
    """Load a model with its tokenizer as a task: `qkv.load("stories").generate("Once upon a time")`.

    `int8` quantizes the model for faster but slightly less accurate inference on x86 CPUs. `device` is `cpu`, `cuda` or
    `auto` (a GPU if available). `dtype="bfloat16"` speeds up inference on a GPU. `backend` is `auto`, `eager`, `cpu` or
    `cuda` (see `qkv.engines`).
    """
    torch_device = require_cpu_for_int8(device) if int8 else resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    if int8:
        check_int8_supported()
    loaded = load_pretrained(name)
    if int8:
        quantize_linears_to_int8(loaded.model)
    loaded.model.to(torch_device, torch_dtype)
    with torch.inference_mode():
        select_backend(loaded.model, backend)  # raises an error if the backend does not support the model
    tokenizer = require_tokenizer(loaded, Path(name))
    match loaded.model:
        case GPT():
            return LanguageModel(loaded.model, tokenizer, name=str(name), remarks=loaded.remarks, backend=backend)
        case BERT():
            return TextEncoder(loaded.model, tokenizer, name=str(name), remarks=loaded.remarks, backend=backend)
        case Seq2Seq() | RNNSeq2Seq():
            return Translator(
                loaded.model,
                tokenizer,
                source=loaded.source_tokenizer,
                name=str(name),
                generation_config=loaded.generation_config,
                backend=backend,
            )


def load_as(
    task_type: type[AnyTask],
    name: str | Path,
    *,
    int8: bool = False,
    device: str = "cpu",
    dtype: InferenceDType | str = InferenceDType.FLOAT32,
    backend: BackendName | str = BackendName.AUTO,
) -> AnyTask:
    """Load a model as a task of the given type, or raise an error if the model requires a different task."""
    task = load(name, int8=int8, device=device, dtype=dtype, backend=backend)
    if not isinstance(task, task_type):
        raise InputError(
            f"{name}: expected {_TASK_DESCRIPTIONS[task_type]}, got {_TASK_DESCRIPTIONS[type(task)]}; "
            "run `qkv models` to list the shipped models"
        )
    return task


def _is_model_folder(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir() or (folder / "config.json").is_file()


def _resolve_model_or_run_folder(folder: Path) -> Path:
    if (folder / "checkpoints").is_dir():
        from qkv.training.checkpoint import RunFolder

        return RunFolder(folder).best_or_latest_checkpoint()
    if not _is_model_folder(folder):
        raise InputError(f"{folder}: contains neither a model (config.json) nor a run (checkpoints/)")
    return folder
