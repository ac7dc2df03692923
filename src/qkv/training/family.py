"""What training needs to know of a family: how its data are made ready, and what it learns from them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from qkv.config import Recipe, TrainingConfig
from qkv.data.sources import Progress
from qkv.models import Model
from qkv.text import Tokenizer
from qkv.training.objectives import Objective, TrainingBatch

Bars = Callable[[str], Progress]
"""`bars(label)` gives a bar to move, and takes the one before away."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Batch t for every t, and the validation batches, always the same."""

    batch: Callable[[int], TrainingBatch]
    validation: Callable[[], Iterable[TrainingBatch]] | None = None


@runtime_checkable
class Corpus(Protocol):
    """A family's data, ready on disk."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def summary(self) -> str:
        """How much there is: `1,234 tokens to train on, 56 held out`."""
        ...

    @property
    def n_tokens(self) -> tuple[int, int]:
        """To train on, and held out."""
        ...

    def data(self, training: TrainingConfig) -> TrainingData: ...

    def examine(self, model: Model, training: TrainingConfig) -> Mapping[str, Any]:
        """What an evaluation logs besides loss and measures: scores of whole outputs, samples. {}: nothing."""
        ...


@runtime_checkable
class Family(Protocol):
    """One family's way through a run."""

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: Bars) -> None:
        """Make tokenizer and stores in `folder`; what a killed call finished is kept."""
        ...

    def open(self, recipe: Recipe, folder: Path) -> Corpus: ...

    def objective(self, model: Any, training: TrainingConfig) -> Objective:  # noqa: ANN401 - each family its own model
        ...
