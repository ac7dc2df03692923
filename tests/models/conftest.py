"""What the tests of models share with those of their parts."""

from tests.nn.conftest import unchecked

__all__ = ["unchecked"]
