"""Find the shipped models, and read their model cards.

Each subfolder contains the weights, tokenizer, config and model card (`card.md`) of one model. A model card starts with
metadata: `key: value` lines between two `---` lines. `qkv models` prints this metadata. This module does not import
torch, so `qkv models` starts quickly.
"""

from dataclasses import dataclass
from pathlib import Path

from qkv.errors import InputError

ZOO_FOLDER = Path(__file__).parent
CARD_FILE = "card.md"


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The metadata of a shipped model."""

    name: str
    folder: Path
    task: str
    summary: str
    parameters: int
    license: str
    scores: dict[str, float]

    @property
    def n_bytes(self) -> int:
        """The total size of the files in the model folder, in bytes."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


def shipped_model_folders(zoo: Path = ZOO_FOLDER) -> dict[str, Path]:
    """Return the folders of the shipped models, keyed by model name."""
    return {card.parent.name: card.parent for card in sorted(zoo.glob(f"*/{CARD_FILE}"))}


def read_model_card(folder: Path) -> ModelCard:
    """Read the metadata at the start of a model card. Each `score NAME: VALUE` line contains a held-out score."""
    lines = (folder / CARD_FILE).read_text(encoding="utf-8").split("\n")
    if lines[0] != "---" or "---" not in lines[1:]:
        raise InputError(f"{folder / CARD_FILE}: expected metadata between two --- lines at the start of the file")
    pairs = [line.partition(": ") for line in lines[1 : lines.index("---", 1)]]
    metadata = {key.strip(): value.strip() for key, _, value in pairs}
    scores = {key.removeprefix("score "): value for key, value in metadata.items() if key.startswith("score ")}
    try:
        return ModelCard(
            name=folder.name,
            folder=folder,
            task=metadata["task"],
            summary=metadata["summary"],
            parameters=int(metadata["parameters"]),
            license=metadata["license"],
            scores={name: float(value) for name, value in scores.items()},
        )
    except KeyError as error:
        raise InputError(f"{folder / CARD_FILE}: metadata key '{error.args[0]}' is missing") from None
    except ValueError as error:
        raise InputError(f"{folder / CARD_FILE}: {error}") from None
