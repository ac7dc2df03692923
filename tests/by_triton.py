"""Marks for tests of kernels: they run in Triton's interpreter, without run-time checks, which would rewrite them."""

import os
from importlib.util import find_spec

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
has_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
BY_TRITON = [pytest.mark.compiled, has_triton]
