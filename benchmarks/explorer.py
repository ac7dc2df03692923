"""Compare the explorer page with BertViz: bytes, first paint and hover, with the same weights, text and browser."""

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
from benchmarks.browser import TIMEOUT_SECONDS, Browser, PageMetrics, Server
from benchmarks.engine import Engine, EngineError, EngineProcess, MissingEngineError
from benchmarks.engines.page_workload import make_text, save_random, save_shipped, save_trained
from benchmarks.engines.protocol import MissingPeerError
from benchmarks.results import Report
from benchmarks.runner import BenchmarkOptions
from qkv.serving.frame_codec import decode_frame

EXACT_TOLERANCE, QUANTIZED_TOLERANCE = 1e-5, 0.004
"""Allowed differences from the attention weights of `transformers`, first for a row shown on hover and second for a
quantized full layer.
"""
BYTES, EVERY, LAYER = "MB of all heads", "s to all heads", "s to one layer"
FROM_TEXT, HOVER, ROW = "s from the text to all heads", "ms per hover", "ms to the exact row"
TARGETS = {(BYTES, 128): 1.0, (BYTES, 512): 11.0, (EVERY, 128): 0.5, (EVERY, 512): 2.0, (HOVER, 512): 50.0}
MODELS: dict[str, tuple[Callable[[Path], None], tuple[int, ...]]] = {
    "random BERT, 12×12": (save_random, (32, 128, 512)),
    "all-MiniLM-L6-v2, 6×12": (save_trained, (32, 128, 512)),
    "shipped bert, 5×4": (lambda folder: save_shipped("bert", folder), (32, 128)),
}
BERTVIZ = Engine(name="BertViz", module="benchmarks.engines.page_bertviz")
SCRIPTS = {"require": "requirejs/require.js", "d3": "d3/dist/d3.min.js", "jquery": "jquery/dist/jquery.min.js"}
PageKey = tuple[str, int]
"""Name of the model and number of tokens."""


@dataclass
class PageResults:
    """The figures of both pages, keyed by model, number of tokens and quantity.

    If there is no figure, a string explains why.
    """

    figures: dict[tuple[str, int, str], list[float | str]] = field(default_factory=dict)
    external_requests: list[int] = field(default_factory=lambda: [0, 0])
    differences: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: {"torch": torch.__version__})

    def put(self, key: PageKey, column: int, metrics: PageMetrics, figures: dict[str, float | None]) -> None:
        for description, value in figures.items():
            pair = self.figures.setdefault((*key, description), ["–", "–"])
            pair[column] = metrics.get("error", "–") if value is None else value
        self.external_requests[column] += metrics["outside"]
        self.versions["Chromium"] = metrics["browser"]


def explorer(options: BenchmarkOptions) -> Report:
    load = machine.load_average()
    result = PageResults()
    with ExitStack() as stack:
        workload = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        browser = stack.enter_context(Browser(times=options.repeats))
        theirs = stack.enter_context(
            EngineProcess(BERTVIZ.command, threads=options.threads or machine.available_cores())
        )
        try:
            result.versions |= theirs.send_request("describe", peers=options.peers and str(options.peers.resolve()))[
                "versions"
            ]
        except MissingEngineError as missing:
            result.notes.append(f"Not installed: BertViz: {missing}.")
            theirs = None
        for name, (make, sizes) in MODELS.items():
            folder = workload / name.replace(" ", "-")
            try:
                make(folder)
            except MissingPeerError as missing:
                result.notes.append(f"Not installed: {name}: {missing}.")
                continue
            with Server(folder) as server:
                for n in sizes:
                    options.log(f"{name}, {n} tokens")
                    _measure_explorer((name, n), server, browser, result)
                    if theirs is not None and options.peers is not None:
                        outputs = _write_bertviz_pages(theirs, (name, n), server, result)
                        _measure_bertviz((name, n), outputs, browser, options.peers.resolve(), result)
    return _report(result, load, times=options.repeats)


def _measure_explorer(index: PageKey, server: Server, browser: Browser, result: PageResults) -> None:
    n, state = index[1], {"text": make_text(index[1])}
    (model,) = (
        entry for entry in json.loads(server.send_request("api/models"))["models"] if entry["id"] == server.model
    )
    (stack,) = model["stacks"]
    every = {"ready": ".grid .open canvas", "least": stack["n_layers"] * stack["n_heads"]}
    cold = browser.once(server.page(state, **every))
    named = {
        "run": json.loads(server.send_request("api/run", model=server.model, **state))["run"],
        "stack": stack["stack"],
    }
    layers = [{"path": "./api/attention", "body": {**named, "layer": i}} for i in range(stack["n_layers"])]
    warm = browser.best(server.page(state, **every, bodies=[{"path": "./api/heads", "body": named}, *layers]))
    heads = {"view": "head", "heads": ".".join(map(str, range(stack["n_heads"])))}
    # The document does not contain tokens outside the viewport.
    tokens = {"ready": ".left .token", "tokens": ".left .token", "least": min(n, 20), "says": "Exact to float32"}
    layer = browser.best(server.page(state | heads, **tokens))
    result.put(index, 0, warm, {BYTES: warm["bytes"] / 1e6, EVERY: _seconds(warm)})
    result.put(index, 0, cold, {FROM_TEXT: _seconds(cold)})
    result.put(index, 0, layer, {LAYER: _seconds(layer), HOVER: _median(layer, "hover"), ROW: _median(layer, "exact")})


