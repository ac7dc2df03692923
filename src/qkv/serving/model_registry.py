"""Registry of the models that the explorer can open: shipped models, user models and checkpoints of training runs."""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from qkv.config import ModelConfig, config_from_dict
from qkv.errors import QKVError
from qkv.serving.locks import CancellableRLock
from qkv.serving.model_summary import summarize_model
from qkv.serving.responses import RequestError
from qkv.tasks import Task, Translator, load
from qkv.training.checkpoint import RunFolder
from qkv.weights.checkpoint_folder import read_json_object
from qkv.zoo import shipped_model_folders

MAX_LOADED_MODELS = 8
"""Maximum number of models whose weights stay in memory. Models passed in from Python do not count."""
_CHECKPOINT_ID = re.compile(r"(.+)@(\d+)")


@dataclass(eq=False)
class RegisteredModel:
    """A registered model, whose config and weights are loaded on first use."""

    id: str
    source: str
    """Origin of the model: `shipped`, `user`, `memory`, or `checkpoint` (of a run folder that the user opened)."""
    path: Path | None = None
    task: Task | None = None
    config: ModelConfig | None = None
    lock: CancellableRLock = field(default_factory=CancellableRLock)
    """Lock held during every forward pass because interventions temporarily modify the model."""

    @property
    def run(self) -> RunFolder | None:
        """The run folder of the model, or `None` if the model is not a training run."""
        is_run = self.path is not None and (self.path / "checkpoints").is_dir()
        return RunFolder(self.path) if is_run and self.path is not None else None


class ModelRegistry:
    """A registry of models, keyed by id.

    Weights are loaded on first use. When too many models are loaded, the weights of the least recently used models are
    released.
    """

    def __init__(
        self, paths: Sequence[str | Path] = (), *, memory: Mapping[str, Task] | None = None, zoo: bool = True
    ) -> None:
        self._lock = Lock()
        self._models: dict[str, RegisteredModel] = {}
        self._with_weights: OrderedDict[str, RegisteredModel] = OrderedDict()
        for name, task in (memory or {}).items():
            self._models[name] = RegisteredModel(name, "memory", task=task, config=task.model.config)
        for path in paths:
            self.add(str(path))
        for name, folder in (shipped_model_folders() if zoo else {}).items():
            self._models.setdefault(name, RegisteredModel(name, "shipped", folder))

    def add(self, path_or_shipped_name: str) -> RegisteredModel:
        """Register a shipped model, run folder, model folder or model file.

        Hugging Face Hub names are not accepted because the explorer does not download models.
        """
        path, zoo = Path(path_or_shipped_name), shipped_model_folders()
        try:
            exists = bool(path_or_shipped_name) and path.exists()
        except OSError:
            exists = False  # the name is too long to be a path
        if not exists and path_or_shipped_name in zoo:
            loaded = RegisteredModel(path_or_shipped_name, "shipped", zoo[path_or_shipped_name])
        elif exists:
            loaded = RegisteredModel(path_or_shipped_name, "user", path)
        else:
            raise RequestError(404, f"{path_or_shipped_name}: must be a folder, a file or the name of a shipped model")
        with self._lock:
            return self._models.setdefault(path_or_shipped_name, loaded)

    @property
    def user_models(self) -> Sequence[RegisteredModel]:
        return [loaded for loaded in self._models.values() if loaded.source == "user"]

    def list_models(self) -> dict[str, Any]:
        """Return the summaries of all models. The summary of an unreadable model contains the error."""
        with self._lock:
            registered = list(self._models.values())
        listed = [loaded for loaded in registered if loaded.source != "checkpoint"]
        return {
            "models": [self.summarize_or_error(loaded) for loaded in listed],
            "default_model": listed[0].id if listed else None,
        }

    def summarize_or_error(self, loaded: RegisteredModel) -> dict[str, Any]:
        try:
            return summarize_model(
                loaded,
                self.get_or_load_config(loaded),
                count_tokens=lambda text: _count_input_tokens(self.get_or_load_task(loaded), text),
            )
        except QKVError as error:
            return {"id": loaded.id, "name": loaded.id, "source": loaded.source, "error": str(error)}

    def find_or_register_checkpoint(self, model_id: str) -> RegisteredModel:
        """Return the model with the given id, which is `RUN@STEP` for a checkpoint."""
        with self._lock:
            if model_id in self._models:
                return self._models[model_id]
        match = _CHECKPOINT_ID.fullmatch(model_id)
        parent = self._models.get(match[1]) if match else None
        if match and parent is not None and parent.run is not None:
            step = int(match[2])
            if step not in parent.run.checkpoint_steps():
                raise RequestError(404, f"{model_id}: the run has no checkpoint of step {step}")
            checkpoint = RegisteredModel(model_id, "checkpoint", parent.run.checkpoint_folder(step))
            with self._lock:
                return self._models.setdefault(model_id, checkpoint)
        raise RequestError(404, f"{model_id!r} is not the name of an open model")

    def get_or_load_task(self, loaded: RegisteredModel) -> Task:
        """Return a task that contains the model and its tokenizer, and load both if necessary."""
        if loaded.path is not None and not loaded.path.exists():
            raise RequestError(410, f"{loaded.id}: the model was deleted; {loaded.path} no longer exists")
        if loaded.source == "memory":
            assert loaded.task is not None
            return loaded.task
        with loaded.lock:
            if loaded.task is None:
                assert loaded.path is not None
                loaded.task = load(loaded.path)
            task = loaded.task
        with self._lock:
            self._with_weights[loaded.id] = loaded
            self._with_weights.move_to_end(loaded.id)
            while len(self._with_weights) > MAX_LOADED_MODELS:
                self._with_weights.popitem(last=False)[1].task = None
        return task

    def get_or_load_config(self, loaded: RegisteredModel) -> ModelConfig:
        """Return the model's config, without loading the weights if the folder is in qkv's own format."""
        if loaded.config is None:
            assert loaded.path is not None
            folder = loaded.path
            if loaded.run is not None and loaded.run.checkpoint_steps():
                folder = loaded.run.checkpoint_folder(loaded.run.checkpoint_steps()[-1])
            is_native = (folder / "config.json").is_file() and "family" in read_json_object(folder / "config.json")
            loaded.config = (
                config_from_dict(read_json_object(folder / "config.json"))
                if is_native
                else self.get_or_load_task(loaded).model.config
            )
        return loaded.config


def _count_input_tokens(task: Task, text: str) -> int:
    tokenizer = task.source_tokenizer if isinstance(task, Translator) else task.tokenizer
    return len(tokenizer.encode(text, parse_special_tokens=not isinstance(task, Translator)))
