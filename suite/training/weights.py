"""Weights of a trained run taken into a new network, or loaded together with their task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from subquad.suite.contracts import Task
from subquad.suite.model import Model
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store.weights import read_weights


@torch.no_grad()
def take_weights(model: Model, path: Path, task_name: str) -> float:
    """Copies the weights of a file into a model wherever name and shape are the same; the rest stays as it is.

    A module may say in `also_called` under which names others keep the weights of its parts (`{"proj": "qkv"}`), and
    the model in `belongs_to_task` which parts to leave out where the weights were not trained on this task.
    Returns the fraction of the model's elements that were copied. ValueError where there are none.
    """
    mine = model.state_dict()
    config, theirs = read_weights(path, next(iter(mine.values())).device)
    own = () if config["task"]["name"] == task_name else model.belongs_to_task
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
    config, weights = read_weights(path, device)
    task, model_config = resolver.trained(_without_versions(config), str(path))
    plugins = config.get("plugins", {})
    for kind, part, registry in (("task", task, resolver.tasks), ("model", model_config, resolver.models)):
        then, now = plugins.get(kind, ""), registry.entries[config[kind]["name"]].plugin
        if then != now:
            raise ValueError(
                f"{path}: {kind} {config[kind]['name']} was defined by {then or 'the suite'} and is by "
                f"{now or 'the suite'} now; use that plugin or train again"
            )
        if (version := config[kind].get("version")) != part.version:
            raise ValueError(
                f"{path}: {kind} {config[kind]['name']} was at version {version} and is at {part.version} now; "
                "train again"
            )
    model: Model = model_config.build(task.spec).to(device)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: its weights are not those of its settings ({reason}); name another file") from None
    model.eval()
    return task, model


def _without_versions(config: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: {key: value for key, value in config[kind].items() if key != "version"} for kind in ("task", "model")}
