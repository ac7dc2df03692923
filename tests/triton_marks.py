"""Pytest marks for tests that run kernels in Triton's interpreter.

They are marked as `compiled`, so that they run without runtime type checks, which would rewrite the kernels.
"""

import os
from importlib.util import find_spec

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
requires_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
TRITON_INTERPRETER_MARKS = [pytest.mark.compiled, requires_triton]
