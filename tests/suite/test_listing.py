"""Tests `list` on a terminal: a screen for each kind, with every name whole."""

import io
import re

import pytest
from rich.console import Console

from subquad.run_suite import REPOSITORY
from subquad.suite.commands import listing
from subquad.suite.commands.listing import Kind


def shown(monkeypatch, kind, width):
    written = io.StringIO()
    monkeypatch.setattr(listing, "table_console", lambda: Console(file=written, width=width, force_terminal=True))
    monkeypatch.setattr(listing, "repository_of", lambda context, plugins: REPOSITORY)
    listing.list_names(None, kind)
    return re.sub(r"\x1b\[[\d;]*m", "", written.getvalue())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("kind", [*Kind, "h3"])
def test_a_kind_fits_a_screen_and_names_are_whole(monkeypatch, kind, width):
    text = shown(monkeypatch, kind, width)
    lines = text.splitlines()
    assert len(lines) < 48
    assert max(map(len, lines)) <= width
    names = {
        Kind.tasks: list(REPOSITORY.tasks),
        Kind.models: list(REPOSITORY.models),
        Kind.experiments: [name.rpartition("/")[2] for name in REPOSITORY.experiments()],
        "h3": [name for name in REPOSITORY.experiments() if name.startswith("h3/")],
    }[kind]
    words = text.split()
    assert [name for name in names if name not in words] == []


def test_an_unknown_folder_is_refused_with_the_nearest(command_line):
    done = command_line("list", "mambo")
    assert done.returncode == 2
    assert "did you mean 'mamba'?" in done.stderr
