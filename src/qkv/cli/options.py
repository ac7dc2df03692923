"""Options, arguments and input texts that several commands share.

The input texts of a command are its arguments or, if there are none, the lines of standard input. Commands that print
one line per text print a blank line for a blank text so that the lines of input and output correspond. The exception is
`generate`, which continues an empty prompt.

This module imports torch only when a model is loaded or a device is selected.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from typer.core import TyperCommand

from qkv.choices import BackendName, InferenceDType
from qkv.cli.output import print_status
from qkv.errors import ConfigError, InputError

if TYPE_CHECKING:
    import torch

    from qkv.config import ModelConfig
    from qkv.tasks import Task, TextEncoder, TokenizedInput
    from qkv.tasks.loader import AnyTask
    from qkv.tasks.text_encoder import TextOrPair

DeviceOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="Device to run on: cpu, cuda or auto (a GPU if one is available)."),
]
Int8Option = Annotated[
    bool,
    typer.Option(
        "--int8",
        help="Quantize weights and activations to int8, which is faster but slightly less accurate (CPU only).",
    ),
]
DtypeOption = Annotated[InferenceDType, typer.Option(help="Data type of the weights and activations.")]

BackendOption = Annotated[
    BackendName,
    typer.Option(
        help="Implementation of the model: auto (the fastest that supports the model), eager (plain PyTorch), cpu or "
        "cuda. `qkv doctor` reports what auto selects, and why."
    ),
]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device, data type and backend that a command uses for its model."""

    device: str = "auto"
    dtype: InferenceDType = InferenceDType.FLOAT32
    int8: bool = False
    backend: BackendName = BackendName.AUTO

    def load_task_and_print_remarks(self, model: str) -> "Task":
        """Load a model and print its warnings."""
        from qkv.tasks import load

        task = load(model, int8=self.int8, device=self.device, dtype=self.dtype, backend=self.backend)
        _print_remarks(task, model)
        return task

    def load_task_as_and_print_remarks(self, kind: "type[AnyTask]", model: str) -> "AnyTask":
        """Load a model, check that it has the given task type, and print its warnings."""
        from qkv.tasks import load_as

        task = load_as(kind, model, int8=self.int8, device=self.device, dtype=self.dtype, backend=self.backend)
        _print_remarks(task, model)
        return task


def _print_remarks(task: "Task", model: str) -> None:
    for remark in task.remarks:
        print_status(f"{model}: {remark}")


def select_device(name: str) -> "torch.device":
    """Return the torch device for `cpu`, `cuda` or `auto`. Torch is imported only when this function is called."""
    from qkv.utils import resolve_device

    return resolve_device(name)


def next_run_folder() -> Path:
    """Return the first path of runs/1, runs/2, … that does not exist."""
    number = 1
    while os.path.lexists(f"runs/{number}"):
        number += 1
    return Path(f"runs/{number}")


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


Result = TypeVar("Result")

TEXTS_PER_BATCH = 2048
"""Number of texts that are sorted by length and processed at a time, which is limited because a large input may not fit
into memory."""


def iter_input_texts(arguments: list[str] | None) -> Iterator[str]:
    """Yield the texts given as arguments or, if there are none, the lines of standard input."""
    yield from arguments or iter_file_or_stdin_lines("-")


def iter_file_or_stdin_lines(path: str) -> Iterator[str]:
    """Yield the lines of a file or of standard input without line endings.

    `-` stands for standard input. Compressed files are decompressed. An empty file raises `InputError`.
    """
    from qkv.data.documents import STANDARD_INPUT, open_raw_and_decompressed, parse_single_file_source, read_utf8_lines

    name = "standard input" if path == STANDARD_INPUT else path
    empty = True
    with open_raw_and_decompressed(parse_single_file_source(path)) as (_, stream):
        for line in read_utf8_lines(name, stream):
            empty = False
            yield line.rstrip("\r\n")
    if empty:
        raise InputError(
            f"no text was given as an argument, and {name} is empty"
            if path == STANDARD_INPUT
            else f"{name}: the file is empty"
        )


def split_tab_separated_pairs(texts: Iterable[str]) -> "Iterator[TextOrPair]":
    """Yield each text that contains a tab as a pair of texts, and yield all other texts unchanged."""
    for number, text in enumerate(texts, start=1):
        columns = text.split("\t")
        if len(columns) > 2:
            raise InputError(
                f"text {number} has {len(columns)} columns, but must have 1 (a text) or 2 (a pair, separated by a tab)"
            )
        yield (columns[0], columns[1]) if len(columns) == 2 else text


