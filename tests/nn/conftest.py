"""Fixtures shared by the tests of nn."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Disable run-time shape checks, so that the library's own error is raised instead of the checker's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
