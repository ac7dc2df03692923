"""Format benchmark results as Markdown and append them to a file."""

import datetime as dt
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine

RESULTS_HEADER = """# Results

Each section was appended by one run of `python -m benchmarks NAME`. Within a run, the engines are timed in turn, and
the best time of each engine is reported. Compare ratios and peak rates only within a run. The "speedup" is the time
of an engine divided by the best time of qkv.
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A section of the benchmark results."""

    name: str
    description: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    versions: Mapping[str, str]
    load: float
    files: Mapping[str, Any] = field(default_factory=dict)
    """Contents of JSON files, keyed by file name. The files are written if the output is a folder."""
    plots: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of PNG files, keyed by file name."""

    def text(self) -> str:
        versions = {"Python": platform.python_version(), **self.versions}
        lines = [
            f"## {self.name}, {dt.datetime.now(dt.UTC).date().isoformat()}",
            "",
            self.description,
            "",
            f"Machine: {machine.processor()}, {machine.available_cores()} cores; {machine.describe_load(self.load)}.",
            "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
            "",
            _format_format_row(self.columns),
            _format_format_row(["---", *["---:"] * (len(self.columns) - 1)]),
            *(_format_format_row(row) for row in self.rows),
            "",
            *(f"- {note}" for note in self.notes),
        ]
        return "\n".join(lines).rstrip() + "\n"


def append(report: Report, path: Path) -> None:
    before = path.read_text(encoding="utf-8") if path.exists() else RESULTS_HEADER
    path.write_text(before.rstrip() + "\n\n" + report.text(), encoding="utf-8")


def write_files(report: Report, folder: Path) -> None:
    for name, figures in report.files.items():
        (folder / name).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def write_plots(report: Report, folder: Path) -> None:
    for name, picture in report.plots.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture)


def _format_format_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
