"""Our page beside BertViz's: bytes, first paint and hover, for the same weights and text in the same browser."""

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks import machine
from benchmarks.engine import Engine, EngineError, MissingEngineError, Running
from benchmarks.engines.page_work import save_random, save_shipped, save_trained, text_of
from benchmarks.engines.speaking import MissingPeerError
from benchmarks.pages import LIMIT, Browser, Server, Told
from benchmarks.results import Report
from benchmarks.runner import Asked
from qkv.serving.frame_codec import decode_frame

EXACT, WIRE = 1e-5, 0.004
"""How far a row on hover, and a byte of a whole layer, may be from `transformers`' weight."""
BYTES, EVERY, LAYER = "MB of all heads", "s to all heads", "s to one layer"
FROM_TEXT, HOVER, ROW = "s from the text to all heads", "ms of a hover", "ms to its exact row"
AIMS = {(BYTES, 128): 1.0, (BYTES, 512): 11.0, (EVERY, 128): 0.5, (EVERY, 512): 2.0, (HOVER, 512): 50.0}
MODELS: dict[str, tuple[Callable[[Path], None], tuple[int, ...]]] = {
    "random BERT, 12×12": (save_random, (32, 128, 512)),
    "all-MiniLM-L6-v2, 6×12": (save_trained, (32, 128, 512)),
    "shipped bert, 5×4": (lambda folder: save_shipped("bert", folder), (32, 128)),
}
BERTVIZ = Engine(name="BertViz", module="benchmarks.engines.page_bertviz")
SCRIPTS = {"require": "requirejs/require.js", "d3": "d3/dist/d3.min.js", "jquery": "jquery/dist/jquery.min.js"}
Place = tuple[str, int]
"""Which model, how many tokens."""


@dataclass
class Found:
    """Figures, ours and theirs, by model, number of tokens and what they are of; a text says why there is none."""

    figures: dict[tuple[str, int, str], list[float | str]] = field(default_factory=dict)
    outside: list[int] = field(default_factory=lambda: [0, 0])
    apart: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: {"torch": torch.__version__})

    def put(self, place: Place, whose: int, told: Told, figures: dict[str, float | None]) -> None:
        for what, value in figures.items():
            pair = self.figures.setdefault((*place, what), ["–", "–"])
            pair[whose] = told.get("error", "–") if value is None else value
        self.outside[whose] += told["outside"]
        self.versions["Chromium"] = told["browser"]


def explorer(asked: Asked) -> Report:
    load = machine.others_load()
    found = Found()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        browser = stack.enter_context(Browser(times=asked.repeats))
        theirs = stack.enter_context(Running(BERTVIZ.command, threads=asked.threads or machine.available_cores()))
        try:
            found.versions |= theirs.ask("describe", peers=asked.peers and str(asked.peers.resolve()))["versions"]
        except MissingEngineError as missing:
            found.notes.append(f"Not here: BertViz: {missing}.")
            theirs = None
        for name, (make, sizes) in MODELS.items():
            folder = work / name.replace(" ", "-")
            try:
                make(folder)
            except MissingPeerError as missing:
                found.notes.append(f"Not here: {name}: {missing}.")
                continue
            with Server(folder) as server:
                for n in sizes:
                    asked.say(f"{name}, {n} tokens")
                    _ours((name, n), server, browser, found)
                    if theirs is not None and asked.peers is not None:
                        made = _made(theirs, (name, n), server, found)
                        _theirs((name, n), made, browser, asked.peers.resolve(), found)
    return _report(found, load, times=asked.repeats)


def _ours(place: Place, server: Server, browser: Browser, found: Found) -> None:
    n, state = place[1], {"text": text_of(place[1])}
    (model,) = (one for one in json.loads(server.ask("api/models"))["models"] if one["id"] == server.model)
    (stack,) = model["stacks"]
    every = {"ready": ".grid .open canvas", "least": stack["layers"] * stack["heads"]}
    cold = browser.once(server.page(state, **every))
    named = {"run": json.loads(server.ask("api/run", model=server.model, **state))["run"], "stack": stack["stack"]}
    layers = [{"path": "./api/attention", "body": {**named, "layer": i}} for i in range(stack["layers"])]
    warm = browser.best(server.page(state, **every, bodies=[{"path": "./api/heads", "body": named}, *layers]))
    heads = {"view": "head", "heads": ".".join(map(str, range(stack["heads"])))}
    # Tokens that are out of sight are not in the document.
    tokens = {"ready": ".left .token", "tokens": ".left .token", "least": min(n, 20), "says": "Exact to float32"}
    layer = browser.best(server.page(state | heads, **tokens))
    found.put(place, 0, warm, {BYTES: warm["bytes"] / 1e6, EVERY: _seconds(warm)})
    found.put(place, 0, cold, {FROM_TEXT: _seconds(cold)})
    found.put(place, 0, layer, {LAYER: _seconds(layer), HOVER: _median(layer, "hover"), ROW: _median(layer, "exact")})


