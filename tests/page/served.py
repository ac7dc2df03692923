"""The shipped model and small ones of the other families, served for the browser: python -m tests.page.served."""

from qkv.serving.explorer import Explorer
from qkv.serving.server import free_port, serve
from qkv.serving.shelf import Shelf
from tests.serving.asked import tasks


def main() -> None:
    small = {name: task for name, task in tasks().items() if name != "gpt"}
    explorer = Explorer(Shelf(["stories"], memory=small))
    serve(explorer, port=free_port(8500), browser=False, ready=lambda address: print(address, flush=True))


if __name__ == "__main__":
    main()
