"""A pytest plugin (-p tests.cuda.skip_passed --passed FILE): adds tests that pass to FILE, and leaves out those in it.

The next visit repeats a step of `gpu_check` that was cut off, and so goes on with the tests that have not passed.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--passed", type=Path, required=True, help="a file with the names of tests that have passed"
    )


class AddPassed:
    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self.file.open("a") as file:
                file.write(report.nodeid + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that all workers of pytest-xdist report to
        config.pluginmanager.register(AddPassed(config.getoption("passed")))


# Last, so that what other plugins deselect (-m, -k) is not counted.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = config.getoption("passed")
    passed = set(file.read_text().splitlines()) if file.exists() else set()
    left_out = [item for item in items if item.nodeid in passed]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in passed]


# Where nothing is left to run, pytest's status would be that of a command that names no test.
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("passed").exists():
        session.exitstatus = pytest.ExitCode.OK
