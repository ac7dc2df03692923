"""What holds for every test: the same numbers each time, and no fight over the cores."""

import os

import hypothesis
import pytest
import torch

# Derandomised, so that a red test is red for everyone; torch's first call alone may break a deadline.
hypothesis.settings.register_profile("qkv", deadline=None, derandomize=True, max_examples=30, print_blob=True)
hypothesis.settings.load_profile("qkv")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers_each_time():
    torch.manual_seed(0)
