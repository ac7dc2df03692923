"""What the tests of the parts share."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """No run-time shape checks, as a user has it: the library's own message must come, not the checker's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
