"""Texts with their labels, out of a table (.tsv, .csv) or JSON lines.

A table's first row names its columns; where columns are given as numbers, counted from 1, it has no such row.
A blank line may stand at the end alone: between rows it is a row that lost its text.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from math import isfinite
from pathlib import Path
from typing import Any

from qkv.config.base import suggest_closest
from qkv.data.documents import read_lines
from qkv.data.text_sources import TextSource, find_single_file, open_source
from qkv.errors import InputError

LABEL_SEPARATOR = ","
"""Between the labels of one text, in a table; a JSON line has a list."""
MAX_LISTED_LABELS = 8


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Where a row's texts and its label stand; nothing said: the usual names, as far as the file has them."""

    text: tuple[str, ...] = ()
    """One column, or two for a pair; `text`, else `text_a` and `text_b`."""
    label: str | None = None
    """`label`; where a number is asked for, `score` if there is one."""


@dataclass(frozen=True, kw_only=True)
class LabeledTexts:
    """Rows in the order they were read."""

    name: str
    """What messages call it: the file."""
    texts: list[tuple[str, ...]]
    """One text, or the two of a pair."""
    labels: list[tuple[str, ...]]
    """As written; one, unless several were asked for."""
    lines: list[int]

    def __post_init__(self) -> None:
        if not self.texts:
            raise InputError(f"{self.name}: holds no row with text and label")

    @property
    def is_pairs(self) -> bool:
        return len(self.texts[0]) == 2

    def location(self, row: int) -> str:
        return f"{self.name}: line {self.lines[row]}"

    def numeric_labels(self) -> list[float]:
        """The labels as numbers."""
        values = []
        for row, (label, *_) in enumerate(self.labels):
            try:
                number = float(label)
            except ValueError:
                raise InputError(f"{self.location(row)}: '{label[:80]}' is no number") from None
            if not isfinite(number):
                raise InputError(f"{self.location(row)}: {label} is no finite number")
            values.append(number)
        return values

    def class_names(self) -> tuple[str, ...]:
        """Every label there is, sorted; there must be two."""
        names = tuple(sorted({label for labels in self.labels for label in labels}))
        if len(names) < 2:
            what = f"all {len(self.labels)} rows have the label {names[0]!r}" if names else "no row has a label"
            raise InputError(f"{self.name}: {what}; there must be at least 2 to tell apart")
        return names

    def class_indices(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """Each row's labels by their places in `names`, which were seen in training."""
        location = {name: number for number, name in enumerate(names)}
        numeric_labels = []
        for row, labels in enumerate(self.labels):
            for label in labels:
                if label not in location:
                    shown = ", ".join(names[:MAX_LISTED_LABELS]) + (", …" if len(names) > MAX_LISTED_LABELS else "")
                    raise InputError(
                        f"{self.location(row)}: the label '{label[:80]}' is not among the {len(names)} of training "
                        f"({shown}){suggest_closest(label, list(names))}"
                    )
            numeric_labels.append(tuple(location[label] for label in labels))
        return numeric_labels


def labeled_texts_from_rows(name: str, rows: Iterable[Sequence[Any]]) -> LabeledTexts:
    """Rows that are in memory: (text, label) or (text, text, label); several labels are a list."""
    texts, labels = [], []
    for number, row in enumerate(rows, 1):
        if len(row) not in (2, 3):
            raise InputError(f"{name}: row {number} has {len(row)} entries; it is (text, label) or (text, text, label)")
        *row_texts, label = row
        texts.append(tuple(_get_text(f"{name}: row {number}", "text", {"text": text}) for text in row_texts))
        labels.append(tuple(map(str, label)) if isinstance(label, list | tuple) else (str(label),))
    if len({len(row_texts) for row_texts in texts}) > 1:
        raise InputError(f"{name}: some rows have one text, some two")
    return LabeledTexts(name=name, texts=texts, labels=labels, lines=list(range(1, len(texts) + 1)))


def read_labeled_texts(
    path: str | Path, columns: ColumnNames = ColumnNames(), *, is_numeric: bool = False, multi_label: bool = False  # noqa: B008
) -> LabeledTexts:  # fmt: skip
    """`is_numeric`: the label is a score. `multi_label`: a text may have several labels, or none."""
    source = find_single_file(path)
    match source.file_type:
        case ".jsonl":
            records = _read_json_records
        case ".tsv" | ".csv":
            records = _read_table_records
        case ending:
            raise InputError(f"{source.name}: labelled texts are .tsv, .csv or .jsonl, not '{ending}'")
    texts, labels, lines = [], [], []
    choose = _ColumnResolver(source.name, columns, is_numeric=is_numeric)
    with open_source(source) as (_, stream):
        for line, record in _check_blank_lines(source.name, records(source, stream, columns)):
            location = f"{source.name}: line {line}"
            names, label = choose.columns(record)
            texts.append(tuple(_get_text(location, name, record) for name in names))
            labels.append(_get_labels(location, label, record, multi_label=multi_label))
            lines.append(line)
    return LabeledTexts(name=source.name, texts=texts, labels=labels, lines=lines)


Record = dict[str, Any]


class _ColumnResolver:
    """Which columns are meant, decided at the first row."""

    def __init__(self, name: str, columns: ColumnNames, *, is_numeric: bool) -> None:
        self._name = name
        self._column_names = columns
        self._is_number = is_numeric
        self._chosen: tuple[tuple[str, ...], str] | None = None

    def columns(self, record: Record) -> tuple[tuple[str, ...], str]:
        if self._chosen is None:
            text = self._column_names.text or (("text",) if "text" in record else ("text_a", "text_b"))
            label = self._column_names.label or ("score" if self._is_number and "score" in record else "label")
            for name in (*text, label):
                if name not in record:
                    self._raise_missing_column(name, list(record))
            self._chosen = text, label
        return self._chosen

    def _raise_missing_column(self, name: str, available: list[str]) -> None:
        wanted = "text" if name == "text_a" and not self._column_names.text else name
        option = "--label" if name == (self._column_names.label or "label") else "--text"
        has = ", ".join(available)[:200] or "none"
        raise InputError(f"{self._name}: has no column '{wanted}' (it has: {has}); name another: {option} COLUMN")


def _check_blank_lines(name: str, records: Iterator[tuple[int, Record | None]]) -> Iterator[tuple[int, Record]]:
    blank = None
    for line, record in records:
        if record is None:
            blank = blank or line
        elif blank is not None:
            raise InputError(f"{name}: line {blank}: is empty, and rows follow it")
        else:
            yield line, record


def _read_table_records(
    source: TextSource, stream: BufferedIOBase, columns: ColumnNames
) -> Iterator[tuple[int, Record | None]]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit, 128 KB, is far below a document
    layout = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if source.file_type == ".tsv" else {}
    rows = csv.reader(read_lines(source.name, stream), **layout)
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
                    f"{source.name}: line {rows.line_num}: has {len(row)} columns, the first row has {len(header)}"
                )
            yield rows.line_num, None if is_blank else dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise InputError(f"{source.name}: line {rows.line_num}: not a table: {error}") from None


