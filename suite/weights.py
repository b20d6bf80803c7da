"""Weights of a trained run in a file that says what they are the weights of, so that they can be used again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from suite.contracts import Model, Task
from suite.resolver import Resolver
from suite.runs import Run
from suite.target import readable, replacing

ENDINGS = (".weights", ".checkpoint")
"""Files that hold weights: those of a run that ended (`run --keep-weights`), and of one that was interrupted."""


@runtime_checkable
class HasModel(Protocol):
    """The worker of a run that trains a model."""

    @property
    def model(self) -> Model: ...


def save_weights(path: Path, run: Run, model: Model) -> None:
    """Writes the weights of a model and the settings of its run, whole or not at all."""
    with replacing(path) as temporary:
        torch.save({"config": json.dumps(run.resolved), "model": dict(model.state_dict())}, temporary)


def find_weights(name: str, roots: Sequence[Path]) -> Path:
    """The file that is named, or that of the run whose id begins so below one of the folders."""
    path = Path(name)
    if path.is_file():
        return path
    if path.suffix in ENDINGS or not name or set(name) - set("0123456789abcdef"):
        raise ValueError(f"{name}: no such file, and no run id, which is hexadecimal")
    found = [path for root in roots for path in sorted(root.rglob(f"{name}*")) if path.suffix in (*ENDINGS, ".parquet")]
    if not found:
        raise ValueError(f"no stored run begins with {name!r} below {', '.join(map(str, roots))}")
    if len({path.stem for path in found}) > 1:
        raise ValueError(f"{name!r} is ambiguous: {', '.join(sorted({path.stem for path in found}))}")
    for ending in ENDINGS:
        for path in found:
            if path.suffix == ending:
                return path
    raise ValueError(
        f"run {found[0].stem} kept no weights; repeat it with: run EXPERIMENT --force --keep-weights, or name a file"
    )


def load_model(path: Path, resolver: Resolver, device: torch.device) -> tuple[Task, Model]:
    """The task and the model of a file with weights, in evaluation mode.

    ValueError where it is none, or where the model or the task has changed since.
    """
    try:
        stored = torch.load(readable(path), map_location=device, weights_only=True)
        config, weights = json.loads(stored["config"]), stored["model"]
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"{path}: holds no weights with their settings ({type(error).__name__}: {reason})") from None
    task, model_config = resolver.trained(_without_versions(config), str(path))
    for kind, part in (("task", task), ("model", model_config)):
        if config[kind]["version"] != part.version:
            raise ValueError(
                f"{path}: {kind} {config[kind]['name']} was at version {config[kind]['version']} and is at "
                f"{part.version} now; train again"
            )
    model: Model = model_config.build(task.spec).to(device)
    model.load_state_dict(weights)
    model.eval()
    return task, model


def _without_versions(config: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: {key: value for key, value in config[kind].items() if key != "version"} for kind in ("task", "model")}
