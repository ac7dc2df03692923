"""Fixtures shared with the tests of nn."""

from tests.nn.conftest import unchecked

__all__ = ["unchecked"]
