"""The figures of the sweeps."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def record():
    """Into the file that QKV_FIGURES names, a line of JSON a sweep."""

    def write(name: str, **figures: int) -> None:
        if "QKV_FIGURES" in os.environ:
            with Path(os.environ["QKV_FIGURES"]).open("a") as file:
                file.write(json.dumps({"sweep": name, **figures}) + "\n")

    return write
