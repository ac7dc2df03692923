"""What holds for every test: the same numbers each time, and no fight over the cores."""

import os
import signal

import hypothesis
import pytest
import torch

# Derandomized, so that a test fails for everyone or for nobody; no deadline and no check of how long examples take to
# draw, so that no result depends on the speed of the machine.
hypothesis.settings.register_profile(
    "qkv",
    deadline=None,
    derandomize=True,
    max_examples=30,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("qkv")


def pytest_collection_modifyitems(items):
    """QKV_EXAMPLES=500: so many examples of every law, also where a test asks for fewer; `make test-long` does it."""
    if "QKV_EXAMPLES" not in os.environ:
        return
    for item in items:
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            law = getattr(item.obj, "__func__", item.obj)
            asked = getattr(law, "_hypothesis_internal_use_settings", None)
            many = hypothesis.settings(asked, max_examples=int(os.environ["QKV_EXAMPLES"]))
            law._hypothesis_internal_use_settings = many


# A shell starts what it runs in the background with Ctrl-C ignored, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers_each_time():
    torch.manual_seed(0)