def _write_bertviz_pages(
    engine: EngineProcess, index: PageKey, server: Server, result: PageResults
) -> PageMetrics | None:
    """Check that the explorer sends the attention weights of `transformers`, and write both BertViz pages."""
    name, n = index
    out = Path(server.model).parent / f"{Path(server.model).name}-{n}"
    out.mkdir()
    try:
        outputs = engine.send_request("write", folder=server.model, out=str(out), n_tokens=n)
    except EngineError as failed:
        result.notes.append(f"Failed: BertViz, {name}, {n} tokens: {failed}.")
        return None
    run = json.loads(server.send_request("api/run", model=server.model, text=make_text(n)))["run"]
    for layer, expected in enumerate(np.load(out / f"attentions-{n}.npy")):
        quantized = decode_frame(server.send_request("api/attention", run=run, layer=layer))["weights"]
        row = decode_frame(server.send_request("api/row", run=run, layer=layer, query=n // 2))["weights"]
        exact, quantized_error = (
            float(np.abs(a - b).max()) for a, b in ((row, expected[:, n // 2]), (quantized, expected))
        )
        result.differences.append(exact)
        if exact > EXACT_TOLERANCE or quantized_error > QUANTIZED_TOLERANCE:
            result.notes.append(
                f"Failed: {name}, {n} tokens, layer {layer}: "
                f"a row differs by {exact:.1e}, expected at most {EXACT_TOLERANCE:.1e}; "
                f"the quantized layer differs by {quantized_error:.4f}, expected at most {QUANTIZED_TOLERANCE}."
            )
    return outputs


def _measure_bertviz(
    index: PageKey, outputs: PageMetrics | None, browser: Browser, peers: Path, result: PageResults
) -> None:
    if outputs is None:
        return
    page = {"ready": "#vis svg", "least": 1}
    page["scripts"] = {name: str(peers / "bertviz/node_modules" / path) for name, path in SCRIPTS.items()}
    every = browser.best({**page, "address": f"file://{outputs['model']['path']}"})
    layer = browser.best({**page, "address": f"file://{outputs['head']['path']}", "tokens": "#left text"})
    at = _seconds(every)
    cold = None if at is None else at + outputs["model"]["seconds"]
    result.put(index, 1, every, {BYTES: outputs["model"]["bytes"] / 1e6, EVERY: at, FROM_TEXT: cold})
    result.put(index, 1, layer, {LAYER: _seconds(layer), HOVER: _median(layer, "hover")})


def _seconds(metrics: PageMetrics) -> float | None:
    return None if metrics.get("painted") is None else metrics["painted"] / 1000


def _median(metrics: PageMetrics, name: str) -> float | None:
    return median(metrics[name]) if metrics.get(name) else None


def _report(result: PageResults, load: float, *, times: int) -> Report:
    differences = (
        f"Exact rows differ from the eager attention weights of transformers by at most {max(result.differences):.1e}, "
    )
    external = result.external_requests
    notes = [
        *([f"{differences}and quantized full layers by at most {QUANTIZED_TOLERANCE}."] if result.differences else []),
        (
            f"Requests to other hosts: explorer {external[0]}, BertViz {external[1]} (answered from disk in this "
            "benchmark)."
        ),
        f"If a page has painted nothing after {TIMEOUT_SECONDS:g} s, the measurement counts as failed.",
        *result.notes,
    ]
    return Report(
        name="explorer",
        description=(
            "The explorer and BertViz show the same text and weights in the same browser (headless, 1440×900). "
            '"All heads" compares the Model view of the explorer with model_view of BertViz, and "one layer" compares '
            "the Head view with head_view, showing all heads of a layer. Times are measured from navigation to the "
            'frame that shows the view; "from the text" also includes the forward pass and the creation of the page. '
            "The time of a hover is measured from the pointer event to the next frame (median of 3 to 6 hovers). MB is "
            "the amount of data transferred for all heads. Measurements that take less than 5 s are repeated "
            f"{times} times, and the best result is reported."
        ),
        columns=["model", "tokens", "quantity", "explorer", "BertViz", "BertViz ÷ explorer", "target", "reached"],
        rows=[_format_figures(key, pair) for key, pair in result.figures.items()],
        notes=notes,
        versions=result.versions,
        load=load,
    )


def _format_figures(key: tuple[str, int, str], pair: list[float | str]) -> list[str]:
    model, n, quantity = key
    ours, theirs = pair
    ratio = f"{theirs / ours:,.1f}" if isinstance(ours, float) and isinstance(theirs, float) else "–"
    target = TARGETS.get((quantity, n))
    reached = "–" if target is None else "yes" if isinstance(ours, float) and ours <= target else "no"
    return [
        model,
        str(n),
        quantity,
        *map(_format_figure, pair),
        ratio,
        "–" if target is None else f"{target:g}",
        reached,
    ]


def _format_figure(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:,.1f}" if figure >= 10 else f"{figure:.2f}"
