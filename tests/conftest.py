"""Settings for all tests: fixed seeds, hypothesis profile and number of threads."""

import os
import signal

import hypothesis
import pytest
import torch

# Derandomized, so that results are reproducible. There are no deadlines and no checks of the generation time, so that
# results do not depend on the speed of the machine.
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
    """Set the number of examples of all hypothesis tests to QKV_EXAMPLES if it is set, as in `make test-long`."""
    if "QKV_EXAMPLES" not in os.environ:
        return
    for item in items:
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            function = getattr(item.obj, "__func__", item.obj)
            original = getattr(function, "_hypothesis_internal_use_settings", None)
            changed = hypothesis.settings(original, max_examples=int(os.environ["QKV_EXAMPLES"]))
            function._hypothesis_internal_use_settings = changed


# Shells start background processes with SIGINT ignored, but tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_torch_seed():
    torch.manual_seed(0)
