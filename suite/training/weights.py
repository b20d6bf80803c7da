"""Weights of a trained run taken into a new network, or loaded together with their task."""

from __future__ import annotations

from pathlib import Path

import torch

from subquad.suite.contracts import Task
from subquad.suite.model import Model
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store.documents import tokenizer_digest
from subquad.suite.store.weights import read_weights, tokenizer_of, without_version


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
    sections = {kind: without_version(config[kind]) for kind in ("task", "model")}
    task, model_config = resolver.trained(sections, str(path))
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


def with_tokenizer(task: Task, path: Path, copy: Path | None = None) -> tuple[Task, str]:
    """The task of a file with weights, once its tokenizer file is known to be the one that they were trained with.

    copy: where that tokenizer is now, if not where it was. Returns the task, and a note where nobody knows whether the
    file is the same; "" otherwise. ValueError for another file, or none.
    """
    own: Path | None = getattr(task, "tokenizer", None)
    if own is None:
        return task, ""
    file = copy or own
    known = tokenizer_of(path)
    if known:
        try:
            same = tokenizer_digest(file) == known
        except ValueError as error:
            raise ValueError(f"{path}: its tokenizer {error}; name a copy of it with --tokenizer") from None
        if not same:
            raise ValueError(
                f"{path}: {file} is not the tokenizer that it was trained with, of SHA-256 {known[:12]}...; "
                "restore that file, or name a copy of it with --tokenizer"
            )
    note = "" if known else f"{path} keeps no digest of its tokenizer; {file} may be another than it was trained with"
    return task.model_copy(update={"tokenizer": file}), note
