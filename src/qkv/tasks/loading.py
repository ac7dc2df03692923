"""MODEL, as every command takes it: a run folder, a checkpoint, or a Hugging Face folder."""

from pathlib import Path

from qkv.errors import InputError
from qkv.models import GPT
from qkv.tasks.language_model import LanguageModel
from qkv.training.run import RunFolder
from qkv.weights.models import Loaded, load_model, needs_tokenizer


def find_folder(name: str | Path) -> Path:
    """The folder that holds config.json and weights: of a run, its best checkpoint, else its last."""
    path = Path(name)
    if not path.exists():
        raise InputError(f"{path}: there is no such model folder")
    if not path.is_dir():
        raise InputError(f"{path}: is a file; a model is a folder with config.json and model.safetensors")
    if (path / "checkpoints").is_dir():
        return RunFolder(path).best()
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: holds no model (config.json) and no run (checkpoints/)")
    return path


def load_weights(name: str | Path) -> Loaded:
    return load_model(find_folder(name))


def load(name: str | Path) -> LanguageModel:
    """The model with its tokenizer, ready for its task: `qkv.load("run").generate("Once upon a time")`."""
    folder = find_folder(name)
    loaded = load_model(folder)
    tokenizer = needs_tokenizer(loaded, folder)
    match loaded.model:
        case GPT():
            return LanguageModel(loaded.model, tokenizer)
        case other:
            raise InputError(f"{folder}: a {type(other).__name__} has no task yet; load its weights with qkv.models")
