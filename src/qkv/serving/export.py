"""Export API responses as NPZ, CSV or a standalone HTML page."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.choices import AttentionStack
from qkv.errors import InputError
from qkv.serving.frame_codec import decode_frame, split_frame
from qkv.serving.responses import FRAME, APIResponse, RequestError
from qkv.serving.schemas import APIRequest, ExportRequest
from qkv.serving.standalone_page import RecordedResponse, build_standalone_page

if TYPE_CHECKING:
    from qkv.serving.explorer import Explorer

HTML, NPZ, CSV = "text/html; charset=utf-8", "application/x-npz", "text/csv; charset=utf-8"
EXCLUDED_PATHS = ("/api/export", "/api/models/add")
"""API paths that cannot be exported because they change the server's state or would recurse indefinitely."""


MAX_ALL_HEADS_BYTES = 2**21
"""Maximum size of all attention weights at which a saved page still includes the views of every head."""


def export_responses(explorer: "Explorer", request: ExportRequest) -> APIResponse:
    """Repeat the requests and return their responses as a file.

    An HTML page also includes the default views of every requested run.
    """
    requests = list(request.requests)
    if request.format == "html":
        for run in request.requests:
            if run.path == "/api/run":
                requests += view_requests_with_defaults(explorer, run)
    unique = {json.dumps(each.model_dump(), sort_keys=True): each for each in requests}
    replayed = [replay_request(explorer, each) for each in unique.values()]
    if request.format == "html":
        body = build_standalone_page([each.recorded for each in replayed], state=request.state).encode()
        return APIResponse(200, HTML, body, "explorer.html")
    frames = [(each.recorded.path.removeprefix("/api/"), each.frame) for each in replayed if each.frame is not None]
    if not frames:
        raise InputError("an export requires at least 1 request that returns arrays, got 0")
    if request.format == "npz":
        return APIResponse(200, NPZ, _encode_npz(frames), "explorer.npz")
    if len(frames) != 1:
        raise InputError(f"a CSV export must have exactly 1 view, got {len(frames)}")
    return APIResponse(200, CSV, _encode_map_table_or_long_csv(*frames[0]).encode(), f"{frames[0][0]}.csv")


@dataclass(frozen=True)
class ReplayedResponse:
    """A recorded response with its binary frame, if it has one."""

    recorded: RecordedResponse
    frame: bytes | None


def replay_request(explorer: "Explorer", request: APIRequest) -> ReplayedResponse:
    """Handle a request from the page again and record the response."""
    if request.path in EXCLUDED_PATHS:
        raise InputError(f"{request.path} cannot be exported")
    response = explorer.handle_request(request.path, request.body)
    if response.status != 200:
        raise RequestError(response.status, f"{request.path}: {json.loads(response.body)['error']}")
    recorded = RecordedResponse(
        path=request.path,
        body=request.body,
        status=200,
        content_type=response.content_type,
        response=response.body,
    )
    return ReplayedResponse(recorded, response.body if response.content_type == FRAME else None)


def view_requests_with_defaults(explorer: "Explorer", run: APIRequest) -> Iterator[APIRequest]:
    """Yield the requests that the page sends to show every view of a run with default settings."""
    response = json.loads(replay_request(explorer, run).recorded.response)
    views = explorer.registry.summarize_or_error(explorer.registry.find_or_register_checkpoint(response["model"]))[
        "views"
    ]
    yield APIRequest(path="/api/models")
    yield run
    for stack in response["stacks"]:
        body = {"run": response["run"], "stack": stack["stack"]}
        yield APIRequest(path="/api/heads", body=body)
        yield APIRequest(path="/api/map", body=body)
        if "residual" in views and stack["stack"] != AttentionStack.CROSS.value:
            yield APIRequest(path="/api/residual", body=body)
        yield from _layer_and_head_requests_capped_by_size(response, stack, views)
    for view in ("lens", "embeddings"):
        if view in views:
            yield APIRequest(path=f"/api/{view}", body={"run": response["run"]})
    yield APIRequest(path="/api/cost/choices")
    yield APIRequest(path="/api/cost", body={"model": response["model"]})


def _layer_and_head_requests_capped_by_size(
    run: dict[str, Any], stack: dict[str, Any], views: list[str]
) -> Iterator[APIRequest]:
    """Yield the requests for every layer and head, or only part of the requests if the text is long.

    For a long text, only the requests for the first layer and head are complete.
    """
    stack_body = {"run": run["run"], "stack": stack["stack"]}
    n_weights = stack["n_layers"] * stack["n_heads"] * stack["n_queries"] * stack["n_keys"]
    is_long = 4 * n_weights > MAX_ALL_HEADS_BYTES
    query = {"query": _first_mask_or_last_nonspecial(run, stack)}
    for layer in range(stack["n_layers"]):
        layer_body = {**stack_body, "layer": layer}
        yield APIRequest(path="/api/attention", body=layer_body)
        if is_long and layer > 0:
            continue
        yield APIRequest(path="/api/row", body=layer_body | query)
        if "residual" in views and stack["stack"] != AttentionStack.CROSS.value:
            yield APIRequest(path="/api/attention_output", body=layer_body | query)
        for head in range(1 if is_long else stack["n_heads"]):
            yield APIRequest(path="/api/map", body={**layer_body, "head": head})
            if "neuron" in views:
                yield APIRequest(path="/api/neuron", body={**layer_body, "head": head} | query)


def _first_mask_or_last_nonspecial(run: dict[str, Any], stack: dict[str, Any]) -> int:
    """Return the query that the page selects initially: the first [MASK], or otherwise the last non-special token."""
    if run["predicts"] == "this_token" and run["predictions"]:
        return run["predictions"][0]["position"]
    rows, n = run["source" if stack["stack"] == AttentionStack.ENCODER.value else "sequence"], stack["n_queries"]
    return n - 2 if n > 2 and rows["is_special"][n - 1] else n - 1


def _encode_npz(frames: list[tuple[str, bytes]]) -> bytes:
    arrays: dict[str, Any] = {}
    responses = []
    for index, (name, frame) in enumerate(frames):
        data, blobs = split_frame(frame)
        responses.append({"view": name, "data": data})
        for key, array in blobs.items():
            arrays[f"{index}_{name}_{key.partition('_')[2]}"] = array
    file = io.BytesIO()
    np.savez_compressed(file, **arrays, responses=np.array(json.dumps(responses, ensure_ascii=False)))
    return file.getvalue()


def _encode_map_table_or_long_csv(name: str, frame: bytes) -> str:
    """Encode a map as a CSV table with labels, and any other view as CSV with one number and its indices per line."""
    file = io.StringIO()
    writer = csv.writer(file)
    if name == "map":
        data = decode_frame(frame)
        writer.writerow(["", *map(_escape_formula, data["keys"])])
        for label, row in zip(data["queries"], data["weights"].tolist(), strict=True):
            writer.writerow([_escape_formula(label), *row])
        return file.getvalue()
    _, blobs = split_frame(frame)
    n_axes = max(array.ndim for array in blobs.values())
    writer.writerow(["name", *(f"axis {i}" for i in range(n_axes)), "value"])
    for key, array in blobs.items():
        for indices, value in np.ndenumerate(array):
            writer.writerow([key.partition("_")[2], *indices, *[""] * (n_axes - array.ndim), value.item()])
    return file.getvalue()


def _escape_formula(text: str) -> str:
    """Prepend a quote to the text if a spreadsheet would interpret it as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
