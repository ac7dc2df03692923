"""The MODEL argument shared by all commands that load a model."""

from typing import Annotated

import typer


def complete_shipped_names(incomplete: str) -> list[str]:
    """Complete the names of shipped models. The shell itself completes files and folders."""
    from qkv.zoo import shipped_model_folders

    return [name for name in shipped_model_folders() if name.startswith(incomplete)]


ModelArgument = Annotated[
    str,
    typer.Argument(
        help="Name of a shipped model, or path to a run folder, Hugging Face model folder or model file.",
        autocompletion=complete_shipped_names,
    ),
]
