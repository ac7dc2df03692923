"""Reject command-line options that have no effect in the selected mode."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from typer.core import TyperCommand

from qkv.errors import InputError

if TYPE_CHECKING:
    from typer import Context
else:
    # Commands receive an instance of this class at run time. `typer.Context` is a subclass of it.
    Context = TyperCommand.context_class


def reject_other_options(context: Context, allowed: Collection[str], reason: str) -> None:
    """Raise `InputError` if an option other than `allowed` was given on the command line.

    If such options were silently ignored, users might think that they have an effect. Values from environment variables
    (QKV_DATA) are not rejected because they are not specific to this call.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in allowed and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{'/'.join((*parameter.opts, *parameter.secondary_opts))} {reason}")
