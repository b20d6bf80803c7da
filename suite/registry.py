"""A lazy table from names to the places that implement them.

A folder's table of contents is a dict of `Entry`. Nothing is imported until a name is loaded, so listing is instant,
and an optional part that cannot be imported does not break the rest.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """Place where a name is implemented, and a description in one line."""

    target: str
    """`module:attribute`, or `module:DICTIONARY[key]` for a value of a dictionary."""
    summary: str
    plugin: str = ""
    """Identity of the plugin that defines the name; empty for a name of this repository."""

    def load(self) -> Any:
        """The object behind the place."""
        module, attribute = self.target.split(":")
        name, bracket, key = attribute.partition("[")
        found = getattr(importlib.import_module(module), name)
        return found[key.removesuffix("]")] if bracket else found


def entries(package: str, places: Mapping[str, tuple[str, str]]) -> dict[str, Entry]:
    """The entries of names whose places, given with a summary, lie in one package."""
    return {name: Entry(f"{package}.{place}", summary) for name, (place, summary) in places.items()}


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest spelling, or else the dotted name that ends so; or nothing."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    close = close or [known for known in names if known.endswith(f".{name}")]
    return f" (did you mean {close[0]!r}?)" if close else ""


def few(names: Sequence[str], most: int = 5) -> str:
    """Returns the first `most` names as a text that ends with the number of the others."""
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def counted(runs: int) -> str:
    """Returns `1 run`, or for example `3 runs`."""
    return f"{runs} run" + "s" * (runs != 1)


PLUGGABLE = ("model", "task", "operator")
"""Kinds of names that a plugin may add to."""


class Registry:
    """Names of one kind (`task`, `model`, ...) and how to load them."""

    def __init__(self, kind: str, entries: Mapping[str, Entry]) -> None:
        self.kind = kind
        self.entries = dict(entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def load(self, name: str) -> Any:
        """The object behind a name; an unknown name raises ValueError with the nearest one and the full list."""
        # a name from a grid or the command line may be any value
        if not isinstance(name, str) or name not in self.entries:
            raise self.unknown(name)
        return self.entries[name].load()

    def unknown(self, name: object) -> ValueError:
        """The error of a name that is not there, with the nearest one and the full list."""
        has_plugins = any(entry.plugin for entry in self.entries.values())
        return ValueError(
            f"unknown {self.kind} {name!r}{nearest(str(name), self.entries)}; there are: {', '.join(self.entries)}"
            + "; a name of your own needs --plugin FILE_OR_MODULE" * (self.kind in PLUGGABLE and not has_plugins)
        )

    def extended(self, entries: Mapping[str, Entry], by: str) -> Registry:
        """This table with the names of `by` beside its own. ValueError for a name that is there already."""
        for name in entries:
            if name in self.entries:
                raise ValueError(f"{by}: there is a {self.kind} {name!r} already; choose another name")
        return Registry(self.kind, {**self.entries, **entries})
