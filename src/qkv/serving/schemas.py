"""Request schemas of the explorer API."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qkv.choices import AttentionKernel, AttentionStack
from qkv.config import Config, SamplingConfig
from qkv.cost import Mode, Precision
from qkv.errors import ConfigError

Index = Annotated[int, Field(strict=True, ge=0)]
TopK = Annotated[int, Field(strict=True, ge=1, le=100)]
Flag = Annotated[bool, Field(strict=True)]


class HeadAblationSpec(Config):
    """An intervention that sets the output of an attention head to zero."""

    kind: Literal["head"]
    stack: AttentionStack
    layer: Index
    head: Index


class EdgeMaskSpec(Config):
    """An intervention that masks attention from a query to a key, by default in all layers and heads."""

    kind: Literal["edge"]
    stack: AttentionStack
    query: Index
    key: Index
    layer: Index | None = None
    head: Index | None = None


class PatchSpec(Config):
    """An intervention that replaces an activation with its value in a run on another text."""

    kind: Literal["patch"]
    tap: str
    text: str
    second: str | None = None
    positions: tuple[Index, ...] | None = None


InterventionSpec = Annotated[HeadAblationSpec | EdgeMaskSpec | PatchSpec, Field(discriminator="kind")]
InterventionSpecs = Annotated[tuple[InterventionSpec, ...], Field(max_length=256)]


class AddModelRequest(Config):
    path: str


class ModelRequest(Config):
    model: str


class RunRequest(Config):
    model: str
    text: str
    second: str | None = None
    interventions: InterventionSpecs = ()


class RunViewRequest(Config):
    """The base class for requests that ask for a view of a run."""

    run: str


class StackRequest(RunViewRequest):
    stack: AttentionStack | None = None


class LayerRequest(StackRequest):
    layer: Index


class AttentionTileRequest(LayerRequest):
    head: Index
    rows: tuple[Index, Index]
    columns: tuple[Index, Index]


class RowRequest(LayerRequest):
    query: Index


class NeuronViewRequest(RowRequest):
    head: Index


class MapOptions(Config):
    """Settings that select an attention map and determine how it is postprocessed."""

    stack: AttentionStack | None = None
    kind: Literal["weights", "value-weighted", "rollout"] = "weights"
    layer: Index | None = None
    head: Index | None = None
    merge_words: Flag = False
    keep_sink: Flag = True


class MapRequest(MapOptions):
    run: str


class CompareRunsRequest(MapOptions):
    left: str
    right: str


class TopTokensRequest(RunViewRequest):
    n: TopK = 5


class LogitAttributionRequest(RunViewRequest):
    position: Index
    token_id: Index
    against: Index | None = None


class CoreferenceRequest(Config):
    model: str
    text: str
    pronoun: str
    candidates: tuple[str, ...]


class PositionSimilarityRequest(Config):
    model: str
    n: Annotated[int, Field(strict=True, ge=1, le=512)]


class CheckpointTimelineRequest(Config):
    model: str
    text: str
    second: str | None = None
    stack: AttentionStack | None = None


class GenerateRequest(Config):
    """A request to continue a text or token ids, with the sampling settings."""

    model: str
    text: str | None = None
    ids: tuple[Index, ...] | None = None
    max_new: Annotated[int, Field(strict=True, ge=1, le=4096)] = 40
    use_cache: Flag = True
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    candidates: TopK = 5
    interventions: InterventionSpecs = ()

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.text is None) == (self.ids is None):
            raise ConfigError("GenerateRequest requires exactly one of text and ids")
        return self

    @property
    def sampling(self) -> SamplingConfig:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        return SamplingConfig(**{name: getattr(self, name) for name in names})


class TranslateRequest(Config):
    model: str
    text: str
    beam: Annotated[int, Field(strict=True, ge=1, le=32)] = 5
    length_penalty: float = 1.0
    max_new: Annotated[int, Field(strict=True, ge=1)] | None = None


class CostRequest(Config):
    """A request to estimate the cost of a workload with a model or a preset."""

    model: str | None = None
    preset: str | None = None
    mode: Mode = Mode.FORWARD
    batch_size: int = 1
    seq_len: int | None = None
    source_len: int | None = None
    n_new_tokens: int | None = None
    dtype: Precision = Precision.FLOAT32
    kernel: AttentionKernel = AttentionKernel.FUSED
    device: str = "cpu"

    @model_validator(mode="after")
    def _check_model_or_preset(self) -> Self:
        if (self.model is None) == (self.preset is None):
            raise ConfigError("CostRequest requires exactly one of model and preset")
        return self


class APIRequest(Config):
    """The path and body of an API request. A GET request has `None` as its body."""

    path: str
    body: dict[str, Any] | None = None


class ExportRequest(Config):
    format: Literal["npz", "csv", "html"]
    requests: Annotated[tuple[APIRequest, ...], Field(min_length=1, max_length=256)]
    state: str = ""
