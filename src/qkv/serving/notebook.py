"""The page in a notebook, or as one file: `qkv.explore(model, "text")`."""

import json
from html import escape
from pathlib import Path
from typing import Any

from qkv.data.file_io import convert_disk_errors
from qkv.errors import InputError, MissingExtraError
from qkv.serving.schemas import Replayed
from qkv.serving.explorer import Explorer
from qkv.serving.export import everything, replayed
from qkv.serving.hugging_face import PublishedModel, PublishedTokenizer, need_tokenizer, task_from_published
from qkv.serving.model_registry import ModelRegistry
from qkv.serving.standalone_page import NOT_BUILT, is_built, single_file
from qkv.tasks import LanguageModel, Task, TextEncoder, Translator, load

HEIGHT = 760
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
    return Explored(Explorer(ModelRegistry(memory={name: task}, zoo=False)), name, text, second)


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
        with convert_disk_errors(Path(path), len(made)):
            Path(path).write_bytes(made)

    def answers(self) -> list[Any]:
        """What the file holds: every view of this text that needs no further choice."""
        return [replayed(self.explorer, one).recorded for one in everything(self.explorer, self._run)]

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
