"""Record statistics of the mutation tests."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def record():
    """Append the statistics of a test as a JSON line to the file in QKV_FIGURES, if it is set."""

    def write(name: str, **figures: int) -> None:
        if "QKV_FIGURES" in os.environ:
            with Path(os.environ["QKV_FIGURES"]).open("a") as file:
                file.write(json.dumps({"sweep": name, **figures}) + "\n")

    return write
