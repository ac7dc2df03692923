"""One prepared run for all, to be copied: preparing takes longer than training it."""

import pytest

from tests.training.runs import copy_of, make_ready, trainer_of


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    return make_ready(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def trained(prepared, tmp_path_factory):
    """The same run, trained to its end."""
    copy = copy_of(prepared, tmp_path_factory.mktemp("trained") / "run")
    trainer_of(copy).train()
    return copy


@pytest.fixture
def run(prepared, tmp_path):
    """Makes a copy with other training settings; `name` keeps two of them apart."""

    def make(name="run", **training):
        return copy_of(prepared, tmp_path / name, **training)

    return make
