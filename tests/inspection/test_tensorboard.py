"""Metrics are written as TensorBoard scalars."""

import json
import sys
from types import ModuleType

import pytest

from qkv.errors import MissingExtraError
from qkv.inspection.tensorboard import import_tensorboard, rewrite_tensorboard_events


class Writer:
    """A fake SummaryWriter that stores its scalars."""

    scalars: list[tuple[str, float, int]]

    def __init__(self, folder):
        folder.mkdir()
        type(self).scalars = []

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


def test_every_number_is_written_as_a_scalar_and_old_files_are_removed(tmp_path, monkeypatch):
    library = ModuleType("torch.utils.tensorboard")
    library.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library)
    lines = [{"step": 1, "loss": 2.5, "tokens": 7}, {"step": 1, "validation_loss": 3.0, "is_best": True}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "old").touch()
    rewrite_tensorboard_events(tmp_path / "metrics.jsonl", tmp_path / "events")
    assert Writer.scalars == [("loss", 2.5, 1), ("tokens", 7, 1), ("validation_loss", 3.0, 1)]
    assert not (tmp_path / "events" / "old").exists()


def test_a_missing_tensorboard_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match="pip install tensorboard"):
        import_tensorboard()
