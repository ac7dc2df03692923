"""What is seen as a file: NPZ and CSV for other programs, HTML for other people."""

import csv
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.choices import AttentionKind
from qkv.errors import InputError
from qkv.serving.responses import FRAME, Answer, RefusedError
from qkv.serving.schemas import AskExport, Replayed
from qkv.serving.frame_codec import unpack, unpack_parts
from qkv.serving.standalone_page import Recorded, single_file

if TYPE_CHECKING:
    from qkv.serving.explorer import Explorer

HTML, NPZ, CSV = "text/html; charset=utf-8", "application/x-npz", "text/csv; charset=utf-8"
FORBIDDEN = ("/api/export", "/api/models/add")
"""Paths that change something, or that would never end."""


MOST_BYTES = 2**21
"""Of all heads' weights, up to which a saved page holds every head's own views."""


def export(explorer: "Explorer", asked: AskExport) -> Answer:
    """Of a page, all that belongs to the runs among its requests is in it too."""
    requests = list(asked.requests)
    if asked.format == "html":
        requests += [one for run in asked.requests if run.path == "/api/run" for one in everything(explorer, run)]
    named = {json.dumps(one.model_dump(), sort_keys=True): one for one in requests}
    answers = [replayed(explorer, one) for one in named.values()]
    if asked.format == "html":
        body = single_file([one.recorded for one in answers], state=asked.state).encode()
        return Answer(200, HTML, body, "explorer.html")
    frames = [(one.recorded.path.removeprefix("/api/"), one.frame) for one in answers if one.frame is not None]
    if not frames:
        raise InputError("none of what is to be exported holds numbers in bulk")
    if asked.format == "npz":
        return Answer(200, NPZ, _npz(frames), "explorer.npz")
    if len(frames) != 1:
        raise InputError(f"a CSV file holds one view, {len(frames)} were asked for")
    return Answer(200, CSV, _csv(*frames[0]).encode(), f"{frames[0][0]}.csv")


class _Replayed:
    def __init__(self, recorded: Recorded, frame: bytes | None) -> None:
        self.recorded = recorded
        self.frame = frame


def replayed(explorer: "Explorer", one: Replayed) -> _Replayed:
    """The answer to a request of the page, asked again."""
    if one.path in FORBIDDEN:
        raise InputError(f"{one.path} cannot be exported")
    answer = explorer.ask(one.path, one.body)
    if answer.status != 200:
        raise RefusedError(answer.status, f"{one.path}: {json.loads(answer.body)['error']}")
    recorded = Recorded(path=one.path, body=one.body, status=200, type=answer.type, answer=answer.body)
    return _Replayed(recorded, answer.body if answer.type == FRAME else None)


def everything(explorer: "Explorer", run: Replayed) -> Iterator[Replayed]:
    """Every view of a run that needs no further choice, as the page asks for it."""
    told = json.loads(replayed(explorer, run).recorded.answer)
    views = explorer.shelf.describe(explorer.shelf.find(told["model"]))["views"]
    yield Replayed(path="/api/models")
    yield run
    for stack in told["stacks"]:
        named = {"run": told["run"], "stack": stack["stack"]}
        yield Replayed(path="/api/heads", body=named)
        yield Replayed(path="/api/map", body=named)
        if "residual" in views and stack["stack"] != AttentionKind.CROSS.value:
            yield Replayed(path="/api/residual", body=named)
        yield from _of_layers(told, stack, views)
    for view in ("lens", "embeddings"):
        if view in views:
            yield Replayed(path=f"/api/{view}", body={"run": told["run"]})
    yield Replayed(path="/api/cost/choices")
    yield Replayed(path="/api/cost", body={"model": told["model"]})


def _of_layers(told: dict[str, Any], stack: dict[str, Any], views: list[str]) -> Iterator[Replayed]:
    """What the page asks of a layer and a head when it comes to them; of a long text only of the first of each."""
    named = {"run": told["run"], "stack": stack["stack"]}
    is_long = 4 * stack["layers"] * stack["heads"] * stack["queries"] * stack["keys"] > MOST_BYTES
    looks = {"query": _query(told, stack)}
    for layer in range(stack["layers"]):
        of_layer = {**named, "layer": layer}
        yield Replayed(path="/api/attention", body=of_layer)
        if is_long and layer > 0:
            continue
        yield Replayed(path="/api/row", body=of_layer | looks)
        if "residual" in views and stack["stack"] != AttentionKind.CROSS.value:
            yield Replayed(path="/api/write", body=of_layer | looks)
        for head in range(1 if is_long else stack["heads"]):
            yield Replayed(path="/api/map", body={**of_layer, "head": head})
            if "neuron" in views:
                yield Replayed(path="/api/neuron", body={**of_layer, "head": head} | looks)


def _query(told: dict[str, Any], stack: dict[str, Any]) -> int:
    """The position that the page looks at first: the first [MASK], else the last word."""
    if told["says"] == "here" and told["predictions"]:
        return told["predictions"][0]["position"]
    rows, n = told["source" if stack["stack"] == AttentionKind.ENCODER.value else "own"], stack["queries"]
    return n - 2 if n > 2 and rows["is_special"][n - 1] else n - 1


def _npz(frames: list[tuple[str, bytes]]) -> bytes:
    arrays: dict[str, Any] = {}
    texts = []
    for number, (name, frame) in enumerate(frames):
        data, blobs = unpack_parts(frame)
        texts.append({"view": name, "data": data})
        for key, array in blobs.items():
            arrays[f"{number}_{name}_{key.partition('_')[2]}"] = array
    file = io.BytesIO()
    np.savez_compressed(file, **arrays, answers=np.array(json.dumps(texts, ensure_ascii=False)))
    return file.getvalue()


def _csv(name: str, frame: bytes) -> str:
    """A map as a table with its labels; anything else one number a line, with its place on every axis."""
    file = io.StringIO()
    writer = csv.writer(file)
    if name == "map":
        data = unpack(frame)
        writer.writerow(["", *map(_cell, data["keys"])])
        for label, row in zip(data["queries"], data["weights"].tolist(), strict=True):
            writer.writerow([_cell(label), *row])
        return file.getvalue()
    _, blobs = unpack_parts(frame)
    n_axes = max(array.ndim for array in blobs.values())
    writer.writerow(["name", *(f"axis {i}" for i in range(n_axes)), "value"])
    for key, array in blobs.items():
        for place, value in np.ndenumerate(array):
            writer.writerow([key.partition("_")[2], *place, *[""] * (n_axes - array.ndim), value.item()])
    return file.getvalue()


def _cell(text: str) -> str:
    """A spreadsheet takes what begins so for a formula; a quote before it keeps it a text."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
