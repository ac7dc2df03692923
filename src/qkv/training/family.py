"""Interface of a model family for training: data preparation, corpus and objective."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from qkv.config import Recipe, TrainingConfig
from qkv.data.text_sources import ProgressCallback
from qkv.models import Model
from qkv.text import Tokenizer
from qkv.training.objectives import Objective, TrainingBatch

ProgressBars = Callable[[str], ProgressCallback]
"""`bars(label)` starts a new progress bar, replacing the previous one, and returns its update function."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Training batches by step, and validation batches, which are the same at every evaluation."""

    batch: Callable[[int], TrainingBatch]
    validation: Callable[[], Iterable[TrainingBatch]] | None = None


@runtime_checkable
class Corpus(Protocol):
    """Prepared data of a model family."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def summary(self) -> str:
        """Size of the corpus as text, for example `1,234 training tokens, 56 held-out tokens`."""
        ...

    @property
    def n_tokens(self) -> tuple[int, int]:
        """Number of training tokens and of held-out tokens."""
        ...

    def data(self, training: TrainingConfig) -> TrainingData: ...

    def generation_metrics(self, model: Model, training: TrainingConfig) -> Mapping[str, Any]:
        """Returns metrics of generated outputs, such as BLEU, for an evaluation. Empty for families that have none."""
        ...


@runtime_checkable
class Family(Protocol):
    """Training interface of a model family."""

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: ProgressBars) -> None:
        """Write tokenizer and stores to `folder`. Finished parts of an interrupted call are reused."""
        ...

    def open(self, recipe: Recipe, folder: Path) -> Corpus: ...

    def objective(self, model: Any, training: TrainingConfig) -> Objective:  # noqa: ANN401 - the model type depends on the family
        ...
