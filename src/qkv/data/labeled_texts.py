"""Read labeled texts from tables (.tsv, .csv) and JSON Lines files, and build batches of similar lengths.

The first row of a table is a header, unless columns are specified by number (counted from 1). Blank lines are only
allowed at the end of a file. Elsewhere, they indicate a row with missing text.

Each epoch shuffles the rows, splits them into pools of `BATCHES_PER_POOL` batches, sorts each pool by length and
shuffles the batches. Batch t is a pure function of (seed, t).
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BufferedIOBase
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from qkv.config.base import did_you_mean_suffix
from qkv.data.documents import TextSource, open_raw_and_decompressed, parse_single_file_source, read_utf8_lines
from qkv.data.sampler import Permutation
from qkv.errors import InputError
from qkv.tensors import AttentionMask, Ids
from qkv.text import Encoding

LABEL_SEPARATOR = ","
"""Separator between multiple labels in a table cell. JSON Lines files use lists instead."""
MAX_LISTED_LABELS = 8


Record = dict[str, Any]
BATCHES_PER_POOL = 50
"""Number of batches whose rows are sorted together.

A pool of this size is large enough for rows in the same batch to have nearly equal lengths.
"""
Targets = Int[Tensor, "row"] | Float[Tensor, "row"] | Float[Tensor, "row class"]
"""Class indices, regression targets, or multi-hot label vectors."""


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Names of the columns that contain the texts and labels."""

    text: tuple[str, ...] = ()
    """Name of the text column, or of the two columns of a text pair (default: `text`, or `text_a` and `text_b`)."""
    label: str | None = None
    """Name of the label column (default: `label`, or `score` for regression if that column exists)."""


