"""Two options of pytest: `--limit-s` limits the processor time of a quick test, `--until` the time of a session."""

from __future__ import annotations

import os
import time

import pytest

LIMIT = "--limit-s"
UNTIL = "--until"
NO_TIME = "no time was left to begin it"


def pytest_addoption(parser):
    parser.addoption(
        LIMIT,
        type=float,
        metavar="SECONDS",
        help="fail if a test without the mark `slow` takes more processor time, set-up and child processes included",
    )
    parser.addoption(
        UNTIL,
        type=int,
        metavar="TIME",
        help="begin no test after this time, in seconds since 1970; it also decides which test comes first",
    )


def pytest_configure(config):
    limit_s = config.getoption(LIMIT)
    if limit_s is not None:
        config.pluginmanager.register(TimeLimit(limit_s))
    until = config.getoption(UNTIL)
    if until is not None:
        config.pluginmanager.register(Until(until))


class TimeLimit:
    """Fails the session and names the tests that exceed `limit_s` seconds without the mark `slow`.

    Processor time is counted instead of time on the clock, so that other work on the machine accuses no test. A child
    process counts once it has been waited for. The set-up of a fixture counts for the first test that uses it.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.offenders: dict[str, float] = {}

    @staticmethod
    def _processor_s() -> float:
        return sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.start_s = self._processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        # an attribute of the report travels from a worker of pytest-xdist to the process that prints the summary
        report.processor_s = self._processor_s() - self.start_s
        return report

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown" and "slow" not in report.keywords and report.processor_s > self.limit_s:
            self.offenders[report.nodeid] = report.processor_s

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session):
        if self.offenders and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter):
        if self.offenders:
            terminalreporter.section(f"more than {self.limit_s:g} s without the mark `slow`", red=True)
        for name, taken_s in sorted(self.offenders.items()):
            terminalreporter.line(f"{taken_s:.1f} s  {name}")


class Until:
    """Skips the tests that have not begun at the time `until`, and says how many they are.

    The order of the tests is turned by a number of places that depends on `until`, so that every test is among the
    first in some sessions. All workers of pytest-xdist are given the same number, because they need the same order.
    """

    def __init__(self, until: int) -> None:
        self.until = until

    def pytest_collection_modifyitems(self, items):
        first = self.until % max(len(items), 1)
        items[:] = items[first:] + items[:first]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        if time.time() > self.until:
            pytest.skip(NO_TIME)

    def pytest_terminal_summary(self, terminalreporter):
        left = [report for report in terminalreporter.getreports("skipped") if NO_TIME in str(report.longrepr)]
        if left:
            terminalreporter.section(f"{len(left)} tests had no time left to begin", yellow=True)
