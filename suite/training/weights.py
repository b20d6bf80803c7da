"""Weights of a trained run in a file that says what they are the weights of, so that they can be used again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from suite.contracts import Config, Model, ModelConfig, Task
from suite.registry import few
from suite.runs import Run
from suite.settings.resolver import Resolver
from suite.store.target import files_like, replacing
from suite.training.checkpoints import read

ENDINGS = (".weights", ".checkpoint")
"""Files that hold weights: those of a run that ended (`run --keep-weights`), and of one that was interrupted."""


@runtime_checkable
class HasModel(Protocol):
    """The worker of a run that trains a model."""

    @property
    def model(self) -> Model: ...


def save_weights(path: Path, run: Run, model: Model) -> None:
    """Writes the weights of a model and the settings of its run, whole or not at all."""
    _save(path, run.resolved, model)


def store_weights(path: Path, tree: Mapping[str, Any], task: Task, config: ModelConfig, model: Model) -> None:
    """Writes weights that no run has trained, with the settings of a task and a model that `tree` names."""
    assert isinstance(task, Config)
    assert isinstance(config, Config)
    resolved = {
        kind: {"name": tree[kind]["name"], "version": part.version, **part.model_dump(mode="json")}
        for kind, part in (("task", task), ("model", config))
    }
    _save(path, resolved, model)


def _save(path: Path, resolved: Mapping[str, Any], model: Model) -> None:
    with replacing(path) as temporary:
        torch.save({"config": json.dumps(resolved), "model": dict(model.state_dict())}, temporary)


def model_settings(path: Path) -> tuple[str, dict[str, Any]]:
    """Name and options of the model in a file of weights."""
    options = dict(_read(path, torch.device("meta"))[0]["model"])
    return options.pop("name"), options


def find_weights(name: str, roots: Sequence[Path]) -> Path:
    """The file that is named, or that of the run whose id begins so below one of the folders."""
    if not name:
        raise ValueError("the name of the weights is empty; give the beginning of a run id, or a file of weights")
    path = Path(name)
    if path.is_file():
        return path
    if path.suffix in ENDINGS or set(name) - set("0123456789abcdef"):
        raise ValueError(f"{name}: no such file, and no run id, which is hexadecimal")
    found = [
        path for root in roots for path in files_like(root, f"**/{name}*") if path.suffix in (*ENDINGS, ".parquet")
    ]
    if not found:
        raise ValueError(f"no stored run begins with {name!r} below {', '.join(map(str, roots))}")
    if len(ids := {path.stem for path in found}) > 1:
        raise ValueError(f"{name!r} is ambiguous: {few(sorted(ids))}; give more of the id")
    for ending in ENDINGS:
        for path in found:
            if path.suffix == ending:
                return path
    raise ValueError(
        f"run {found[0].stem} kept no weights; repeat it with: run EXPERIMENT --force --keep-weights, or name a file"
    )


def mark(path: Path) -> dict[str, str]:
    """Returns what identifies a file of weights: the id of the run that ended with them, or a hash of the content.

    The checkpoint of a run that has not ended gets a hash, since a later one has other weights. Raises ValueError where
    the file holds no weights.
    """
    _read(path, torch.device("meta"))
    if path.suffix == ".weights" and len(path.stem) == 16 and not set(path.stem) - set("0123456789abcdef"):
        return {"run_id": path.stem}
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _read(path: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings of the run and weights in a file. ValueError where it holds none."""
    try:
        stored = read(path, device, verify=device.type != "meta")
        return json.loads(stored["config"]), stored["model"]
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"{path}: holds no weights with their settings ({type(error).__name__}: {reason})") from None


@torch.no_grad()
def take_weights(model: nn.Module, path: Path, task_name: str) -> float:
    """Copies the weights of a file into a model wherever name and shape are the same; the rest stays as it is.

    A module may say in `also_called` under which names others keep the weights of its parts (`{"proj": "qkv"}`), and
    the model in `belongs_to_task` which parts to leave out where the weights were not trained on this task.
    Returns the fraction of the model's elements that were copied. ValueError where there are none.
    """
    mine = model.state_dict()
    config, theirs = _read(path, next(iter(mine.values())).device)
    own = () if config["task"]["name"] == task_name else getattr(model, "belongs_to_task", ())
    theirs = {name: value for name, value in theirs.items() if name.partition(".")[0] not in own}
    names = {
        f"{prefix}.{name}.": f"{prefix}.{other}."
        for prefix, module in model.named_modules()
        for name, other in getattr(module, "also_called", {}).items()
    }
    taken = 0
    for name, value in mine.items():
        other = next((new + name[len(old) :] for old, new in names.items() if name.startswith(old)), name)
        found = theirs.get(name, theirs.get(other))
        if found is not None and found.shape == value.shape:
            value.copy_(found)
            taken += value.numel()
    if not taken:
        raise ValueError(f"{path}: none of its weights has a place in this model; start with those of a like network")
    return taken / sum(value.numel() for value in mine.values())


def load_model(path: Path, resolver: Resolver, device: torch.device) -> tuple[Task, Model]:
    """The task and the model of a file with weights, in evaluation mode.

    ValueError where it is none, or where the model, the task or a plugin that defines one of them has changed since.
    """
    config, weights = _read(path, device)
    task, model_config = resolver.trained(_without_versions(config), str(path))
    plugins = config.get("plugins", {})
    for kind, part, registry in (("task", task, resolver.tasks), ("model", model_config, resolver.models)):
        then, now = plugins.get(kind, ""), registry.entries[config[kind]["name"]].plugin
        if then != now:
            raise ValueError(
                f"{path}: {kind} {config[kind]['name']} was defined by {then or 'the suite'} and is by "
                f"{now or 'the suite'} now; use that plugin or train again"
            )
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
