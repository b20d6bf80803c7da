"""A limit on the processor time of tests that the quick tier runs: the option `--limit-s` of pytest."""

from __future__ import annotations

import os

import pytest

LIMIT = "--limit-s"


def pytest_addoption(parser):
    parser.addoption(
        LIMIT,
        type=float,
        metavar="SECONDS",
        help="fail if a test without the mark `slow` takes more processor time, set-up and child processes included",
    )


def pytest_configure(config):
    limit_s = config.getoption(LIMIT)
    if limit_s is not None:
        config.pluginmanager.register(TimeLimit(limit_s))


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
