"""A pytest plugin (-p tests.cuda.print_failures) that prints each failure when it happens.

A step of `gpu_check` may be cut off, and then never reaches pytest's own report.
"""

from __future__ import annotations

from typing import Any

import pytest

WHOLE = 20  # failures that are printed in full; of the others only the last line


class PrintFailures:
    def __init__(self, config: pytest.Config) -> None:
        self.config, self.printed = config, 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        self.printed += 1
        text = report.longreprtext
        lines = text.splitlines() if self.printed <= WHOLE else text.splitlines()[-1:]
        terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        for line in [f"{report.nodeid} failed in {report.when} after {report.duration:.1f} s", *lines]:
            terminal.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # in a worker of pytest-xdist nothing that is printed is seen
        config.pluginmanager.register(PrintFailures(config))
