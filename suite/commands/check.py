"""`check`: checks whether a model, task or operator, such as one of a plugin, obeys the laws of those of the suite."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from subquad.suite.commands.repository import Plugins, Repository, Set, repository_of
from subquad.suite.contracts import MissingDataError
from subquad.suite.options import options_in, parse
from subquad.suite.plugins import reason_of

SLOW = 30.0
"""Seconds that a law of a sound model is far from, also on a busy machine."""


class Part(StrEnum):
    model = "model"
    task = "task"
    operator = "operator"


def check(
    context: typer.Context,
    part: Annotated[Part, typer.Argument(help="What to check.")],
    name: Annotated[str, typer.Argument(help="Its name, e.g. gla or mqar; see `list`.")],
    plugins: Plugins = None,
    overrides: Set = None,
) -> None:
    """Check a model (causality, steps, gradients), a task (seeds, splits, labels) or an operator (accuracy, gradients).

    Exit code 1 if a law is broken. The networks of a model are small, in float64 and on the CPU. The splits of a task
    are read several times: make large ones smaller, e.g. by --set num_train=1000. Kernels of an operator run on the
    GPU, or with TRITON_INTERPRET=1 in Triton's interpreter.
    """
    repository = repository_of(context, plugins)
    if part is Part.model:
        if check_model(repository, name, overrides or ()):
            raise typer.Exit(1)
        return
    if part is Part.operator:
        if overrides:
            raise ValueError("--set: an operator has no settings; its shapes are in its workload")
        if _try(name, *_of_operator(repository.operators.load(name))):
            raise typer.Exit(1)
        return
    built = parse(repository.tasks.load(name), _options(overrides or (), part), f"task {name}")

    from subquad.suite.laws import tasks as laws

    try:
        rows = laws.everything(built)
    except MissingDataError as error:
        # the option of other commands, which this one does not have
        raise ValueError(str(error).replace("--data ", "--set data=")) from None
    broken = _try(name, laws.LAWS, built)
    print(f"digest of its rows at seed 0: {laws.digest(rows)[:16]}")
    if broken:
        raise typer.Exit(1)


def check_model(repository: Repository, name: str, overrides: Sequence[str] = ()) -> int:
    """Tries all laws of models, prints a line for each, and returns how many are broken.

    overrides: options of the model as `key=value`.
    """
    from subquad.suite.laws import models as laws

    config = repository.models.load(name)
    options = _options(overrides, Part.model)
    parse(config, options, f"model {name}")
    # options that do not go together are a fault of the caller's and break no law
    try:
        laws.build(config, **options)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"model {name} cannot be built: {reason_of(error)}") from error
    return _try(name, laws.LAWS, config, needed=laws.calls_stand_alone, **options)


def _options(overrides: Sequence[str], part: Part) -> dict[str, Any]:
    texts = [text.removeprefix(f"{part.value}.") for text in overrides]
    return options_in(texts, "--set", "option=value, e.g. num_train=1000")


def _of_operator(workload: Any) -> tuple[Iterable[Callable[..., None]], Any]:
    """The laws of operators, and the operator on the GPU, where there is one."""
    import os

    import torch

    from subquad.suite.laws import operators as laws
    from subquad.suite.laws.calls import Operator

    gpu = torch.cuda.is_available()
    compiled = gpu or os.environ.get("TRITON_INTERPRET") == "1"
    operator = Operator(workload, device="cuda" if gpu else "cpu", compiled=compiled)
    if not operator.functions():
        raise ValueError(
            f"{workload.op}: none of its implementations runs here; kernels need a GPU or TRITON_INTERPRET=1"
        )
    return laws.LAWS, operator


class _Printed:
    """Standard output while a law is tried: passes everything on to standard error and counts the lines."""

    def __init__(self) -> None:
        self.lines = 0

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _try(name: str, laws: Iterable[Callable[..., None]], *arguments: Any, needed: object = None, **options: Any) -> int:
    """Tries all laws, prints a line for each, and returns how many are broken.

    needed: the law without which the others mean nothing. If it is broken, none of them is tried.
    """
    from rich.console import Console

    from subquad.suite.laws.tasks import NotApplicable

    console = Console(soft_wrap=True)

    def say(word: str, what: str, reason: str = "", style: str | None = None) -> None:
        text = f"{word:<8}{what}" + (f":\n        {reason}" if reason else "")
        console.print(text, style=style, markup=False, highlight=False)

    words: list[str] = []
    seen: set[str] = set()
    printed = _Printed()
    for law in laws:
        what = (law.__doc__ or law.__name__).splitlines()[0].rstrip(".")
        start = time.perf_counter()
        try:
            # `console` has the standard output of before, so verdicts and what the code under test prints are apart
            with contextlib.redirect_stdout(printed):
                law(*arguments, **options)
        except NotApplicable as reason:
            words.append("n/a")
            say("n/a", what, str(reason))
        except (Exception, SystemExit) as error:
            wrong = isinstance(error, AssertionError)
            text = str(error) if wrong else f"{type(error).__name__}: {error}"
            words.append("broken")
            say("broken" if wrong else "raised", what, "the same" if text in seen else text, "red")
            seen.add(text)
        else:
            words.append("ok")
            say("ok", what)
        if (seconds := time.perf_counter() - start) > SLOW:
            say("", f"this law took {seconds:.0f} s: its networks are tiny, so something is slow")
        if words[-1] == "broken" and law is needed:
            console.print(
                f"{name} breaks the first law, without which the others mean nothing; they are tried once it holds",
                markup=False,
                highlight=False,
            )
            return 1
    if printed.lines:
        say("", f"{name} printed {printed.lines} lines, here to standard error; a run prints as much")
    broken, tried = words.count("broken"), len(words) - words.count("n/a")
    verdict = f"breaks {broken} of {tried}" if broken else f"obeys all {tried}"
    console.print(f"{name} {verdict} laws", markup=False, highlight=False)
    return broken
