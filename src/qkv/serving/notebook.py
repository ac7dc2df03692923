"""The page in a notebook, or as one file: `qkv.explore(model, "text")`."""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from qkv.choices import Stack
from qkv.data.disk import writing
from qkv.errors import InputError, MissingExtraError
from qkv.serving.asking import Replayed
from qkv.serving.explorer import Explorer
from qkv.serving.exporting import replayed
from qkv.serving.hugging_face import PublishedModel, PublishedTokenizer, need_tokenizer, task_from_published
from qkv.serving.shelf import Shelf
from qkv.serving.single_file import NOT_BUILT, is_built, single_file
from qkv.tasks import LanguageModel, Task, TextEncoder, Translator, load

HEIGHT = 760
MOST_BYTES = 2**21
"""Of all heads' weights, up to which a file holds every head's own views."""
RELAY = (Path(__file__).parent / "relay.js").read_text(encoding="utf-8")
"""Puts the page into a frame, and hands its questions to Python and the answers back."""


def explore(
    model: Task | PublishedModel | str | Path, text: str, second: str | None = None, *,
    tokenizer: PublishedTokenizer | None = None,
) -> "Explored":  # fmt: skip
    """What a model does inside with a text: shown by a notebook as the explorer's page, `.save` writes it as one file.

    `model`: what `qkv.load` gives or takes, or a model of `transformers` with its `tokenizer`. `second`: a
    translation, or the second text of a pair.
    """
    match model:
        case LanguageModel() | TextEncoder() | Translator():
            task = model
        case str() | Path():
            task = load(model)
        case PublishedModel():
            task = task_from_published(model, need_tokenizer(tokenizer), name=type(model).__name__)
    name = Path(task.name).name or "model"
    return Explored(Explorer(Shelf(memory={name: task}, zoo=False)), name, text, second)


class Explored:
    """One model and one text, ready to be looked at."""

    def __init__(self, explorer: Explorer, name: str, text: str, second: str | None) -> None:
        self.explorer = explorer
        asked = {"model": name, "text": text} | ({} if second is None else {"second": second})
        self._run = Replayed(path="/api/run", body=asked)
        self._told = json.loads(replayed(explorer, self._run).recorded.answer)
        self._name = name

    def __repr__(self) -> str:
        return f"Explored({self._name}, {len(self._told['own']['ids'])} tokens; in a notebook it is the page)"

    def html(self, *, live: bool = False) -> str:
        """The page with its answers in it; `live`: it may ask for more."""
        if not is_built():
            raise InputError(NOT_BUILT)
        return single_file(self.answers(), live=live)

    def save(self, path: str | Path) -> None:
        """One file that opens from disk, anywhere."""
        made = self.html().encode()
        with writing(Path(path), len(made)):
            Path(path).write_bytes(made)

    def answers(self) -> list[Any]:
        """What the file holds: every view of this text that needs no further choice."""
        return [replayed(self.explorer, one).recorded for one in self._requests()]

    def _requests(self) -> Iterator[Replayed]:
        (described,) = self.explorer.shelf.listed()["models"]
        views, run = described["views"], self._told["run"]
        yield Replayed(path="/api/models")
        yield self._run
        for stack in self._told["stacks"]:
            named = {"run": run, "stack": stack["stack"]}
            yield Replayed(path="/api/heads", body=named)
            yield Replayed(path="/api/map", body=named)
            if "residual" in views and stack["stack"] != Stack.CROSS.value:
                yield Replayed(path="/api/residual", body=named)
            yield from self._of_layers(stack, views)
        for view in ("lens", "embeddings"):
            if view in views:
                yield Replayed(path=f"/api/{view}", body={"run": run})
        yield Replayed(path="/api/cost/choices")
        yield Replayed(path="/api/cost", body={"model": self._name})

    def _of_layers(self, stack: dict[str, Any], views: list[str]) -> Iterator[Replayed]:
        """What the page asks of a layer and a head when it comes to them; of a long text only of the first of each."""
        named = {"run": self._told["run"], "stack": stack["stack"]}
        is_long = 4 * stack["layers"] * stack["heads"] * stack["queries"] * stack["keys"] > MOST_BYTES
        looks = {"query": self._query(stack)}
        for layer in range(stack["layers"]):
            of_layer = {**named, "layer": layer}
            yield Replayed(path="/api/attention", body=of_layer)
            if is_long and layer > 0:
                continue
            yield Replayed(path="/api/row", body=of_layer | looks)
            if "residual" in views and stack["stack"] != Stack.CROSS.value:
                yield Replayed(path="/api/write", body=of_layer | looks)
            for head in range(1 if is_long else stack["heads"]):
                yield Replayed(path="/api/map", body={**of_layer, "head": head})
                if "neuron" in views:
                    yield Replayed(path="/api/neuron", body={**of_layer, "head": head} | looks)

    def _query(self, stack: dict[str, Any]) -> int:
        """The position that the page looks at first: the first [MASK], else the last word."""
        told, n = self._told, stack["queries"]
        if told["says"] == "here" and told["predictions"]:
            return told["predictions"][0]["position"]
        rows = told["source" if stack["stack"] == Stack.ENCODER.value else "own"]
        return n - 2 if n > 2 and rows["is_special"][n - 1] else n - 1

    def _repr_html_(self) -> str:
        frame = f'sandbox="allow-scripts allow-downloads" style="width:100%;height:{HEIGHT}px;border:0"'
        return f'<iframe {frame} srcdoc="{escape(self.html())}"></iframe>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:  # noqa: ANN401, ARG002
        """A widget that can go on asking, where anywidget is installed; else what the file would show."""
        try:
            data, about = self.widget()._repr_mimebundle_()
        except MissingExtraError:
            data, about = {"text/html": self._repr_html_()}, {}
        return {**data, "text/plain": repr(self)}, about

    def widget(self) -> Any:  # noqa: ANN401 - a library that may be missing
        try:
            import anywidget
            import traitlets
        except ImportError:
            raise MissingExtraError("the widget needs anywidget: pip install 'qkv[notebook]'") from None

        class Page(anywidget.AnyWidget):
            _esm = RELAY
            html = traitlets.Unicode().tag(sync=True)
            height = traitlets.Int(HEIGHT).tag(sync=True)

        made = Page(html=self.html(live=True))
        made.on_msg(self.reply)
        return made

    def reply(self, widget: Any, asked: dict[str, Any], _buffers: Any = None) -> None:  # noqa: ANN401
        """One question of the page, answered through the notebook."""
        body = asked.get("body")
        answer = self.explorer.ask(str(asked.get("path")), body if isinstance(body, dict) else None)
        widget.send({"qkv": asked.get("qkv"), "status": answer.status, "type": answer.type}, [answer.body])
