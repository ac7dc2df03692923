"""Endpoints of the explorer API, independent of HTTP."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from qkv.config import Config
from qkv.errors import InputError, QKVError
from qkv.inspection import PATTERNS, checkpoint_timeline, coreference, named_taps, position_similarity
from qkv.serving import schemas, views
from qkv.serving.costs import cost_request_choices, cost_response
from qkv.serving.export import export_responses
from qkv.serving.frame_codec import encode_frame, encode_json_nan_as_null
from qkv.serving.frame_format import add_length_prefix
from qkv.serving.generation_stream import stream_generation
from qkv.serving.model_registry import ModelRegistry
from qkv.serving.responses import FRAME, FRAMES, JSON, APIResponse, RequestError, RouteSettings, catch_errors
from qkv.serving.run_cache import RunCache, run_response
from qkv.serving.translation import translation_response
from qkv.tasks import load


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The request schema, handler and content type of an API path."""

    schema: type[Config] | None
    """Schema of the request body, or `None` for a GET request, which has no body."""
    handler: Callable[[Any], Any]
    content_type: str = FRAME
    skips_queue: bool = False
    """Whether requests to this path are handled immediately, regardless of how many other requests are waiting."""


class Explorer:
    """A `Backend` that runs the models in this process."""

    def __init__(self, registry: ModelRegistry) -> None:
        self.registry = registry
        self.runs = RunCache(registry)
        self.endpoints = self._build_endpoints()

    @property
    def route_settings(self) -> dict[str, RouteSettings]:
        return {
            path: RouteSettings(
                method="GET" if endpoint.schema is None else "POST",
                content_type=endpoint.content_type,
                skips_queue=endpoint.skips_queue,
            )
            for path, endpoint in self.endpoints.items()
        }

    def handle_request(self, path: str, body: dict[str, Any] | None) -> APIResponse:
        return catch_errors(lambda: self._handle(path, body))

    def _handle(self, path: str, body: dict[str, Any] | None) -> APIResponse:
        endpoint, request = self.parse_request(path, body)
        if endpoint.content_type == FRAMES:
            return APIResponse(200, FRAMES, b"".join(self._stream_generation_frames(request)))
        result = endpoint.handler(request)
        if isinstance(result, APIResponse):
            return result
        is_json = endpoint.content_type == JSON
        return APIResponse(
            200, endpoint.content_type, encode_json_nan_as_null(result) if is_json else encode_frame(result)
        )

    def parse_request(self, path: str, body: dict[str, Any] | None) -> tuple[Endpoint, Any]:
        """Return the endpoint for a path and the validated request."""
        endpoint = self.endpoints.get(path)
        if endpoint is None:
            raise RequestError(404, f"{path}: not found")
        if (endpoint.schema is None) != (body is None):
            raise RequestError(405, f"{path} requires {'GET' if endpoint.schema is None else 'POST'}")
        return endpoint, None if endpoint.schema is None or body is None else endpoint.schema(**body)

    def stream_frames(self, path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
        _, request = self.parse_request(path, body)
        yield from self._stream_generation_frames(request)

    def _stream_generation_frames(self, request: schemas.GenerateRequest) -> Iterator[bytes]:
        loaded = self.registry.find_or_register_checkpoint(request.model)
        steps = stream_generation(loaded, self.registry.get_or_load_task(loaded), request)
        # An error before the first frame is raised so that the response gets an HTTP error status.
        yield add_length_prefix(encode_frame(next(steps)))
        try:
            for step in steps:
                yield add_length_prefix(encode_frame(step))
        except QKVError as error:
            yield add_length_prefix(encode_frame({"kind": "error", "error": str(error)}))

    def _build_endpoints(self) -> dict[str, Endpoint]:
        # Each entry contains the schema, the view function, and whether the view runs parts of the model.
        run_views = {
            "heads": (schemas.StackRequest, views.head_pattern_scores_view, False),
            "attention": (schemas.LayerRequest, views.layer_attention_view, False),
            "tile": (schemas.AttentionTileRequest, views.attention_tile_view, False),
            "row": (schemas.RowRequest, views.row_view, False),
            "map": (schemas.MapRequest, views.max_pooled_map_view, False),
            "neuron": (schemas.NeuronViewRequest, views.neuron_view, True),
            "residual": (schemas.StackRequest, views.residual_view, True),
            "attention_output": (schemas.RowRequest, views.head_norms_and_value_weighted_view, True),
            "lens": (schemas.TopTokensRequest, views.logit_lens_view, True),
            "logit_attribution": (schemas.LogitAttributionRequest, views.logit_attribution_view, True),
            "embeddings": (schemas.TopTokensRequest, views.embeddings_view, True),
        }
        endpoints = {
            f"/api/{name}": Endpoint(schema=schema, handler=self._make_run_view_handler(view, locks_model=locks_model))
            for name, (schema, view, locks_model) in run_views.items()
        }
        health = {"ok": True, "version": version("qkv")}
        return endpoints | {
            "/api/health": Endpoint(schema=None, handler=lambda _: dict(health), content_type=JSON, skips_queue=True),
            "/api/models": Endpoint(schema=None, handler=lambda _: self.registry.list_models(), content_type=JSON),
            "/api/models/add": Endpoint(schema=schemas.AddModelRequest, handler=self._add_model, content_type=JSON),
            "/api/taps": Endpoint(schema=schemas.ModelRequest, handler=self._list_taps, content_type=JSON),
            "/api/run": Endpoint(
                schema=schemas.RunRequest,
                handler=lambda request: run_response(self.runs.get_or_compute(request)),
                content_type=JSON,
            ),
            "/api/coreference": Endpoint(schema=schemas.CoreferenceRequest, handler=self._coreference),
            "/api/positions": Endpoint(schema=schemas.PositionSimilarityRequest, handler=self._position_similarity),
            "/api/timeline": Endpoint(schema=schemas.CheckpointTimelineRequest, handler=self._checkpoint_timeline),
            "/api/compare": Endpoint(schema=schemas.CompareRunsRequest, handler=self._compare_runs),
            "/api/generate": Endpoint(
                schema=schemas.GenerateRequest, handler=self._stream_generation_frames, content_type=FRAMES
            ),
            "/api/translate": Endpoint(schema=schemas.TranslateRequest, handler=self._translate),
            "/api/cost/choices": Endpoint(schema=None, handler=lambda _: cost_request_choices(), content_type=JSON),
            "/api/cost": Endpoint(schema=schemas.CostRequest, handler=self._estimate_cost, content_type=JSON),
            "/api/export": Endpoint(
                schema=schemas.ExportRequest, handler=lambda request: export_responses(self, request)
            ),
        }

    def _make_run_view_handler(self, view: Callable[[Any, Any], Any], *, locks_model: bool) -> Callable[[Any], Any]:
        """Return the handler for a view of a run.

        If the view runs parts of the model, the handler holds the model's lock because another request may apply
        interventions.
        """

        def handle(request: schemas.RunViewRequest | schemas.MapRequest) -> dict[str, Any]:
            run = self.runs.find_or_recompute(request.run)
            with run.loaded.lock if locks_model else nullcontext(), torch.no_grad():
                return view(run, request)

        return handle

    def _add_model(self, request: schemas.AddModelRequest) -> dict[str, Any]:
        return self.registry.summarize_or_error(self.registry.add(request.path))

    def _list_taps(self, request: schemas.ModelRequest) -> dict[str, Any]:
        task = self.registry.get_or_load_task(self.registry.find_or_register_checkpoint(request.model))
        return {"taps": [name for name in named_taps(task.model) if not name.endswith(".inputs")]}

    def _coreference(self, request: schemas.CoreferenceRequest) -> dict[str, Any]:
        loaded = self.registry.find_or_register_checkpoint(request.model)
        with loaded.lock:
            view = coreference(
                self.registry.get_or_load_task(loaded),
                request.text,
                pronoun=request.pronoun,
                candidates=list(request.candidates),
            )
        return views.view_to_dict(view) | {
            "selections": view.selections,
            "methods_agree": view.methods_agree,
            "verdict": view.verdict,
        }

    def _position_similarity(self, request: schemas.PositionSimilarityRequest) -> dict[str, Any]:
        loaded = self.registry.find_or_register_checkpoint(request.model)
        with loaded.lock:
            return {"similarity": position_similarity(self.registry.get_or_load_task(loaded).model, request.n)}

    def _checkpoint_timeline(self, request: schemas.CheckpointTimelineRequest) -> dict[str, Any]:
        run = self.registry.find_or_register_checkpoint(request.model).run
        if run is None or not run.checkpoint_steps():
            raise InputError(f"{request.model}: a timeline requires a run folder with checkpoints")
        # Each checkpoint is loaded as a separate model, so no lock is needed. Only one of them is in memory at a time.
        checkpoints = ((step, load(run.checkpoint_folder(step))) for step in run.checkpoint_steps())
        view = checkpoint_timeline(checkpoints, request.text, request.second, stack=request.stack)
        return views.view_to_dict(view) | {"patterns": PATTERNS, "losses": view.losses}

    def _compare_runs(self, request: schemas.CompareRunsRequest) -> dict[str, Any]:
        with torch.no_grad():
            return views.compare_view(
                self.runs.find_or_recompute(request.left), self.runs.find_or_recompute(request.right), request
            )

    def _translate(self, request: schemas.TranslateRequest) -> dict[str, Any]:
        loaded = self.registry.find_or_register_checkpoint(request.model)
        return translation_response(loaded, self.registry.get_or_load_task(loaded), request)

    def _estimate_cost(self, request: schemas.CostRequest) -> dict[str, Any]:
        config = (
            None
            if request.model is None
            else self.registry.get_or_load_config(self.registry.find_or_register_checkpoint(request.model))
        )
        return cost_response(request, config)
