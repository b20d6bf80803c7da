"""A public layout of checkpoints: its names of settings and weights beside ours, and what most layouts share.

The layouts themselves are in models/checkpoints.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Settings = Mapping[str, Any]
Names = dict[str, str | tuple[str, ...]]

LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Layout:
    """One layout. `{i}` in a name stands for the number of a layer."""

    model: str
    """Name of the model in the suite."""
    options: Callable[[Settings], dict[str, Any]]
    """Our options from their settings (`config.json`). KeyError for a setting that is missing."""
    settings: Callable[[dict[str, Any], int, int], dict[str, Any]]
    """Their settings from our options, the size of the vocabulary and the longest sequence."""
    network: Names
    """Weights outside the layers."""
    layer: Names
    """Weights of a layer, without `layers.{i}.` on our side."""
    transposed: tuple[str, ...] = ()
    """Endings of our names of matrices that they keep as [inputs, outputs]."""
    reordered: tuple[str, ...] = ()
    """Endings of our names of weights whose rows they keep in another order."""
    order: Callable[[nn.Module], Tensor] | None = None
    """The order of these: our row i is their row order[i]."""
    pickled: bool = False
    """Whether the library reads pytorch_model.bin only, with the readout in it even where that is the embedding."""

    def rows(self, name: str, model: nn.Module) -> Tensor | None:
        """The order of the rows of one of our weights, where it is not theirs."""
        return self.order(model) if self.order is not None and name.endswith(self.reordered) else None

    def theirs(self, name: str) -> tuple[str, ...]:
        """Their names of one of our weights. KeyError for a weight that the layout does not have."""
        found = LAYER.fullmatch(name)
        names = self.network[name] if found is None else self.layer[found[2]]
        number = "" if found is None else found[1]
        return tuple(part.replace("{i}", number) for part in ([names] if isinstance(names, str) else names))


def unless(settings: Settings, **expected: Any) -> None:
    """Raises ValueError for a setting with another value than the one our model has."""
    for key, value in expected.items():
        if settings.get(key, value) != value:
            raise ValueError(f"config.json: {key}={settings[key]!r} is not supported, only {value!r}")


def options_of(settings: Settings, *, tied: bool, **own: Any) -> dict[str, Any]:
    """The options that are named alike in most layouts of `transformers`, and those of one. tied: a default of it."""
    return {
        "d_model": settings["hidden_size"],
        "num_layers": settings["num_hidden_layers"],
        "tie_embeddings": settings.get("tie_word_embeddings", tied),
        **own,
    }


def sizes_of(options: Mapping[str, Any], vocab_size: int, **own: Any) -> dict[str, Any]:
    """The reverse: the settings that are named alike in most layouts of `transformers`, and those of one."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": options["d_model"],
        "num_hidden_layers": options["num_layers"],
        "tie_word_embeddings": options["tie_embeddings"],
        **own,
    }
