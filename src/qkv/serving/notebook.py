"""Show the explorer in a notebook or save it as a standalone page: `qkv.explore(model, "text")`."""

import json
from html import escape
from pathlib import Path
from typing import Any

from qkv.data.file_io import convert_os_errors_to_disk_error
from qkv.errors import InputError, MissingExtraError
from qkv.serving.explorer import Explorer
from qkv.serving.export import replay_request, view_requests_with_defaults
from qkv.serving.hugging_face import PublishedModel, PublishedTokenizer, check_tokenizer_passed, task_from_published
from qkv.serving.model_registry import ModelRegistry
from qkv.serving.schemas import APIRequest
from qkv.serving.standalone_page import PAGE_NOT_BUILT, RecordedResponse, build_standalone_page, is_page_built
from qkv.tasks import LanguageModel, Task, TextEncoder, Translator, load

HEIGHT = 760
RELAY_SCRIPT = (Path(__file__).parent / "relay.js").read_text(encoding="utf-8")
"""Widget script that shows the page in an iframe and relays its requests to Python."""


def explore(
    model: Task | PublishedModel | str | Path,
    text: str,
    second: str | None = None,
    *,
    tokenizer: PublishedTokenizer | None = None,
) -> "ExplorerPage":
    """Show what a model computes for a text.

    A notebook displays the result as the explorer's page, and `.save` writes the page to a file. `model` is a task, a
    path or name that `qkv.load` accepts, or a `transformers` model, which also requires its `tokenizer`. `second` is
    the translation of the text or the second text of a pair.
    """
    match model:
        case LanguageModel() | TextEncoder() | Translator():
            task = model
        case str() | Path():
            task = load(model)
        case PublishedModel():
            task = task_from_published(model, check_tokenizer_passed(tokenizer), name=type(model).__name__)
    name = Path(task.name).name or "model"
    return ExplorerPage(Explorer(ModelRegistry(memory={name: task}, zoo=False)), name, text, second)


class ExplorerPage:
    """An explorer page for one model and one text."""

    def __init__(self, explorer: Explorer, name: str, text: str, second: str | None) -> None:
        self.explorer = explorer
        body = {"model": name, "text": text} | ({} if second is None else {"second": second})
        self._run_request = APIRequest(path="/api/run", body=body)
        self._run = json.loads(replay_request(explorer, self._run_request).recorded.response)
        self._name = name

    def __repr__(self) -> str:
        return (
            f"ExplorerPage({self._name}, {len(self._run['sequence']['ids'])} tokens). Displayed as a page in notebooks."
        )

    def html(self, *, live: bool = False) -> str:
        """Return the HTML of the page with its recorded responses.

        If `live` is true, the page can send further requests.
        """
        if not is_page_built():
            raise InputError(PAGE_NOT_BUILT)
        return build_standalone_page(self.record_responses(), live=live)

    def save(self, path: str | Path) -> None:
        """Save the page as a standalone HTML file that needs no server."""
        content = self.html().encode()
        with convert_os_errors_to_disk_error(Path(path), len(content)):
            Path(path).write_bytes(content)

    def record_responses(self) -> list[RecordedResponse]:
        """Return the responses that a saved page contains, one for every view of the text with default settings."""
        return [
            replay_request(self.explorer, request).recorded
            for request in view_requests_with_defaults(self.explorer, self._run_request)
        ]

    def _repr_html_(self) -> str:
        attributes = f'sandbox="allow-scripts allow-downloads" style="width:100%;height:{HEIGHT}px;border:0"'
        return f'<iframe {attributes} srcdoc="{escape(self.html())}"></iframe>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:  # noqa: ANN401, ARG002
        """Return an interactive widget if anywidget is installed, or the static page otherwise."""
        try:
            data, metadata = self.widget()._repr_mimebundle_()
        except MissingExtraError:
            data, metadata = {"text/html": self._repr_html_()}, {}
        return {**data, "text/plain": repr(self)}, metadata

    def widget(self) -> Any:  # noqa: ANN401 - the type belongs to an optional library
        """Return a Jupyter widget whose page can send further requests. Requires anywidget."""
        try:
            import anywidget
            import traitlets
        except ImportError:
            raise MissingExtraError(
                "the widget requires the package anywidget; install it with: pip install 'qkv[notebook]'"
            ) from None

        class PageWidget(anywidget.AnyWidget):
            _esm = RELAY_SCRIPT
            html = traitlets.Unicode().tag(sync=True)
            height = traitlets.Int(HEIGHT).tag(sync=True)

        widget = PageWidget(html=self.html(live=True))
        widget.on_msg(self.handle_message)
        return widget

    def handle_message(self, widget: Any, message: dict[str, Any], _buffers: Any = None) -> None:  # noqa: ANN401
        """Handle a request that the page sent through the widget, and return the response to the page."""
        body = message.get("body")
        response = self.explorer.handle_request(str(message.get("path")), body if isinstance(body, dict) else None)
        header = {"qkv": message.get("qkv"), "status": response.status, "content_type": response.content_type}
        widget.send(header, [response.body])
