"""Which options were given, though they mean nothing here?"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from typer.core import TyperCommand

from qkv.errors import InputError

if TYPE_CHECKING:
    from typer import Context
else:
    # What a command really gets; `typer.Context` is a subclass of it.
    Context = TyperCommand.context_class


def refuse_others(context: Context, known: Collection[str], reason: str) -> None:
    """An option beside the known ones is an error: passed over in silence, it would seem to have been heeded.

    What the environment says (QKV_DATA) is not meant for this call alone, and may stay.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in known and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{'/'.join((*parameter.opts, *parameter.secondary_opts))} {reason}")
