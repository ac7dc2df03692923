"""Which model is meant? One argument for all commands that take one."""

from typing import Annotated

import typer


def shipped_names(incomplete: str) -> list[str]:
    """For the shell's Tab; folders and files are found by the shell itself."""
    from qkv.zoo import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(
        help="A shipped name, a run folder, a Hugging Face folder, or a file.", autocompletion=shipped_names
    ),
]
