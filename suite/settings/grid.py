"""A grid expanded: into points (what the grid says of every run) and into resolved runs (everything filled in).

`run` and `report` expand a grid by the same function, `points`. Order of precedence: baseline, sweep, scale, `--set`.
Every run is resolved and checked before the first one starts.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from subquad.suite.options import alternatives, assignments, located, shortened
from subquad.suite.registry import few, nearest
from subquad.suite.runs import Run
from subquad.suite.settings.config import NO_PLUGINS, ExperimentConfig, check_sections
from subquad.suite.settings.report_spec import Measurement
from subquad.suite.settings.resolver import Resolver
from subquad.suite.training.run import TrainingRun

Point = dict[str, Any]
"""Dotted keys (`train.lr`) and the values that the grid gives them."""
Overrides = Sequence[str] | Mapping[str, Any]
"""Settings that win over the grid: texts such as `train.lr=1e-3`, or from Python a mapping from keys to values."""


MAX_RUNS = 1_000_000
"""More runs than that are not listed, because nobody can wait for them."""


def points(config: ExperimentConfig, scale: str) -> list[Point]:
    """Every point of a grid at one of its scales, in grid order; each stands for a run per seed."""
    overrides = _overrides(config, scale)
    sweep = {**config.sweep, **overrides.pop("sweep", {})}
    base = {f"{section}.{key}": value for section, tree in config.baseline.items() for key, value in tree.items()}
    axes = [
        [value if isinstance(value, Mapping) else {name: value} for value in values] for name, values in sweep.items()
    ]
    if math.prod(map(len, axes)) > MAX_RUNS:
        raise ValueError(f"sweep: its axes have more than {MAX_RUNS:,} points together; shorten them")
    found = []
    for changes in itertools.product(*axes):
        point = dict(base)
        for change in changes:
            point.update(change)
        found.append(point | overrides)
    return found


def _overrides(config: ExperimentConfig, scale: str) -> dict[str, Any]:
    """Options that a scale changes, with `sweep` but without `seeds`; empty if the grid has no such scale."""
    return {key: value for key, value in config.scales.get(scale, {}).items() if key != "seeds"}


def seeds_of(config: ExperimentConfig, scale: str) -> tuple[int, ...]:
    """The seeds of every point at one scale."""
    return tuple(config.scales.get(scale, {}).get("seeds", config.seeds))


def check_grid(config: ExperimentConfig, scale: str, where: str) -> None:
    """Raises ValueError for an unknown scale, section, axis or first word of a dotted key."""
    if scale not in config.scales:
        raise ValueError(
            f"{where}: unknown scale {scale!r}{nearest(scale, config.scales)}; there are: {', '.join(config.scales)}"
        )
    check_sections(config, where)
    overrides = _overrides(config, scale)
    narrowed = overrides.pop("sweep", {})
    for axis in narrowed:
        if axis not in config.sweep:
            raise ValueError(f"{where}: scales.{scale}.sweep: unknown axis {axis!r}{nearest(axis, config.sweep)}")
    for name, values in {**config.sweep, **narrowed}.items():
        for value in values:
            for key in value if isinstance(value, Mapping) else [name]:
                _check_key(config, key, f"{where}: sweep")
    for key in overrides:
        _check_key(config, key, f"{where}: scales.{scale}")


def _check_key(config: ExperimentConfig, key: str, where: str) -> None:
    section, _, option = key.partition(".")
    if section not in config.sections:
        raise ValueError(
            f"{where}: {key!r}: a dotted key starts with {', '.join(config.sections)}"
            f"{nearest(section, config.sections)}"
        )
    if not option:
        raise ValueError(f"{where}: {key!r}: expected a dotted key of one option, such as train.lr")


def check_table(config: ExperimentConfig, scale: str, where: str) -> None:
    """Raises ValueError for a row or column of the table whose settings no run of the grid has, at any scale.

    scale: its points are compared first. A point fits where it leaves a key at its default (`check_defaults`).
    """
    here = points(config, scale) if config.baseline and config.table else []
    for place, selector in _selectors(config):
        words = ("against",) if place.startswith("table.rows") else tuple(Measurement.model_fields)
        for key in selector:
            section, dot, _ = key.partition(".")
            if not (dot and section in config.sections) and key not in words:
                allowed = ", ".join([*(f"{s}.<key>" for s in config.sections), *words])
                raise ValueError(f"{where}: {place}: {key!r} selects nothing; a key is one of {allowed}")
        wanted = {key: value for key, value in selector.items() if "." in key}
        # the points of all scales are made only where none of this one fits
        if config.baseline and not any(_fits(wanted, point) for point in itertools.chain(here, _everywhere(config))):
            raise ValueError(f"{where}: {place}: {_misfit(wanted, config)}")


def _selectors(config: ExperimentConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the selector of every row and column of the table."""
    if config.table is not None:
        for kind, selectors in (("rows", config.table.rows), ("columns", config.table.columns)):
            yield from ((f"table.{kind}.{label}", selector) for label, selector in selectors.items())


