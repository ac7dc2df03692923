"""How a benchmark's figures are written down."""

import datetime as dt
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine

HEAD = """# Results

Each section is one run of `python -m benchmarks NAME`, appended by it: engines in turn in the same run, the best of
the repeats. Ratios and ceilings belong to that run alone; a timing is never a test.
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One section."""

    name: str
    what: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    versions: Mapping[str, str]
    load: float
    files: Mapping[str, Any] = field(default_factory=dict)
    """Names of JSON files, and what each holds: figures to work on, where a folder is asked for."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """Names of PNG files, and what each holds."""

    def text(self) -> str:
        versions = {"Python": platform.python_version(), **self.versions}
        lines = [
            f"## {self.name}, {dt.datetime.now(dt.UTC).date().isoformat()}",
            "",
            self.what,
            "",
            f"Machine: {machine.processor()}, {machine.n_cores()} cores; {machine.load_remark(self.load)}.",
            "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
            "",
            _line(self.columns),
            _line(["---", *["---:"] * (len(self.columns) - 1)]),
            *(_line(row) for row in self.rows),
            "",
            *(f"- {note}" for note in self.notes),
        ]
        return "\n".join(lines).rstrip() + "\n"


def append(report: Report, path: Path) -> None:
    before = path.read_text(encoding="utf-8") if path.exists() else HEAD
    path.write_text(before.rstrip() + "\n\n" + report.text(), encoding="utf-8")


def write_files(report: Report, folder: Path) -> None:
    for name, figures in report.files.items():
        (folder / name).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def write_pictures(report: Report, folder: Path) -> None:
    for name, picture in report.pictures.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
