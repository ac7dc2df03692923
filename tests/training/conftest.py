"""Fixtures with a prepared run that tests copy, because preparing takes longer than training."""

import pytest

from tests.training.runs import build_cpu_trainer, copy_run, prepare_small_run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    return prepare_small_run(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def trained(prepared, tmp_path_factory):
    """A copy of the prepared run, trained to its end."""
    copy = copy_run(prepared, tmp_path_factory.mktemp("trained") / "run")
    build_cpu_trainer(copy).train()
    return copy


@pytest.fixture
def run(prepared, tmp_path):
    """Returns a function that copies the prepared run to `name` with other training settings."""

    def make(name="run", **training):
        return copy_run(prepared, tmp_path / name, **training)

    return make
