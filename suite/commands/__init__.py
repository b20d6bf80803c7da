"""The command line: one file a command. `run_suite.py` gives it the repository's tables and folders.

Every fault of the caller's is one line on standard error and exit code 2, before anything is trained. A grid with runs
that failed exits with 1, an interrupted one with 130. Modules that import torch, pandas or matplotlib, which takes
seconds, are imported inside the commands that need them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from subquad.suite.commands.bench import bench
from subquad.suite.commands.check import check
from subquad.suite.commands.collect import collect
from subquad.suite.commands.compare import compare
from subquad.suite.commands.console import lost_output
from subquad.suite.commands.data import data_app
from subquad.suite.commands.doctor import doctor
from subquad.suite.commands.evaluate import evaluate
from subquad.suite.commands.export import export
from subquad.suite.commands.generate import generate
from subquad.suite.commands.listing import list_names
from subquad.suite.commands.profile import profile
from subquad.suite.commands.publish import publish
from subquad.suite.commands.report import report
from subquad.suite.commands.repository import Repository
from subquad.suite.commands.results import results_app
from subquad.suite.commands.run import run
from subquad.suite.commands.show import show
from subquad.suite.commands.status import status
from subquad.suite.commands.submissions import submissions_app
from subquad.suite.commands.submit import submit
from subquad.suite.commands.weights import weights_app
from subquad.suite.environment import CALL, named_commit
from subquad.suite.options import reason_of, shortened, visible
from subquad.suite.store.target import StoreError

INTERRUPTED = 130
"""Exit code of a command that a signal has ended."""


UsageError: Any = typer.BadParameter.__bases__[0]
"""The library of the command line raises this error for words that it does not understand."""


class _Commands(TyperGroup):
    """The commands, whose wrong words are one line, as all other faults, without the words of pydantic."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with _one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _one_line(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line(ctx: Any) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if isinstance(error.__cause__, ValidationError):
            error.message = reason_of(error.__cause__)
        text = error.format_message().rstrip(".")
        if text.startswith("Usage: "):
            # the help, for a group without a command
            raise
        # a choice that is missing has its values on lines of their own
        text = " ".join(text.split())
        # an option without its argument is an error without a context
        asked = error.ctx.command_path.removeprefix(ctx.command_path) if error.ctx else ctx.invoked_subcommand
        command = (asked or "").lstrip()
        help_of = " ".join(filter(None, (CALL, command, "--help")))
        raise ValueError(f"{command}: {text}; see {help_of}".removeprefix(": ")) from None


app = typer.Typer(
    name="run_suite.py",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    pretty_exceptions_enable=False,
    # plain help appears in two thirds of the time that rich takes to draw boxes
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from subquad.suite.environment import version

        print(version())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Benchmark and reproduction suite for sub-quadratic sequence models."""


app.command("list")(list_names)
app.command()(run)
app.command()(status)
app.command()(collect)
app.command()(report)
app.command()(publish)
app.command()(export)
app.command()(compare)
app.command()(show)
app.command()(generate)
app.command()(evaluate)
app.command()(check)
app.command()(bench)
app.command()(profile)
app.command()(submit)
app.command()(doctor)
app.add_typer(data_app, name="data")
app.add_typer(results_app, name="results")
app.add_typer(submissions_app, name="submissions")
app.add_typer(weights_app, name="weights")


@functools.cache
def command_tree() -> Any:
    """The commands, whose signatures are read once a process."""
    return typer.main.get_command(app)


def _refuse_empty(words: Sequence[str]) -> None:
    """Raises ValueError for an empty word. None of the commands takes one, and as a path it would be this folder."""
    for count, word in enumerate(words, start=1):
        if word == "" or (word.startswith("--") and word.find("=") == len(word) - 1):
            call = shlex.join(words[:count])
            raise ValueError(f"{call}: the last word is empty; give a value (is a variable unset?), or leave it out")


def main(repository: Repository, arguments: Sequence[str] | None = None) -> None:
    """Carries out one command and exits. arguments: those of the process unless given."""
    interrupted = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        torch = sys.modules.get("torch")
        if torch is not None and getattr(torch.__spec__, "_initializing", False):
            # an exception in the middle of this import aborts the process in C++; nothing has started yet
            os._exit(INTERRUPTED)
        interrupted.set()
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    if sys.stdout is None:
        # the caller has closed it (`>&-`)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # in ASCII, which PYTHONIOENCODING can ask for, a mark such as the double dagger would end the command
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _refuse_empty(sys.argv[1:] if arguments is None else arguments)
        named_commit()
        command_tree()(args=arguments, obj=repository)
    except SystemExit as end:
        # the library of the command line exits with 1 after an interruption
        code = INTERRUPTED if interrupted.is_set() else end.code
    except KeyboardInterrupt:
        # the library builds its commands before it looks for an interruption
        code = INTERRUPTED
    except (ValueError, StoreError) as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        code = 2
    except OSError as error:
        # a stream drops what it could not write, so that only a further character tells whether it was this one
        if error.filename is not None or not lost_output("\n"):
            # the system says this about a path or an address that was given
            where = "" if error.filename is None else f"{shortened(str(error.filename))}: "
            what = "; change its permissions, or name another place" * isinstance(error, PermissionError)
            print(f"error: {visible(where + (error.strerror or str(error)))}{what}", file=sys.stderr)
        code = 2
    sys.exit(2 if lost_output() else code)
