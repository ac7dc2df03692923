"""Which question gets which answer: every path of the API, without HTTP."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from qkv.config import Config
from qkv.errors import InputError, QKVError
from qkv.inspection import PATTERNS, checkpoint_timeline, coreference, named_taps, position_similarity
from qkv.serving import schemas, translation, costs, generation_stream, views
from qkv.serving.responses import FRAME, FRAMES, JSON, Answer, RefusedError, Way, guarded
from qkv.serving.export import export
from qkv.serving.frame_codec import as_json, pack
from qkv.serving.run_cache import Runs, told
from qkv.serving.model_registry import ModelRegistry
from qkv.serving.frame_format import counted
from qkv.tasks import load


@dataclass(frozen=True, kw_only=True)
class Route:
    """One path: what it takes, who answers, in which form."""

    form: type[Config] | None
    """None: a GET, which takes nothing."""
    answer: Callable[[Any], Any]
    type: str = FRAME
    is_quick: bool = False
    """Answered at once, however many requests wait for their turn."""


class Explorer:
    """Everything that can be asked of the models on a shelf; it is `Answering`."""

    def __init__(self, shelf: ModelRegistry) -> None:
        self.shelf = shelf
        self.runs = Runs(shelf)
        self.routes = self._routes()

    @property
    def ways(self) -> dict[str, Way]:
        return {
            path: Way(method="GET" if one.form is None else "POST", type=one.type, is_quick=one.is_quick)
            for path, one in self.routes.items()
        }

    def ask(self, path: str, body: dict[str, Any] | None) -> Answer:
        return guarded(lambda: self._answer(path, body))

    def _answer(self, path: str, body: dict[str, Any] | None) -> Answer:
        route, asked = self.checked(path, body)
        if route.type == FRAMES:
            return Answer(200, FRAMES, b"".join(self._frames(asked)))
        made = route.answer(asked)
        if isinstance(made, Answer):
            return made
        return Answer(200, route.type, as_json(made) if route.type == JSON else pack(made))

    def checked(self, path: str, body: dict[str, Any] | None) -> tuple[Route, Any]:
        """The route, and the request as its form reads it."""
        route = self.routes.get(path)
        if route is None:
            raise RefusedError(404, f"there is no {path}")
        if (route.form is None) != (body is None):
            raise RefusedError(405, f"{path} is asked by {'GET' if route.form is None else 'POST'}")
        return route, None if route.form is None or body is None else route.form(**body)

    def frames(self, path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
        _, asked = self.checked(path, body)
        yield from self._frames(asked)

    def _frames(self, asked: schemas.AskGenerate) -> Iterator[bytes]:
        one = self.shelf.find(asked.model)
        steps = generation_stream.generate(one, self.shelf.task(one), asked)
        yield counted(pack(next(steps)))
        try:
            for step in steps:
                yield counted(pack(step))
        except QKVError as error:
            yield counted(pack({"kind": "error", "error": str(error)}))

    def _routes(self) -> dict[str, Route]:
        of_runs = {
            "heads": (schemas.OfStack, views.heads_view, False),
            "attention": (schemas.OfLayer, views.attention, False),
            "tile": (schemas.AskTile, views.tile, False),
            "row": (schemas.AskRow, views.row, False),
            "map": (schemas.AskMap, views.map_view, False),
            "neuron": (schemas.AskNeuron, views.neuron_view, True),
            "residual": (schemas.OfStack, views.residual, True),
            "write": (schemas.AskRow, views.write, True),
            "lens": (schemas.AskGuesses, views.lens_view, True),
            "contributions": (schemas.AskContributions, views.contributions_view, True),
            "embeddings": (schemas.AskGuesses, views.embeddings_view, True),
        }
        made = {
            f"/api/{name}": Route(form=form, answer=self._of_run(view, passes=passes))
            for name, (form, view, passes) in of_runs.items()
        }
        well = {"ok": True, "version": version("qkv")}
        return made | {
            "/api/health": Route(form=None, answer=lambda _: dict(well), type=JSON, is_quick=True),
            "/api/models": Route(form=None, answer=lambda _: self.shelf.listed(), type=JSON),
            "/api/models/add": Route(form=schemas.AddModel, answer=self._add, type=JSON),
            "/api/taps": Route(form=schemas.OfModel, answer=self._taps, type=JSON),
            "/api/run": Route(form=schemas.AskRun, answer=lambda asked: told(self.runs.ask(asked)), type=JSON),
            "/api/it": Route(form=schemas.AskIt, answer=self._it),
            "/api/positions": Route(form=schemas.AskPositions, answer=self._positions),
            "/api/timeline": Route(form=schemas.AskTimeline, answer=self._timeline),
            "/api/compare": Route(form=schemas.AskCompare, answer=self._compare),
            "/api/generate": Route(form=schemas.AskGenerate, answer=self._frames, type=FRAMES),
            "/api/translate": Route(form=schemas.AskTranslate, answer=self._translate),
            "/api/cost/choices": Route(form=None, answer=lambda _: costs.choices(), type=JSON),
            "/api/cost": Route(form=schemas.AskCost, answer=self._cost, type=JSON),
            "/api/export": Route(form=schemas.AskExport, answer=lambda asked: export(self, asked)),
        }

    def _of_run(self, view: Callable[[Any, Any], Any], *, passes: bool) -> Callable[[Any], Any]:
        """`passes`: the view uses parts of the model, so no intervention may be at work in it meanwhile."""

        def answer(asked: schemas.OfRun | schemas.AskMap) -> dict[str, Any]:
            run = self.runs.find(asked.run)
            with run.open.lock if passes else nullcontext(), torch.no_grad():
                return view(run, asked)

        return answer

    def _add(self, asked: schemas.AddModel) -> dict[str, Any]:
        return self.shelf.describe(self.shelf.add(asked.path))

    def _taps(self, asked: schemas.OfModel) -> dict[str, Any]:
        task = self.shelf.task(self.shelf.find(asked.model))
        return {"taps": [name for name in named_taps(task.model) if not name.endswith(".inputs")]}

    def _it(self, asked: schemas.AskIt) -> dict[str, Any]:
        one = self.shelf.find(asked.model)
        with one.lock:
            found = coreference(
                self.shelf.task(one), asked.text, pronoun=asked.pronoun, candidates=list(asked.candidates)
            )
        return views.fields_of(found) | {"says": found.says, "agrees": found.agrees, "verdict": found.verdict}

    def _positions(self, asked: schemas.AskPositions) -> dict[str, Any]:
        one = self.shelf.find(asked.model)
        with one.lock:
            return {"similarity": position_similarity(self.shelf.task(one).model, asked.n)}

    def _timeline(self, asked: schemas.AskTimeline) -> dict[str, Any]:
        run = self.shelf.find(asked.model).run
        if run is None or not run.checkpoint_steps():
            raise InputError(f"{asked.model}: is no run with checkpoints, which a time line is drawn from")
        # Each is a model of its own, read anew: no lock is needed, and one at a time is held.
        checkpoints = ((step, load(run.checkpoint_folder(step))) for step in run.checkpoint_steps())
        found = checkpoint_timeline(checkpoints, asked.text, asked.second, stack=asked.stack)
        return views.fields_of(found) | {"patterns": PATTERNS, "losses": found.losses}

    def _compare(self, asked: schemas.AskCompare) -> dict[str, Any]:
        with torch.no_grad():
            return views.compare(self.runs.find(asked.left), self.runs.find(asked.right), asked)

    def _translate(self, asked: schemas.AskTranslate) -> dict[str, Any]:
        one = self.shelf.find(asked.model)
        return translation.translate(one, self.shelf.task(one), asked)

    def _cost(self, asked: schemas.AskCost) -> dict[str, Any]:
        config = None if asked.model is None else self.shelf.config(self.shelf.find(asked.model))
        return costs.cost(asked, config)