def _everywhere(config: ExperimentConfig) -> Iterator[Point]:
    """Yields the points of all scales, and those of the sweep as no scale has it."""
    for scale in (*config.scales, ""):
        yield from points(config, scale)


def _fits(wanted: Mapping[str, Any], point: Point) -> bool:
    return all(same(value, point.get(key, value)) for key, value in wanted.items())


def _misfit(wanted: Mapping[str, Any], config: ExperimentConfig) -> str:
    """Returns the reason why no point of any scale has the wanted settings."""
    everywhere = list(_everywhere(config))
    for key, value in wanted.items():
        if not any(_fits({key: value}, point) for point in everywhere):
            there = list(dict.fromkeys(str(point[key]) for point in everywhere))
            plugins = "; the names of a plugin need --plugin FILE_OR_MODULE" * (key in NO_PLUGINS)
            return f"no run has {key}={value}{nearest(str(value), there)}; there are: {few(there)}{plugins}"
    return f"no run has all of {', '.join(f'{key}={value}' for key, value in wanted.items())}"


def check_defaults(config: ExperimentConfig, resolved: Callable[[], Iterable[Mapping[str, Any]]], where: str) -> None:
    """Raises ValueError for a setting that the table names and that neither the grid states nor a run has by default.

    resolved: gives the settings of runs. Those that have the other settings of a row or column are asked.
    """
    stated = {key for point in _everywhere(config) for key in point} if config.baseline and config.table else set()
    for place, selector in _selectors(config) if stated else ():
        for key in selector:
            # a part of a stated value has a longer key: task.train.0.length
            if "." not in key or any(key == name or key.startswith(f"{name}.") for name in stated):
                continue
            others = {name: value for name, value in selector.items() if "." in name and name != key}
            known: dict[str, Any] = {}
            for settings in resolved():
                if all(same(value, lookup(settings, name)) for name, value in others.items()):
                    known |= iter_keys(settings)
            if known and key not in known:
                raise ValueError(f"{where}: {place}: no run has {key!r}{nearest(key, known)}")


def _check_report(config: ExperimentConfig, runs: Sequence[Run], scale: str, where: str) -> None:
    """Raises ValueError for settings that the report is to read and that no run has."""
    check_table(config, scale, where)
    check_defaults(config, lambda: (run.resolved for run in runs), where)
    named = dict.fromkeys(config.select.best_of if config.select else (), "select.best_of")
    named |= dict.fromkeys(config.table.mean_over if config.table else (), "table.mean_over")
    if config.figure:
        named |= {config.figure.x: "figure.x", config.figure.panels or "": "figure.panels"}
    wanted = {key: place for key, place in named.items() if key.partition(".")[0] in ("task", "model", "train")}
    known: dict[str, Any] = {}
    for run in runs:
        if wanted.keys() <= known.keys():
            return
        known |= iter_keys(run.resolved)
    for key, place in wanted.items():
        if key not in known:
            raise ValueError(f"{where}: {place}: no run has {key!r}{nearest(key, known)}")


def refuse(config: ExperimentConfig, scale: str | None, where: str) -> None:
    """Raises ValueError, with the reason, for a scale that cannot run here. None stands for the first scale."""
    scale = next(iter(config.scales)) if scale is None else scale
    if scale in config.cannot_run:
        instead = f"; --scale {' or '.join(config.runnable)} runs" if config.runnable else ""
        raise ValueError(f"{where}: scale {scale!r} cannot run here: {config.cannot_run[scale]}{instead}")


