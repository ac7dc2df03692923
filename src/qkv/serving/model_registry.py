"""Which models are open: shipped ones, those that were given, and the checkpoints of runs."""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from qkv.config import ModelConfig, config_from_dict
from qkv.errors import QKVError
from qkv.serving.responses import RefusedError
from qkv.serving.model_summary import described
from qkv.serving.locks import Turn
from qkv.tasks import Task, Translator, load
from qkv.training.run_folder import RunFolder
from qkv.weights.folder import read_settings
from qkv.zoo import shipped

MOST_LOADED = 8
"""Models whose weights are held at once, but for those that came from memory."""
_CHECKPOINT = re.compile(r"(.+)@(\d+)")


@dataclass(eq=False)
class Open:
    """One model on the shelf."""

    id: str
    source: str
    """`shipped`, `given`, `memory`, or `checkpoint` of a run that was given."""
    place: Path | None = None
    task: Task | None = None
    config: ModelConfig | None = None
    lock: Turn = field(default_factory=Turn)
    """Taken for every pass: interventions change the model itself while they last."""

    @property
    def run(self) -> RunFolder | None:
        """Where the model is a run's folder."""
        is_run = self.place is not None and (self.place / "checkpoints").is_dir()
        return RunFolder(self.place) if is_run and self.place is not None else None


class ModelRegistry:
    """Models by id. Weights are read when first needed, and the least recently used are let go."""

    def __init__(
        self, given: Sequence[str | Path] = (), *, memory: Mapping[str, Task] | None = None, zoo: bool = True
    ) -> None:
        self._lock = Lock()
        self._open: dict[str, Open] = {}
        self._loaded: OrderedDict[str, Open] = OrderedDict()
        for name, task in (memory or {}).items():
            self._open[name] = Open(name, "memory", task=task, config=task.model.config)
        for path in given:
            self.add(str(path))
        for name, folder in (shipped() if zoo else {}).items():
            self._open.setdefault(name, Open(name, "shipped", folder))

    def add(self, name: str) -> Open:
        """A shipped name, a run or model folder, or a file; never a name on the hub: nothing is fetched."""
        path, zoo = Path(name), shipped()
        try:
            is_there = bool(name) and path.exists()
        except OSError:
            is_there = False  # longer than a path can be
        if not is_there and name in zoo:
            one = Open(name, "shipped", zoo[name])
        elif is_there:
            one = Open(name, "given", path)
        else:
            raise RefusedError(404, f"{name}: there is no such folder or file, nor a shipped model of that name")
        with self._lock:
            return self._open.setdefault(name, one)

    @property
    def given(self) -> Sequence[Open]:
        """Those that were named by the user."""
        return [one for one in self._open.values() if one.source == "given"]

    def listed(self) -> dict[str, Any]:
        """Every model, as the page shows it; one that cannot be read says why."""
        with self._lock:
            known = list(self._open.values())
        listed = [one for one in known if one.source != "checkpoint"]
        return {"models": [self.describe(one) for one in listed], "first": listed[0].id if listed else None}

    def describe(self, one: Open) -> dict[str, Any]:
        try:
            return described(one, self.config(one), count=lambda text: _n_tokens(self.task(one), text))
        except QKVError as error:
            return {"id": one.id, "name": one.id, "source": one.source, "error": str(error)}

    def find(self, name: str) -> Open:
        with self._lock:
            if name in self._open:
                return self._open[name]
        match = _CHECKPOINT.fullmatch(name)
        parent = self._open.get(match[1]) if match else None
        if match and parent is not None and parent.run is not None:
            step = int(match[2])
            if step not in parent.run.checkpoint_steps():
                raise RefusedError(404, f"{name}: the run has no checkpoint of step {step}")
            with self._lock:
                return self._open.setdefault(name, Open(name, "checkpoint", parent.run.checkpoint_folder(step)))
        raise RefusedError(404, f"no model is open by the name {name!r}")

    def task(self, one: Open) -> Task:
        """Its model with its tokenizer, read from disk where it must be."""
        if one.place is not None and not one.place.exists():
            raise RefusedError(410, f"the model {one.id} was removed while it was open: {one.place} is no longer there")
        if one.source == "memory":
            assert one.task is not None
            return one.task
        with one.lock:
            if one.task is None:
                assert one.place is not None
                one.task = load(one.place)
            task = one.task
        with self._lock:
            self._loaded[one.id] = one
            self._loaded.move_to_end(one.id)
            while len(self._loaded) > MOST_LOADED:
                self._loaded.popitem(last=False)[1].task = None
        return task

    def config(self, one: Open) -> ModelConfig:
        """Read without weights where the folder is ours."""
        if one.config is None:
            assert one.place is not None
            folder = one.place
            if one.run is not None and one.run.checkpoint_steps():
                folder = one.run.checkpoint_folder(one.run.checkpoint_steps()[-1])
            is_ours = (folder / "config.json").is_file() and "family" in read_settings(folder / "config.json")
            one.config = (
                config_from_dict(read_settings(folder / "config.json")) if is_ours else self.task(one).model.config
            )
        return one.config


def _n_tokens(task: Task, text: str) -> int:
    """How many tokens the model would read; of a translator, of the source."""
    tokenizer = task.source_tokenizer if isinstance(task, Translator) else task.tokenizer
    return len(tokenizer.encode(text, parse_special_tokens=not isinstance(task, Translator)))
