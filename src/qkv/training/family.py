"""Training interface of a model family: data preparation, corpus and objective."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from qkv.config import Recipe, TrainingConfig
from qkv.data.documents import ProgressCallback
from qkv.models import Model
from qkv.text import Tokenizer
from qkv.training.objectives import Objective, TrainingBatch

ProgressBars = Callable[[str], ProgressCallback]
"""A function that starts a progress bar with the given label, replacing the previous one, and returns its update
function."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Training batches for each step, and validation batches that are the same in every evaluation."""

    batch: Callable[[int], TrainingBatch]
    validation: Callable[[], Iterable[TrainingBatch]] | None = None


@runtime_checkable
class Corpus(Protocol):
    """The prepared data of a model family."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def summary(self) -> str:
        """Description of the corpus size, such as `1,234 training tokens, 56 held-out tokens`."""
        ...

    @property
    def n_tokens(self) -> tuple[int, int]:
        """Number of training tokens and number of held-out tokens."""
        ...

    def data(self, training: TrainingConfig) -> TrainingData: ...

    def generation_metrics(self, model: Model, training: TrainingConfig) -> Mapping[str, Any]:
        """Compute metrics such as BLEU on generated outputs.

        The result is empty for families that have no such metrics.
        """
        ...


@runtime_checkable
class Family(Protocol):
    """The training interface of a model family."""

    def prepare(self, recipe: Recipe, folder: Path, data_folder: Path, *, progress: ProgressBars) -> None:
        """Write the tokenizer and the stores to `folder`.

        If an earlier call was interrupted, its finished parts are reused.
        """
        ...

    def open(self, recipe: Recipe, folder: Path) -> Corpus: ...

    def objective(self, model: Any, training: TrainingConfig) -> Objective:  # noqa: ANN401 - the model type depends on the family
        ...