def expand(
    name: str,
    config: ExperimentConfig,
    resolver: Resolver,
    *,
    scale: str | None = None,
    only: Sequence[str] = (),
    overrides: Overrides = (),
    seeds: Sequence[int] | None = None,
    where: str = "grid.yaml",
) -> list[Run]:
    """All runs of an experiment at one scale, resolved and checked, in grid order, each once.

    only: `key=value` filters on the resolved run. Values of one key, in one text or several, are alternatives
        (`model.name=gsa,gla`), and a word may be a pattern (`model.name=dss-*`).
    overrides: `key=value` settings that win over the grid. Several values of one key (`train.lr=1e-3,3e-3`) are an axis
        of their own; values of several keys are combined. A pattern stands for the names that fit it
        (`model.name=dss-*`). From Python, a mapping from keys to values.
    seeds: take these instead of the grid's own.
    where: the file's name, for messages.
    """
    scale = next(iter(config.scales)) if scale is None else scale
    check_grid(config, scale, where)
    if not config.baseline:
        refuse(config, scale, where)
    seeds = seeds_of(config, scale) if seeds is None else seeds
    if config.timed and tuple(seeds) != (0,):
        raise ValueError(f"{where}: seeds: timings have none, their inputs are always the same; leave out --seeds")
    settings = _settings(config, overrides, resolver)
    filters = Filters(only)
    runs: list[Run] = []
    dropped: list[Run] = []
    for point, given in itertools.product(points(config, scale), settings):
        tree = _tree(config, point | {key: value for key, (_, value) in given.items()})
        # a run that is left out by its words is not resolved, because what it reads need not be here
        if not filters.may_keep(tree):
            continue
        run: Run | None = None
        for seed in seeds:
            try:
                if isinstance(run, TrainingRun) and run.base is None:
                    # nothing else of a run depends on its seed, but which run it starts with
                    run = run.with_seed(seed)
                else:
                    run = resolver.resolve(name, scale, tree, seed, where)
            except ValueError as error:

                def resolve(chosen: _Given, where: str, point: Point = point, seed: int = seed) -> object:
                    values = {key: value for key, (_, value) in chosen.items()}
                    return resolver.resolve(name, scale, _tree(config, point | values), seed, where)

                raise _blamed(error, given, resolve, where) from None
            # resolved settings take most of the time of a large grid, so they are made only where they are filtered
            kept = not filters.wanted or filters.keep(partial(lookup, run.resolved))
            (runs if kept else dropped).append(run)
    # a call may have several experiments
    located(name, lambda: filters.check(lambda: (key for run in dropped for key, _ in iter_keys(run.resolved))))
    if not runs and not only:
        raise ValueError(
            f"{where}: sweep: an axis has only `plugins`, and there are none; give --plugin FILE_OR_MODULE"
        )
    if not runs:
        raise ValueError(f"{name}: --only {' '.join(only)}: no run satisfies all of them")
    if not only and not overrides:
        _check_report(config, runs, scale, where)
    # the runs whose weights others start with come first
    bases = [run.base for run in runs if isinstance(run, TrainingRun) and run.base is not None]
    return list({run.run_id: run for run in [*bases, *runs]}.values())


_Given = Mapping[str, tuple[str, Any]]
"""Dotted keys of `--set`, or of `set` in Python, to the words of the user that gave the value, and the value."""


def _settings(config: ExperimentConfig, overrides: Overrides, resolver: Resolver) -> list[_Given]:
    """Returns every combination of the values that are set. Raises ValueError for a key that two texts give."""
    axes: dict[str, list[tuple[str, str, Any]]] = {}
    texts: dict[str, str] = {}
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            given = f"set={{{key!r}: {shortened(value)}}}"
            _check_key(config, str(key), given)
            axes[key] = [(key, given, name) for name in _fitting(resolver, key, value, given)]
        overrides = ()
    for text in overrides:
        parts = alternatives(text, "--set")
        values = assignments(parts, "--set")
        key = values[0][0]
        _check_key(config, key, f"--set {text}")
        if key in texts:
            both = f"{texts[key].strip()},{text.partition('=')[2].strip()}"
            raise ValueError(f"--set {key} is given twice; for both values: --set {both}")
        texts[key] = text
        axes[key] = [
            (key, f"--set {part}", name)
            for part, (key, value) in zip(parts, values, strict=True)
            for name in _fitting(resolver, key, value, f"--set {part}")
        ]
    if math.prod(map(len, axes.values())) > MAX_RUNS:
        raise ValueError(f"--set: the values have more than {MAX_RUNS:,} combinations; give fewer")
    return [{key: (given, value) for key, given, value in chosen} for chosen in itertools.product(*axes.values())]


