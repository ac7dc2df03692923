"""pytest plugin that installs a planted bug and runs the test that must fail because of it.

Usage: `python -m pytest -p tests.planted_bugs.plugin --planted-bug=NAME`. The exit status is 1 if the test failed on an
assertion, 0 if the bug was missed, and 3 if the bug or the test raised another exception: a patch that no longer fits
the function it replaces must not pass for a caught bug.
"""

import inspect
from pathlib import Path

import pytest
from hypothesis import Phase, settings

BROKEN = pytest.ExitCode.INTERNAL_ERROR
"""Exit status when a test failed for another reason than an assertion; also that of an exception in a bug itself."""

_is_broken = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--planted-bug", required=True, help="name of a function in tests/planted_bugs/bugs.py")


def pytest_configure(config: pytest.Config) -> None:
    # It is enough that an example fails: it does not have to be shrunk or explained. Hypothesis reads the profile when
    # a test is defined, so it is loaded before the test is imported.
    settings.register_profile("planted bug", phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
    settings.load_profile("planted bug")
    from tests.planted_bugs import bugs

    test = getattr(bugs, config.getoption("--planted-bug"))()
    file = Path(inspect.getfile(inspect.unwrap(test))).relative_to(config.rootpath)
    config.args = [f"{file}::{test.__name__}"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    is_assertion = call.excinfo is not None and call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
    if report.failed and (report.when != "call" or not is_assertion):
        item.session.stash[_is_broken] = True
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.stash.get(_is_broken, False):
        session.exitstatus = BROKEN