@dataclass(frozen=True, kw_only=True)
class LabeledTexts:
    """Labeled texts, in the same order as in the file."""

    name: str
    """Name used in error messages, usually the name of the file."""
    texts: list[tuple[str, ...]]
    """Text or text pair in each row."""
    labels: list[tuple[str, ...]]
    """Labels of each row, as written in the file. Rows have exactly one label except in multi-label problems."""
    line_numbers: list[int]
    """Line number of each row in the file."""

    def __post_init__(self) -> None:
        if not self.texts:
            raise InputError(f"{self.name}: contains no labeled texts")

    @property
    def is_pairs(self) -> bool:
        return len(self.texts[0]) == 2

    def location(self, row: int) -> str:
        """Return the file name and line number of a row for use in error messages."""
        return f"{self.name}: line {self.line_numbers[row]}"

    def numeric_labels(self) -> list[float]:
        """Return the labels as numbers. Raises `InputError` if a label is not a finite number."""
        values = []
        for row, (label, *_) in enumerate(self.labels):
            try:
                number = float(label)
            except ValueError:
                raise InputError(f"{self.location(row)}: the label must be a number, got '{label[:80]}'") from None
            if not isfinite(number):
                raise InputError(f"{self.location(row)}: the label must be a finite number, got {label}")
            values.append(number)
        return values

    def class_names(self) -> tuple[str, ...]:
        """Return the distinct labels in sorted order. Raises `InputError` if there are fewer than two."""
        names = tuple(sorted({label for labels in self.labels for label in labels}))
        if len(names) < 2:
            problem = f"all {len(self.labels)} rows have the label {names[0]!r}" if names else "no row has a label"
            raise InputError(f"{self.name}: {problem}; at least 2 different labels are required")
        return names

    def class_indices(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """Convert the labels of each row to indices into `names`, the class names used in training."""
        index_by_name = {name: index for index, name in enumerate(names)}
        rows = []
        for row, labels in enumerate(self.labels):
            for label in labels:
                if label not in index_by_name:
                    listed = ", ".join(names[:MAX_LISTED_LABELS]) + (", …" if len(names) > MAX_LISTED_LABELS else "")
                    raise InputError(
                        f"{self.location(row)}: unknown label '{label[:80]}'{did_you_mean_suffix(label, list(names))}; "
                        f"the {len(names)} training labels are {listed}"
                    )
            rows.append(tuple(index_by_name[label] for label in labels))
        return rows


def labeled_texts_from_rows(name: str, rows: Iterable[Sequence[Any]]) -> LabeledTexts:
    """Create labeled texts from (text, label) or (text, text, label) rows. Multiple labels are passed as a list."""
    texts, labels = [], []
    for number, row in enumerate(rows, 1):
        if len(row) not in (2, 3):
            raise InputError(
                f"{name}: row {number}: expected (text, label) or (text, text, label), got {len(row)} values"
            )
        *row_texts, label = row
        texts.append(
            tuple(_get_stripped_nonempty_text(f"{name}: row {number}", "text", {"text": text}) for text in row_texts)
        )
        labels.append(tuple(map(str, label)) if isinstance(label, list | tuple) else (str(label),))
    if len({len(row_texts) for row_texts in texts}) > 1:
        raise InputError(f"{name}: rows with one text and rows with two texts cannot be combined")
    return LabeledTexts(name=name, texts=texts, labels=labels, line_numbers=list(range(1, len(texts) + 1)))


def read_labeled_texts(
    path: str | Path,
    columns: ColumnNames = ColumnNames(),  # noqa: B008
    *,
    prefer_score_column: bool = False,
    multi_label: bool = False,
) -> LabeledTexts:
    """Read labeled texts from a .tsv, .csv or .jsonl file.

    With `prefer_score_column`, the default label column is `score` if that column exists. With `multi_label`, a text
    may have any number of labels.
    """
    source = parse_single_file_source(path)
    match source.file_type:
        case ".jsonl":
            records = _read_json_records
        case ".tsv" | ".csv":
            records = _read_table_rows
        case file_type:
            raise InputError(f"{source.name}: labeled texts must be in a .tsv, .csv or .jsonl file, got '{file_type}'")
    texts, labels, lines = [], [], []
    resolver = _TextLabelColumnResolver(source.name, columns, prefer_score_column=prefer_score_column)
    with open_raw_and_decompressed(source) as (_, stream):
        for line, record in _skip_only_trailing_blank_lines(source.name, records(source, stream, columns)):
            location = f"{source.name}: line {line}"
            names, label = resolver.resolve_from_first_record(record)
            texts.append(tuple(_get_stripped_nonempty_text(location, name, record) for name in names))
            labels.append(_get_labels(location, label, record, multi_label=multi_label))
            lines.append(line)
    return LabeledTexts(name=source.name, texts=texts, labels=labels, line_numbers=lines)


class _TextLabelColumnResolver:
    """Resolver that determines the text and label columns from the first row."""

    def __init__(self, name: str, columns: ColumnNames, *, prefer_score_column: bool) -> None:
        self._name = name
        self._column_names = columns
        self._prefer_score_column = prefer_score_column
        self._chosen: tuple[tuple[str, ...], str] | None = None

    def resolve_from_first_record(self, record: Record) -> tuple[tuple[str, ...], str]:
        if self._chosen is None:
            text = self._column_names.text or (("text",) if "text" in record else ("text_a", "text_b"))
            label = self._column_names.label or (
                "score" if self._prefer_score_column and "score" in record else "label"
            )
            for name in (*text, label):
                if name not in record:
                    self._raise_missing_column(name, list(record))
            self._chosen = text, label
        return self._chosen

    def _raise_missing_column(self, name: str, available: list[str]) -> None:
        missing = "text" if name == "text_a" and not self._column_names.text else name
        option = "--label-column" if name == (self._column_names.label or "label") else "--text-column"
        listed = ", ".join(available)[:200] or "none"
        raise InputError(
            f"{self._name}: column '{missing}' not found; available columns: {listed} (select one with {option} COLUMN)"
        )


def _skip_only_trailing_blank_lines(
    name: str, records: Iterator[tuple[int, Record | None]]
) -> Iterator[tuple[int, Record]]:
    blank = None
    for line, record in records:
        if record is None:
            blank = blank or line
        elif blank is not None:
            raise InputError(f"{name}: line {blank} is blank; blank lines are only allowed at the end of the file")
        else:
            yield line, record


def _read_table_rows(
    source: TextSource, stream: BufferedIOBase, columns: ColumnNames
) -> Iterator[tuple[int, Record | None]]:
    csv.field_size_limit(2**31 - 1)  # the default limit of 128 KB is too small for documents
    layout = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if source.file_type == ".tsv" else {}
    rows = csv.reader(read_utf8_lines(source.name, stream), **layout)
    value = (*columns.text, *(() if columns.label is None else (columns.label,)))
    header: list[str] | None = None
    try:
        for row in rows:
            if header is None and value and all(name.isdigit() for name in value):
                header = [str(number) for number in range(1, len(row) + 1)]
            elif header is None:
                header = [name.strip() for name in row]
                _check_unique_columns(source.name, header)
                continue
            is_blank = not any(cell.strip() for cell in row)
            if not is_blank and len(row) != len(header):
                raise InputError(
                    f"{source.name}: line {rows.line_num}: expected {len(header)} columns, as in the first row, "
                    f"got {len(row)}"
                )
            yield rows.line_num, None if is_blank else dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise InputError(f"{source.name}: line {rows.line_num}: invalid table: {error}") from None


def _check_unique_columns(name: str, header: list[str]) -> None:
    for number, column in enumerate(header):
        if column and column in header[:number]:
            raise InputError(
                f"{name}: line 1: columns {header.index(column) + 1} and {number + 1} have the same name '{column}'"
            )


def _read_json_records(
    source: TextSource, stream: BufferedIOBase, _columns: ColumnNames
) -> Iterator[tuple[int, Record | None]]:
    for number, line in enumerate(read_utf8_lines(source.name, stream), start=1):
        if not line.strip():
            yield number, None
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{source.name}: line {number}: invalid JSON: {error}") from None
        if not isinstance(record, dict):
            raise InputError(f"{source.name}: line {number}: expected a JSON object, got {type(record).__name__}")
        yield number, record


def _get_field(location: str, name: str, record: Record) -> Any:  # noqa: ANN401 - any JSON value
    if name not in record:
        raise InputError(f"{location}: field '{name}' not found; available fields: {', '.join(record)[:200]}")
    return record[name]


def _get_stripped_nonempty_text(location: str, name: str, record: Record) -> str:
    text = _get_field(location, name, record)
    if not isinstance(text, str):
        raise InputError(f"{location}: '{name}' must be a string, got {type(text).__name__}")
    if not (text := text.strip()):
        raise InputError(f"{location}: '{name}' is empty")
    return text


def _get_labels(location: str, name: str, record: Record, *, multi_label: bool) -> tuple[str, ...]:
    value = _get_field(location, name, record)
    if multi_label:
        labels = value if isinstance(value, list) else str(value).split(LABEL_SEPARATOR)
        return tuple(sorted({label for each in labels if (label := str(each).strip())}))
    if isinstance(value, list | dict):
        raise InputError(
            f"{location}: '{name}' must be a single label, got {type(value).__name__}; only multi-label "
            "classification supports several labels per text"
        )
    if value is None or not (label := str(value).strip()):
        raise InputError(f"{location}: '{name}' is empty")
    return (label,)


class ConcatenatedEncodings:
    """Token sequences of different lengths, concatenated into one array."""

    def __init__(self, rows: Sequence[Encoding]) -> None:
        self.lengths = np.array([len(row.ids) for row in rows], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.ids = np.concatenate([np.array(row.ids, dtype=np.int64) for row in rows])
        self.segments = np.concatenate([np.array(row.segments, dtype=np.int64) for row in rows])

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, kw_only=True)
class LabeledBatch:
    """A padded batch of labeled texts."""

    ids: Ids
    segments: Ids | None
    """Segment ids for text pairs, or None for single texts."""
    attention_mask: AttentionMask | None
    """Mask that is `False` at padding, or None if all rows have the same length."""
    targets: Targets
    rows: Int[Tensor, "row"]
    """Indices of the rows in the data set."""
    n_tokens: int
    """Number of tokens without padding."""

    @property
    def n_targets(self) -> int:
        return self.targets.numel()

    def split(self, n_rows: int) -> "Iterator[LabeledBatch]":
        for start in range(0, len(self.ids), n_rows):
            part = slice(start, start + n_rows)
            yield replace(
                self,
                ids=self.ids[part],
                segments=None if self.segments is None else self.segments[part],
                attention_mask=None if self.attention_mask is None else self.attention_mask[part],
                targets=self.targets[part],
                rows=self.rows[part],
            )

    def to(self, device: torch.device | str) -> "LabeledBatch":
        return replace(
            self,
            ids=self.ids.to(device, non_blocking=True),
            segments=None if self.segments is None else self.segments.to(device, non_blocking=True),
            attention_mask=None if self.attention_mask is None else self.attention_mask.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
        )


class LengthGroupedLabeledBatches:
    """Source of endless training batches, and of evaluation batches that contain each row once."""

    def __init__(
        self,
        sequences: ConcatenatedEncodings,
        targets: Targets,
        *,
        batch_size: int,
        seed: int,
        pad_id: int,
        width_multiple: int = 1,
        max_width: int | None = None,
    ) -> None:
        """Prepare to create batches of the given sequences.

        Batch widths are rounded up to a multiple of `width_multiple` for efficient GPU use, but limited to `max_width`.
        """
        self._sequences = sequences
        self._targets = targets
        self._batch_size = batch_size
        self._seed = seed
        self._pad_id = pad_id
        self._width_multiple = width_multiple
        self._max_width = max_width or width_multiple * int(sequences.lengths.max())
        self._epoch_batches = lru_cache(maxsize=2)(self._shuffle_grouped_by_length)

    @property
    def n_batches(self) -> int:
        """Number of batches per epoch. One batch may be smaller than the others."""
        return -(-len(self._sequences) // self._batch_size)

    def batch(self, t: int) -> LabeledBatch:
        epoch, number = divmod(t, self.n_batches)
        return self._build_padded_batch(self._epoch_batches(epoch)[number])

    def eval_batches_sorted_by_length(self, n_rows: int) -> Iterator[LabeledBatch]:
        """Yield batches of up to `n_rows` rows, sorted by length. Each row occurs in exactly one batch."""
        by_length = np.argsort(self._sequences.lengths, kind="stable")
        for start in range(0, len(by_length), n_rows):
            yield self._build_padded_batch(by_length[start : start + n_rows])

    def _shuffle_grouped_by_length(self, epoch: int) -> list[NDArray[np.int64]]:
        n = len(self._sequences)
        rows = Permutation(n, self._seed, epoch, 0)(np.arange(n))
        pools = np.arange(n) // (BATCHES_PER_POOL * self._batch_size)
        rows = rows[np.lexsort((self._sequences.lengths[rows], pools))]
        batches = Permutation(self.n_batches, self._seed, epoch, 1)(np.arange(self.n_batches))
        return [rows[number * self._batch_size : (number + 1) * self._batch_size] for number in batches]

    def _build_padded_batch(self, rows: NDArray[np.int64]) -> LabeledBatch:
        sequences = self._sequences
        lengths = sequences.lengths[rows]
        width = min(-(-int(lengths.max()) // self._width_multiple) * self._width_multiple, self._max_width)
        columns = np.arange(width)
        attention_mask = columns < lengths[:, None]
        indices = np.where(attention_mask, sequences.starts[rows][:, None] + columns, 0)
        segments = sequences.segments[indices] * attention_mask
        return LabeledBatch(
            ids=torch.from_numpy(np.where(attention_mask, sequences.ids[indices], self._pad_id)),
            segments=torch.from_numpy(segments) if segments.any() else None,
            attention_mask=None if attention_mask.all() else torch.from_numpy(attention_mask),
            targets=self._targets[torch.from_numpy(rows)],
            rows=torch.from_numpy(rows),
            n_tokens=int(lengths.sum()),
        )
