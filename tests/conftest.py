"""Settings for all tests: fixed seeds, hypothesis profile, number of threads, and the device that kernels run on."""

import os
import signal
from importlib.util import find_spec

import hypothesis
import pytest

from qkv.cli import limit_openmp_spinning

limit_openmp_spinning()  # must be called before torch is imported

import torch  # noqa: E402

# Without a GPU, Triton kernels run in Triton's interpreter. The variable must be set before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

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


@pytest.hookimpl(tryfirst=True)  # before pytest selects the tests by their marks
def pytest_collection_modifyitems(items):
    """Mark the tests of kernels, and set the number of hypothesis examples to QKV_EXAMPLES if it is set."""
    for item in items:
        if "kernel_device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.compiled)  # run-time checks would rewrite the kernels
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


@pytest.fixture(scope="session")
def device():
    """The GPU if there is one, and otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def kernel_device(device):
    """The device on which Triton kernels run. On a CPU, Triton's interpreter runs them."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed (pip install triton)")
    return device


@pytest.fixture(autouse=True, scope="session")
def _full_float32():
    """Run recurrent models on a GPU in full float32 precision, as the CUDA backend does."""
    from qkv.utils import CUDNN_TF32_DISABLED

    with CUDNN_TF32_DISABLED:
        yield


RELATIVE_TOLERANCES = {torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Maximum error of each dtype, relative to the largest value of a tensor. Sums are added up in different orders."""


@pytest.fixture(scope="session")
def assert_agree():
    """A function that asserts that two tensors agree up to the rounding of their dtype."""

    def assert_agree_(actual, expected, *, dtype=None):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        tolerance = RELATIVE_TOLERANCES[dtype or expected.dtype] * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)

    return assert_agree_
