"""What may be asked: every request's fields, checked where they enter."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qkv.choices import AttentionKernel, AttentionKind
from qkv.config import Config, SamplingConfig
from qkv.cost import Mode, Precision
from qkv.errors import ConfigError

Place = Annotated[int, Field(strict=True, ge=0)]
Some = Annotated[int, Field(strict=True, ge=1, le=100)]
Yes = Annotated[bool, Field(strict=True)]


class HeadAsked(Config):
    kind: Literal["head"]
    stack: AttentionKind
    layer: Place
    head: Place


class EdgeAsked(Config):
    kind: Literal["edge"]
    stack: AttentionKind
    query: Place
    key: Place
    layer: Place | None = None
    head: Place | None = None


class PatchAsked(Config):
    kind: Literal["patch"]
    tap: str
    text: str
    second: str | None = None
    positions: tuple[Place, ...] | None = None


Asked = Annotated[HeadAsked | EdgeAsked | PatchAsked, Field(discriminator="kind")]
Interventions = Annotated[tuple[Asked, ...], Field(max_length=256)]


class AddModel(Config):
    path: str


class OfModel(Config):
    model: str


class AskRun(Config):
    model: str
    text: str
    second: str | None = None
    interventions: Interventions = ()


class OfRun(Config):
    run: str


class OfStack(OfRun):
    stack: AttentionKind | None = None


class OfLayer(OfStack):
    layer: Place


class AskTile(OfLayer):
    head: Place
    rows: tuple[Place, Place]
    columns: tuple[Place, Place]


class AskRow(OfLayer):
    query: Place


class AskNeuron(AskRow):
    head: Place


class MapSettings(Config):
    stack: AttentionKind | None = None
    of: Literal["weights", "value-weighted", "rollout"] = "weights"
    layer: Place | None = None
    head: Place | None = None
    words: Yes = False
    sink: Yes = True


class AskMap(MapSettings):
    run: str


class AskCompare(MapSettings):
    left: str
    right: str


class AskGuesses(OfRun):
    n: Some = 5


class AskContributions(OfRun):
    position: Place
    token_id: Place
    against: Place | None = None


class AskIt(Config):
    model: str
    text: str
    pronoun: str
    candidates: tuple[str, ...]


class AskPositions(Config):
    model: str
    n: Annotated[int, Field(strict=True, ge=1, le=512)]


class AskTimeline(Config):
    model: str
    text: str
    second: str | None = None
    stack: AttentionKind | None = None


class AskGenerate(Config):
    model: str
    text: str | None = None
    ids: tuple[Place, ...] | None = None
    max_new: Annotated[int, Field(strict=True, ge=1, le=4096)] = 40
    cache: Yes = True
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    candidates: Some = 5
    interventions: Interventions = ()

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.ids is None):
            raise ConfigError("AskGenerate: text or ids, one of the two")
        return self

    @property
    def sampling(self) -> SamplingConfig:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        return SamplingConfig(**{name: getattr(self, name) for name in names})


class AskTranslate(Config):
    model: str
    text: str
    beam: Annotated[int, Field(strict=True, ge=1, le=32)] = 5
    length_penalty: float = 1.0
    max_new: Annotated[int, Field(strict=True, ge=1)] | None = None


class AskCost(Config):
    model: str | None = None
    preset: str | None = None
    mode: Mode = Mode.FORWARD
    batch: int = 1
    length: int | None = None
    source_length: int | None = None
    new: int | None = None
    dtype: Precision = Precision.FLOAT32
    kernel: AttentionKernel = AttentionKernel.FUSED
    device: str = "cpu"

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if (self.model is None) == (self.preset is None):
            raise ConfigError("AskCost: model or preset, one of the two")
        return self


class Replayed(Config):
    path: str
    body: dict[str, Any] | None = None


class AskExport(Config):
    format: Literal["npz", "csv", "html"]
    requests: Annotated[tuple[Replayed, ...], Field(min_length=1, max_length=256)]
    state: str = ""
