"""The `qkv explore` command."""

import sys
from typing import Annotated

import typer

from qkv.cli.options import complete_shipped_names
from qkv.errors import MissingExtraError

ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Run folders, model folders or model files to open in addition to the shipped models.",
        autocompletion=complete_shipped_names,
    ),
]
PortOption = Annotated[
    int, typer.Option(metavar="N", help="Port on localhost. Other machines cannot connect to this port.")
]
NoBrowserOption = Annotated[
    bool, typer.Option("--no-browser", help="Print the address without opening it in a browser.")
]


def explore(models: ModelsArgument = None, *, port: PortOption = 8477, no_browser: NoBrowserOption = False) -> None:
    """Serve the interactive explorer until Ctrl-C is pressed.

    The explorer shows attention, the logit lens, live generation with the KV cache, and costs. Its address is printed
    and, if a browser is available, opened there. The address contains an access token that is valid only for this
    session.

    \b
    Examples:
      qkv explore                                   # the shipped models
      qkv explore runs/1 path/to/hf-model           # your own models as well
      qkv explore --port 9000 --no-browser
    """
    try:
        from qkv.serving.server import open_listening_socket, serve
    except ImportError as error:
        raise MissingExtraError(
            f"the explorer requires the package {error.name}; install it with: pip install 'qkv[serve]'"
        ) from None
    from qkv.serving.standalone_page import PAGE_NOT_BUILT, is_page_built
    from qkv.serving.worker import WorkerClient

    open_listening_socket(port).close()  # raises an error before any model is loaded if the port is in use
    if not is_page_built():
        print(PAGE_NOT_BUILT, file=sys.stderr)

    def print_address(address: str) -> None:
        print(f"qkv explorer is running at {address}", flush=True)
        print("Press Ctrl-C to stop.", file=sys.stderr)

    try:
        with WorkerClient(models or []) as explorer:
            serve(explorer, port=port, browser=not no_browser, ready=print_address)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
