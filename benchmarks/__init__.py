"""Benchmarks against other libraries: `python -m benchmarks NAME`."""