def _made(engine: Running, place: Place, server: Server, found: Found) -> Told | None:
    """BertViz's two pages, once the numbers were compared: what we send is what `transformers` computes."""
    name, n = place
    out = Path(server.model).parent / f"{Path(server.model).name}-{n}"
    out.mkdir()
    try:
        made = engine.ask("write", folder=server.model, out=str(out), n_tokens=n)
    except EngineError as failed:
        found.notes.append(f"Failed: BertViz, {name}, {n} tokens: {failed}.")
        return None
    run = json.loads(server.ask("api/run", model=server.model, text=text_of(n)))["run"]
    for layer, expected in enumerate(np.load(out / f"attentions-{n}.npy")):
        sent = decode_frame(server.ask("api/attention", run=run, layer=layer))["weights"]
        row = decode_frame(server.ask("api/row", run=run, layer=layer, query=n // 2))["weights"]
        exact, wire = (float(np.abs(a - b).max()) for a, b in ((row, expected[:, n // 2]), (sent, expected)))
        found.apart.append(exact)
        if exact > EXACT or wire > WIRE:
            found.notes.append(
                f"Failed: {name}, {n} tokens, layer {layer}: a row off by {exact:.1e}, bytes {wire:.4f}."
            )
    return made


def _theirs(place: Place, made: Told | None, browser: Browser, peers: Path, found: Found) -> None:
    if made is None:
        return
    page = {"ready": "#vis svg", "least": 1}
    page["scripts"] = {name: str(peers / "bertviz/node_modules" / path) for name, path in SCRIPTS.items()}
    every = browser.best({**page, "address": f"file://{made['model']['path']}"})
    layer = browser.best({**page, "address": f"file://{made['head']['path']}", "tokens": "#left text"})
    at = _seconds(every)
    cold = None if at is None else at + made["model"]["seconds"]
    found.put(place, 1, every, {BYTES: made["model"]["bytes"] / 1e6, EVERY: at, FROM_TEXT: cold})
    found.put(place, 1, layer, {LAYER: _seconds(layer), HOVER: _median(layer, "hover")})


def _seconds(told: Told) -> float | None:
    return None if told.get("painted") is None else told["painted"] / 1000


def _median(told: Told, what: str) -> float | None:
    return median(told[what]) if told.get(what) else None


def _report(found: Found, load: float, *, times: int) -> Report:
    apart = f"Our exact rows are within {max(found.apart):.1e} of transformers' eager attentions, "
    notes = [
        *([f"{apart}what is sent of whole layers within {WIRE}."] if found.apart else []),
        f"Requests to elsewhere: ours {found.outside[0]}, BertViz {found.outside[1]} (here answered from disk).",
        f"A page that has painted nothing after {LIMIT:g} s counts as dead.",
        *found.notes,
    ]
    return Report(
        name="explorer",
        what=(
            "One text and the same weights in the same browser (headless, 1440×900). All heads: our Model view and "
            "BertViz's model_view; one layer, all its heads: our Head view and its head_view. Seconds from navigation "
            "to the frame that shows it; 'from the text' adds the model's pass and the making of the page. A hover: "
            "from the pointer's coming to the next frame, median of 3 to 6. MB: what all heads need, as it travels. "
            f"Best of {times}, where it takes less than 5 s."
        ),
        columns=["model", "tokens", "what", "ours", "BertViz", "BertViz ÷ ours", "aim", "met"],
        rows=[_row(place, pair) for place, pair in found.figures.items()],
        notes=notes,
        versions=found.versions,
        load=load,
    )


def _row(place: tuple[str, int, str], pair: list[float | str]) -> list[str]:
    model, n, what = place
    ours, theirs = pair
    ratio = f"{theirs / ours:,.1f}" if isinstance(ours, float) and isinstance(theirs, float) else "–"
    aim = AIMS.get((what, n))
    met = "–" if aim is None else "yes" if isinstance(ours, float) and ours <= aim else "no"
    return [model, str(n), what, *map(_said, pair), ratio, "–" if aim is None else f"{aim:g}", met]


def _said(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:,.1f}" if figure >= 10 else f"{figure:.2f}"