def escape_newlines(text: str) -> str:
    """Escape line breaks so that a text is printed on a single line."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


def is_blank(text: "TextOrPair | tuple[str, ...]") -> bool:
    """Return whether a text contains only whitespace. For a pair, both texts must contain only whitespace."""
    return not "".join(text).strip()


def _is_not_blank(tokenized: "TokenizedInput") -> bool:
    return not is_blank(tokenized.texts)


def map_tokenized_texts(
    batches: "Iterable[list[TokenizedInput]]",
    function: "Callable[[list[TokenizedInput]], Sequence[Result]]",
    *,
    is_included: "Callable[[TokenizedInput], bool]" = _is_not_blank,
) -> "Iterator[tuple[TokenizedInput, Result | None]]":
    """Apply a batched function to the texts and yield (text, result) in the order of the input.

    Texts that are not included (by default: blank texts) are skipped, and their result is None.
    """
    for batch in batches:
        included = [is_included(tokenized) for tokenized in batch]
        selected = [tokenized for tokenized, include in zip(batch, included, strict=True) if include]
        results = iter(function(selected) if selected else ())
        for tokenized, include in zip(batch, included, strict=True):
            yield tokenized, next(results) if include else None


def tokenize_in_batches_and_report_truncation(
    task: "TextEncoder",
    texts: "Iterable[TextOrPair]",
    *,
    truncate: bool,
    max_tokens: int | None = None,
    parse_special_tokens: bool = False,
) -> "Iterator[list[TokenizedInput]]":
    """Tokenize the texts in batches of `TEXTS_PER_BATCH`, and print how many texts were truncated."""
    remaining, n_texts, n_truncated = iter(texts), 0, 0
    while batch := list(islice(remaining, TEXTS_PER_BATCH)):
        tokenized_batch = task.tokenize(
            batch,
            truncate=truncate,
            max_tokens=max_tokens,
            parse_special_tokens=parse_special_tokens,
            first_number=n_texts + 1,
        )
        n_texts += len(batch)
        n_truncated += sum(tokenized.n_truncated > 0 for tokenized in tokenized_batch)
        yield tokenized_batch
    if n_truncated:
        limit = min(max_tokens or task.model.config.context_length, task.model.config.context_length)
        print_status(f"{n_truncated:,} of {n_texts:,} texts were truncated to {limit:,} tokens")


def resolve_model_config(name: str) -> "ModelConfig":
    """Load the config of a preset, config file, run folder, model folder (native or Hugging Face) or shipped model."""
    from qkv.config import PRESETS, preset
    from qkv.config.base import did_you_mean_suffix
    from qkv.zoo import shipped_model_folders

    path = Path(name)
    if path.is_file():
        return _load_config_file(path)
    if path.is_dir() and (config_file := _find_model_or_checkpoint_config(path)) is not None:
        return _load_config_file(config_file)
    if name in PRESETS:
        return preset(name)
    shipped_models = shipped_model_folders()
    if name in shipped_models:
        return _load_config_file(shipped_models[name] / "config.json")
    if path.is_dir():
        raise InputError(f"{name}: the folder contains neither a config.json nor checkpoints of a run")
    hint = did_you_mean_suffix(name, [*PRESETS, *shipped_models])
    raise InputError(
        f"{name}: is not a preset, file, folder or shipped model{hint}; available presets: {', '.join(PRESETS)}"
    )


def _find_model_or_checkpoint_config(folder: Path) -> Path | None:
    """Return the path of the config.json in a model folder or, for a run, in its last checkpoint."""
    if (folder / "config.json").is_file():
        return folder / "config.json"
    return max((folder / "checkpoints").glob("*/config.json"), default=None)


def _load_config_file(path: Path) -> "ModelConfig":
    from qkv.config import load_config

    if path.suffix != ".json" or not _is_hugging_face_config(path):
        return load_config(path)
    from qkv.weights.families import config_from_published

    try:
        return config_from_published(json.loads(path.read_text(encoding="utf-8")))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _is_hugging_face_config(path: Path) -> bool:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # load_config raises an error that describes the problem
    return isinstance(settings, dict) and "family" not in settings and "model_type" in settings
