"""`run`, `results` and `load` for Python: what the commands do, with frames and models in place of printed tables.

    from subquad import load, results, run

Arguments have the names and meanings of the options of the commands, and a fault is a ValueError with the sentence
that the command would print. Modules that are slow to import are imported by the functions that need them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from subquad.suite.commands.repository import LOCAL, Repository, existing
from subquad.suite.options import shortened
from subquad.suite.store.target import target

if TYPE_CHECKING:
    import pandas as pd

    from subquad.suite.contracts import Task
    from subquad.suite.model import Model

Filter = Mapping[str, Any]
"""Key to a value, or to a list of alternatives: `{"model.name": ["gla", "dss-*"]}`."""


class Trained(NamedTuple):
    """A trained model, in evaluation mode, and the task that it was trained on."""

    model: Model
    task: Task


@dataclass(frozen=True)
class Notebook:
    """The functions for Python, over the tables and folders of a repository."""

    repository: Repository

    def run(
        self,
        *experiments: str,
        scale: str | None = None,
        only: Filter | None = None,
        set: Mapping[str, Any] | None = None,
        seeds: int | Iterable[int] | None = None,
        plugins: str | Path | Iterable[str | Path] = (),
        device: str | None = None,
        data: str | Path | None = None,
        results: str | Path = LOCAL,
        jobs: int | Literal["auto"] | None = None,
        threads: int = 1,
        keep_weights: bool = False,
        log: str | Iterable[str] = (),
        force: bool = False,
        quiet: bool = False,
    ) -> pd.DataFrame:
        """Carries out the runs of grids that are not stored yet, and gives the rows of all of them (as `results`).

        experiments: names, or folders with a grid.yaml.
        only: narrows the grid, `{"model.name": ["gla", "dss-*"]}`.
        set: changes settings of every run, `{"train.lr": 1e-3}`.
        seeds: their number, or a list of them.
        log: viewers that get the metrics while a run trains, `["tensorboard"]`.
        quiet: print nothing.

        A run that fails is no exception: its row `run` says why. An interrupted call continues when it is repeated.
        """
        from subquad.suite.commands.carrying_out import prepare
        from subquad.suite.commands.console import lasting_console
        from subquad.suite.display import GridDisplay
        from subquad.suite.executors.contract import Settings
        from subquad.suite.store import endings
        from subquad.suite.store.rows import Selection

        _require_utf8()
        if not experiments:
            raise ValueError("run: name at least one experiment; `results` reads what is stored")
        if results is None:
            raise ValueError("results=None: name a folder, or leave the argument out")
        _expect("a word", (str,), scale=scale, device=device)
        _expect("a path", (str, Path), data=data)
        _expect("True or False", (bool,), keep_weights=keep_weights, force=force, quiet=quiet)
        call = prepare(
            self.repository.with_plugins(_listed(plugins, "plugins")),
            _listed(experiments, "experiment"),
            _place(results),
            Settings(
                device=device,
                jobs=None if jobs == "auto" else jobs,
                packed=jobs == "auto",
                threads=threads,
                keep_weights=keep_weights,
                log=tuple(_listed(log, "log")),
            ),
            choice={
                "scale": scale,
                "only": filters(only, "only"),
                "overrides": {
                    key: json.loads(_json(value, f"set={{{key!r}: ...}}"))
                    for key, value in _mapping(set, "set").items()
                },
                "seeds": None if seeds is None else _seeds(seeds),
                "data": None if data is None else Path(data),
            },
            force=force,
        )
        with GridDisplay(lasting_console(quiet), len(call.todo), quiet, [item.run for item in call.planned]) as display:
            try:
                if call.todo:
                    call.carry_out(display)
            except KeyboardInterrupt:
                display.interrupted()
                raise
        runs = [(item.run.experiment, item.run.scale, item.run.run_id) for item in call.planned]
        paths = endings.files_of(call.results, runs)
        return Selection(paths, runs=[run_id for _, _, run_id in runs]).frame()

    def results(
        self, *names: str | Path, only: Filter | None = None, results: str | Path | None = None
    ) -> pd.DataFrame:
        """Stored rows as a frame: the columns of results/README.md, and every setting under its dotted key.

        names: experiments, or folders of results.
        only: filters by columns and settings, `{"metric": "accuracy", "model.name": ["gla", "dss-*"]}`.
        results: folder of results; by default yours, or else the committed ones, never a mixture.
        """
        _require_utf8()
        if not names:
            raise ValueError("results: name at least one experiment, or a folder of results")
        return self.repository.selection(_listed(names, "name"), _stored(results), filters(only, "only")).frame()

    def load(
        self,
        run_id: str,
        *,
        plugins: str | Path | Iterable[str | Path] = (),
        device: str | None = None,
        results: str | Path | None = None,
        tokenizer: str | Path | None = None,
    ) -> Trained:
        """The model that a run with kept weights (`keep_weights=True`) has trained, and its task.

        run_id: a run id or the beginning of one, or a file of weights.
        tokenizer: where the tokenizer.json of the run is now; by default where it was. ValueError for another file.
        """
        from subquad.suite.environment import pick_device
        from subquad.suite.settings.resolver import Resolver
        from subquad.suite.store.weights import find_weights
        from subquad.suite.training.weights import load_model, with_tokenizer

        _require_utf8()
        _listed([run_id], "run_id")
        _expect("a word", (str,), device=device)
        _expect("the name of a file", (str, Path), tokenizer=tokenizer)
        repository = self.repository.with_plugins(_listed(plugins, "plugins"))
        path = find_weights(str(run_id), repository.roots(_stored(results)), repository.unfetched)
        task, model = load_model(path, Resolver(repository.tasks, repository.models), pick_device(device))
        copy, own = None if tokenizer is None else Path(tokenizer), getattr(task, "tokenizer", None)
        if own is not None and (copy is not None or own.is_file()):
            # a model whose tokenizer is not here can still be studied
            task, note = with_tokenizer(task, path, copy)
            if note:
                warnings.warn(note, stacklevel=2)
        return Trained(model, task)


def _require_utf8() -> None:
    from subquad.suite.environment import reads_utf8

    if not reads_utf8():
        raise ValueError("the locale of this Python is not UTF-8, in which files are read; start it with PYTHONUTF8=1")


def filters(wanted: Filter | None, name: str) -> list[str]:
    """A mapping as the texts `key=value` of the command line, one for each alternative. name: that of the argument."""
    texts = []
    for key, value in _mapping(wanted, name).items():
        alternatives = value if isinstance(value, (list, tuple)) else [value]
        if not alternatives:
            raise ValueError(f"{name}={{{key!r}: {value!r}}}: the list is empty; name a value, or leave the key out")
        texts += [f"{key}={_json(part, f'{name}={{{key!r}: ...}}')}" for part in alternatives]
    return texts


def _expect(what: str, kinds: tuple[type, ...], **arguments: Any) -> None:
    """Raises ValueError for an argument of another type, and for an empty text. None stands for the default."""
    for name, value in arguments.items():
        if not (value is None or isinstance(value, kinds)) or value == "":
            raise ValueError(f"{name}={shortened(value)}: expected {what}")


def _listed(names: str | Path | Iterable[str | Path] | None, argument: str) -> list[str]:
    """Returns the names as a list; a single text or path is a list of one, and None an empty list."""
    names = [names] if isinstance(names, (str, Path)) else () if names is None else names
    if not isinstance(names, Iterable):
        raise ValueError(f"{argument}={shortened(names)}: expected a text, or a list of texts")
    found = list(names)
    for name in found:
        if not isinstance(name, (str, Path)) or name == "":
            each = "; give each by itself" * isinstance(name, (list, tuple))
            raise ValueError(f"{argument} {shortened(name)}: expected a text{each}")
    return [str(name) for name in found]


def _place(results: Any) -> Path:
    """Returns the folder of results of this name, which may be the address of a bucket."""
    if not isinstance(results, (str, Path)) and "://" not in str(results):
        raise ValueError(f"results={shortened(results)}: expected the name of a folder")
    return target(results)


def _stored(results: Any) -> Path | None:
    """Returns the folder of results of this name, which must be there; None if none is named."""
    return None if results is None else existing(_place(results), f"results={shortened(results)}")


def _mapping(values: Any, name: str) -> Mapping[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{name}={values!r}: expected a dictionary such as {{'model.name': 'gla'}}")
    return values


def _json(value: Any, where: str) -> str:
    # numpy and torch have number types of their own
    value = value.item() if hasattr(value, "item") else value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: expected a number, a word, a list or a dictionary, got {value!r}") from None


def _seeds(seeds: int | Iterable[int]) -> str:
    """The seeds as the command line writes them."""
    listed: Sequence[Any] | None = list(seeds) if isinstance(seeds, Iterable) and not isinstance(seeds, str) else None
    return str(seeds) if listed is None else "".join(f"{seed}," for seed in listed)
