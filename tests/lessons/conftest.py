"""Running a lesson as the command does, and reading what it printed."""

from dataclasses import dataclass

import pytest
from matplotlib import image

from qkv import lessons


@dataclass(frozen=True)
class Told:
    """What a lesson printed."""

    text: str

    def row(self, start: str, which: int = 0) -> list[str]:
        """The cells after the first in the table row that starts with these words; `which` of several."""
        start = f"  {start}"
        found = [line for line in self.text.splitlines() if line.startswith(start)]
        assert len(found) > which, f"{len(found)} rows start with {start!r}"
        return found[which].removeprefix(start).split()

    def numbers(self, start: str, which: int = 0) -> list[float]:
        return [float(cell.replace(",", "").replace("−∞", "-inf")) for cell in self.row(start, which)]


@pytest.fixture
def told(capsys, tmp_path):
    """Runs a lesson once, with its picture, and checks what holds for all lessons."""

    def run(name, *, seed=0):
        picture = tmp_path / f"{name}.png"
        lessons.run(name, plot=picture, seed=seed)
        text = capsys.readouterr().out
        info = lessons.LESSONS[name]
        assert info.title in text
        assert all(f"Lecture {letter}: {lessons.LECTURES[letter]}" in text for letter in info.lectures)
        assert max(len(line) for line in text.splitlines()) <= 100
        assert text == text.encode().decode(), "plain text, also when piped"
        assert "\x1b" not in text
        check_picture(picture)
        return Told(text)

    return run


def check_picture(path):
    pixels = image.imread(path)
    height, width, _ = pixels.shape
    assert width >= 600, (width, height)
    assert height >= 300, (width, height)
    drawn = (pixels[..., :3].min(-1) < 0.9).mean()
    assert drawn > 0.01, f"only {drawn:.2%} of the picture is not white"