def _fitting(resolver: Resolver, key: str, value: Any, where: str) -> list[Any]:
    """The registered names that fit a pattern of names (`model.name=dss-*`); any other value stands for itself."""
    registries = {"task.name": resolver.tasks, "model.name": resolver.models, "bench.op": resolver.operators}
    if key not in registries or not isinstance(value, str) or not {"*", "?"} & set(value):
        return [value]
    registry = registries[key]
    names = [name for name in registry.entries if fnmatch.fnmatchcase(name, value)]
    if not names:
        raise ValueError(f"{where}: no {registry.kind} fits; there are: {', '.join(registry.entries)}")
    return names


def _tree(config: ExperimentConfig, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a run from dotted keys."""
    tree: dict[str, dict[str, Any]] = {section: {} for section in config.sections}
    for key, value in values.items():
        section, *above, option = key.split(".")
        place = tree[section]
        for part in above:
            # a part of a value (`train.budget.seconds`), whose other parts the grid may share with other runs
            place[part] = dict(place[part]) if isinstance(place.get(part), Mapping) else {}
            place = place[part]
        place[option] = value
    return tree


def _blamed(error: ValueError, given: _Given, resolve: Callable[[_Given, str], object], where: str) -> ValueError:
    """The fault as that of the setting without which there is none, or of all of them, or else as that of the grid.

    A fault does not say where its values come from, and two values may be wrong only together. So the run is resolved
    again without each setting, which happens once, before the command ends.
    resolve: raises the fault of the run with some of the settings, with these words in front.
    """

    def fault(chosen: _Given, where: str) -> ValueError | None:
        try:
            resolve(chosen, where)
        except ValueError as found:
            return found
        return None

    for key, (words, value) in given.items():
        if fault({other: value for other, value in given.items() if other != key}, where) is None:
            blamed = fault(given, words) or error
            if isinstance(value, list) and value and fault({**given, key: (words, value[0])}, where) is None:
                listed = words.partition("=")[2].strip()
                in_python = not words.startswith("--set")
                instead = "call `run` once for each" if in_python else f"leave out the brackets: {key}={listed[1:-1]}"
                return ValueError(f"{blamed}; for a run with each value {instead}")
            return blamed
    if given and fault({}, where) is None:
        return fault(given, " ".join(words for words, _ in given.values())) or error
    return error


class Filters:
    """The filters of `--only`, and the values they met, for the message where one of them met nothing.

    texts: `key=value` pairs. Values of one key, in one text or several, are alternatives, and a word may be a pattern.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.wanted: dict[str, list[Any]] = {}
        for key, value in assignments([part for text in texts for part in alternatives(text, "--only")], "--only"):
            self.wanted.setdefault(key, []).append(value)
        self.seen: dict[str, dict[str, Any]] = {key: {} for key in self.wanted}

    def may_keep(self, tree: Mapping[str, Any]) -> bool:
        """Whether an unresolved run has a task, a model and other words that are asked for, where it gives them."""
        found = {key: lookup(tree, key) for key in self.wanted}
        # a number may be written in another way than its resolved value (`1e-3` in quotes), and a default is not there
        named = {
            key: value
            for key, value in found.items()
            if key in ("task.name", "model.name") or (isinstance(value, str) and value[:1].isalpha())
        }
        if all(value is None or self._meets_any(key, value) for key, value in named.items()):
            return True
        for key, value in named.items():
            self.seen[key][repr(value)] = value
        return False

    def keep(self, find: Callable[[str], Any]) -> bool:
        """Whether every filter is satisfied. find: the value behind a key, or None."""
        values = {key: find(key) for key in self.wanted}
        for key, found in values.items():
            self.seen[key][repr(found)] = found
        return all(self._meets_any(key, found) for key, found in values.items())

    def _meets_any(self, key: str, found: Any) -> bool:
        return any(_meets(found, value) for value in self.wanted[key])

    def check(self, known: Callable[[], Iterable[str]], what: str = "run") -> None:
        """Raises ValueError for a key or a value that nothing has.

        known: gives the keys that there are. what: what was filtered, in a word.
        """
        for key, wanted in self.wanted.items():
            there = list(self.seen[key].values())
            if not there:
                continue
            if any(isinstance(found, Mapping) for found in there):
                refuse_section(f"--only {key}", key, known())
            is_unknown = None not in wanted and all(found is None for found in there)
            names = sorted(set(known())) if is_unknown else [key]
            if key not in names:
                section = key.partition(".")[0]
                alike = [name for name in names if name.partition(".")[0] == section]
                there_are = alike or sorted({name.partition(".")[0] for name in names})
                raise ValueError(
                    f"--only {key}: no {what} has this key{nearest(key, names)}; there are: {', '.join(there_are)}"
                )
            for value in wanted:
                if not any(_meets(found, value) for found in there):
                    there_are = [str(found) or "''" for found in sorted(there, key=order)]
                    named = what == "run" and key in ("task.name", "model.name")
                    raise ValueError(
                        f"--only {key}={value}: no {what} has it{nearest(str(value), there_are)}; "
                        f"there are: {', '.join(there_are)}"
                        + "; a grid has the names of a plugin only with --plugin FILE_OR_MODULE"
                        * named
                    )


def refuse_section(where: str, key: str, known: Iterable[str]) -> None:
    """Raises ValueError where a key of several settings, such as `train`, is none of the known keys itself."""
    names = set(known)
    if key not in names and (below := sorted(name for name in names if name.startswith(f"{key}."))):
        raise ValueError(f"{where}: {key} has several settings; name one of them, such as {few(below)}")


def order(value: Any) -> tuple[bool, float, str]:
    """Returns a key that sorts numbers by their size, and behind them all other values by their text."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return not is_number, value if is_number else 0.0, str(value)


def _meets(found: Any, wanted: Any) -> bool:
    """Whether the value of a run is the wanted one, or, where that is a word, fits it as a pattern with `*` and `?`."""
    if isinstance(found, str) and isinstance(wanted, str):
        return fnmatch.fnmatchcase(found, wanted)
    return same(wanted, found)


PLAIN = frozenset({str, int, float, bool})
"""Types whose values are the same where they are equal."""


def lookup(resolved: Mapping[str, Any], key: str) -> Any:
    """The value behind a dotted key (`train.lr`, `task.train.0.length`), or None where there is none."""
    value: Any = resolved
    for part in key.split("."):
        # a dict is asked for first, since a report looks up millions of values and asking for a mapping is slow
        if isinstance(value, (dict, Mapping)):
            value = value.get(part)
        elif isinstance(value, (list, tuple)) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def same(wanted: Any, found: Any) -> bool:
    """Whether a value from a grid or a filter means the value of a resolved run, which has defaults filled in.

    A mapping means every mapping that has its keys and values; a list and a tuple are alike; `true` is not 1. A word
    means the number it spells, because a YAML 1.1 reader takes `1e-3` for a string. An empty list also means no value,
    because runs leave out some options that are off (`train.length_warmup`).
    """
    if type(wanted) is type(found) and type(wanted) in PLAIN:
        # nearly every value that a report compares; to ask for a mapping takes longer than the rest
        return bool(wanted == found)
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(same(value, found.get(key)) for key, value in wanted.items())
    if isinstance(wanted, (list, tuple)):
        return (not wanted and found is None) or (
            isinstance(found, (list, tuple))
            and len(wanted) == len(found)
            and all(same(a, b) for a, b in zip(wanted, found, strict=True))
        )
    if isinstance(wanted, str) and isinstance(found, (int, float)) and not isinstance(found, bool):
        try:
            return float(wanted) == found
        except ValueError:
            return False
    # python has True == 1
    return isinstance(wanted, bool) == isinstance(found, bool) and bool(wanted == found)


def iter_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a mapping and of the dictionaries in it."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from iter_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
