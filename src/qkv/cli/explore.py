"""`qkv explore`: the page on a local port."""

import sys
from typing import Annotated

import typer

from qkv.cli.model_argument import complete_shipped_names
from qkv.errors import MissingExtraError

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Runs, model folders, files or shipped names; the shipped are there too.",
        autocompletion=complete_shipped_names,
    ),
]
Port = Annotated[int, typer.Option(metavar="N", help="Of this machine alone; nobody else can reach it.")]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")]


def explore(models: Models = None, *, port: Port = 8477, no_browser: NoBrowser = False) -> None:
    """See what models do inside: attention, lens, live generation with its cache, cost. Until Ctrl-C.

    Prints the address, which carries a token made for this time alone, and opens it where there is a browser.

    \b
    Examples:
      qkv explore                                   the shipped models
      qkv explore runs/1 path/to/hf-model           your own beside them
      qkv explore --port 9000 --no-browser
    """
    try:
        from qkv.serving.server import listen, serve
    except ImportError as error:
        raise MissingExtraError(
            f"the explorer needs the package {error.name}; install it with: pip install 'qkv[serve]'"
        ) from None
    from qkv.serving.worker import Apart
    from qkv.serving.standalone_page import NOT_BUILT, is_built

    listen(port).close()  # before anything is read from disk
    if not is_built():
        print(NOT_BUILT, file=sys.stderr)

    def ready(address: str) -> None:
        print(f"qkv explorer at {address}", flush=True)
        print("Ctrl-C stops it.", file=sys.stderr)

    try:
        with Apart(models or []) as explorer:
            serve(explorer, port=port, browser=not no_browser, ready=ready)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
