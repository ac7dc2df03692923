"""Benchmarks against other libraries: `python -m benchmarks NAME`."""

import os

# All libraries run with the setting of the `qkv` command (see `qkv.cli.limit_openmp_spinning`) so that they are
# compared under the same conditions. Engines may run in environments without qkv.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
