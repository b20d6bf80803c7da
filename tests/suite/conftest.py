"""The command line in the process of the tests, where torch is loaded already."""

from typing import NamedTuple

import pytest

from subquad.run_suite import REPOSITORY
from subquad.suite.commands import main


@pytest.fixture(scope="session", autouse=True)
def runs_in_this_process():
    """Lets `run` carry out one run at a time in this process, since a worker needs a second of it for its first run.

    Workers carry out the runs where a test asks for several at a time, and where it calls `run_all` itself.
    """
    # the process that hands tests to others imports no torch
    from subquad.suite.executors import local

    run_all = local.run_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "run_all", lambda *args, jobs=0, **more: run_all(*args, jobs=jobs * (jobs > 1), **more))
        yield


class Done(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command_line(monkeypatch, capsys):
    """Calls a command, e.g. `command_line("run", "quickstart")`; `repository` replaces the tables of the repository."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments, repository=REPOSITORY):
        with pytest.raises(SystemExit) as end:
            main(repository, [*map(str, arguments)])
        return Done(int(end.value.code or 0), *capsys.readouterr())

    return call