def _check_unique_columns(name: str, header: list[str]) -> None:
    for number, column in enumerate(header):
        if column and column in header[:number]:
            raise InputError(
                f"{name}: line 1: columns {header.index(column) + 1} and {number + 1} are both called '{column}'"
            )


def _read_json_records(
    source: TextSource, stream: BufferedIOBase, _columns: ColumnNames
) -> Iterator[tuple[int, Record | None]]:
    for number, line in enumerate(read_lines(source.name, stream), start=1):
        if not line.strip():
            yield number, None
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{source.name}: line {number}: not valid JSON: {error}") from None
        if not isinstance(record, dict):
            raise InputError(f"{source.name}: line {number}: holds a {type(record).__name__}, not an object")
        yield number, record


def _get_field(location: str, name: str, record: Record) -> Any:  # noqa: ANN401 - whatever a JSON line holds
    if name not in record:
        raise InputError(f"{location}: has no field '{name}' (it has: {', '.join(record)[:200]})")
    return record[name]


def _get_text(location: str, name: str, record: Record) -> str:
    text = _get_field(location, name, record)
    if not isinstance(text, str):
        raise InputError(f"{location}: '{name}' is a {type(text).__name__}, not text")
    if not (text := text.strip()):
        raise InputError(f"{location}: '{name}' is empty")
    return text


def _get_labels(location: str, name: str, record: Record, *, multi_label: bool) -> tuple[str, ...]:
    value = _get_field(location, name, record)
    if multi_label:
        many = value if isinstance(value, list) else str(value).split(LABEL_SEPARATOR)
        return tuple(sorted({label for each in many if (label := str(each).strip())}))
    if isinstance(value, list | dict):
        raise InputError(
            f"{location}: '{name}' is a {type(value).__name__}; where a text may have several labels, say so"
        )
    if value is None or not (label := str(value).strip()):
        raise InputError(f"{location}: '{name}' is empty")
    return (label,)
