"""What is seen as a file: NPZ and CSV for other programs, HTML for other people."""

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.errors import InputError
from qkv.serving.answer import FRAME, Answer, RefusedError
from qkv.serving.asking import AskExport, Replayed
from qkv.serving.frame import unpack, unpack_parts
from qkv.serving.single_file import Recorded, single_file

if TYPE_CHECKING:
    from qkv.serving.explorer import Explorer

HTML, NPZ, CSV = "text/html; charset=utf-8", "application/x-npz", "text/csv; charset=utf-8"
FORBIDDEN = ("/api/export", "/api/models/add")
"""Paths that change something, or that would never end."""


def export(explorer: "Explorer", asked: AskExport) -> Answer:
    answers = [replayed(explorer, one) for one in asked.requests]
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
