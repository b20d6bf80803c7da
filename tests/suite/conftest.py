"""The command line in the process of the tests, where torch is loaded already."""

from typing import NamedTuple

import pytest

from subquad.run_suite import REPOSITORY
from subquad.suite.commands import main


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
