"""Which models are shipped: each folder beside this file is one, with weights, tokenizer, config and card.

The card (`card.md`) opens with lines `key: value` between two lines `---`, as model cards do; what they say is
what `qkv models` shows. No torch here: the list must come at once.
"""

from dataclasses import dataclass
from pathlib import Path

from qkv.errors import InputError

HERE = Path(__file__).parent
CARD = "card.md"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a shipped model says of itself."""

    name: str
    folder: Path
    task: str
    summary: str
    parameters: int
    license: str
    scores: dict[str, float]

    @property
    def n_bytes(self) -> int:
        """Of the whole folder on disk."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


def shipped(zoo: Path = HERE) -> dict[str, Path]:
    """Every shipped model's folder by its name."""
    return {card.parent.name: card.parent for card in sorted(zoo.glob(f"*/{CARD}"))}


def read_card(folder: Path) -> Card:
    """The lines at the head of the card; `score …: number` lines are its held-out scores."""
    lines = (folder / CARD).read_text(encoding="utf-8").split("\n")
    if lines[0] != "---" or "---" not in lines[1:]:
        raise InputError(f"{folder / CARD}: does not open with lines between two lines ---")
    pairs = [line.partition(": ") for line in lines[1 : lines.index("---", 1)]]
    said = {key.strip(): value.strip() for key, _, value in pairs}
    scores = {key.removeprefix("score "): value for key, value in said.items() if key.startswith("score ")}
    try:
        return Card(
            name=folder.name,
            folder=folder,
            task=said["task"],
            summary=said["summary"],
            parameters=int(said["parameters"]),
            license=said["license"],
            scores={name: float(value) for name, value in scores.items()},
        )
    except KeyError as error:
        raise InputError(f"{folder / CARD}: has no line '{error.args[0]}: …' at its head") from None
    except ValueError as error:
        raise InputError(f"{folder / CARD}: {error}") from None
