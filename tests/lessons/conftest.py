"""Run a lesson as the command line does, and parse its output."""

from dataclasses import dataclass

import pytest
from matplotlib import image

from qkv import lessons
from tests.nn.conftest import unchecked

__all__ = ["LessonOutput", "unchecked"]


@dataclass(frozen=True)
class LessonOutput:
    """Standard output of a lesson."""

    text: str

    def row(self, start: str, which: int = 0) -> list[str]:
        """Cells after the first one in the table row that starts with `start`; `which` selects among several rows."""
        start = f"  {start}"
        rows = [line for line in self.text.splitlines() if line.startswith(start)]
        assert len(rows) > which, f"{len(rows)} rows start with {start!r}"
        return rows[which].removeprefix(start).split()

    def numbers(self, start: str, which: int = 0) -> list[float]:
        return [float(cell.replace(",", "").replace("−∞", "-inf")) for cell in self.row(start, which)]


@pytest.fixture
def run_lesson(capsys, tmp_path):
    """Run a lesson once with its figure, and check the properties that all lessons share."""

    def run(name, *, seed=0):
        figure = tmp_path / f"{name}.png"
        lessons.run(name, plot=figure, seed=seed)
        text = capsys.readouterr().out
        info = lessons.LESSONS[name]
        assert info.title in text
        assert all(f"Lecture {letter}: {lessons.LECTURES[letter]}" in text for letter in info.lectures)
        assert max(len(line) for line in text.splitlines()) <= 100
        assert text == text.encode().decode(), "plain text, also when piped"
        assert "\x1b" not in text
        check_figure(figure)
        return LessonOutput(text)

    return run


def check_figure(path):
    pixels = image.imread(path)
    height, width, _ = pixels.shape
    assert width >= 600, (width, height)
    assert height >= 300, (width, height)
    ink = (pixels[..., :3].min(-1) < 0.9).mean()
    assert ink > 0.01, f"only {ink:.2%} of the figure is not white"
