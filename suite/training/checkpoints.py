"""Checkpoints of training runs: one file or, for a model that is sharded, one more from every process.

A checkpoint appears whole or not at all, and the one before it stays beside it (`earlier`), so that damage to a file
costs some steps and not the run. The files of a sharded one are written first, and then the file that names them. A run
continues from either kind in any number of processes.
Before anything is read, the checksums (CRC-32) in the files are verified. Nothing is unpickled but tensors and plain
values; the files of torch.distributed.checkpoint, whose index is an arbitrary pickle, are not used for that reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.suite.model import Model
from subquad.suite.store.target import as_oserror, is_remote, replacing
from subquad.suite.store.weights import read
from subquad.suite.training.parallel import Group, is_shard, joined, local


def shard_folder(path: Path) -> Path:
    """The folder of the files that a sharded checkpoint consists of besides `path`."""
    return path.with_suffix(".shards")


def earlier(path: Path) -> Path:
    """The checkpoint that was written before the last one."""
    return path.with_name(f"{path.name}.before")


def save(path: Path, state: Mapping[str, Any], tensors: Mapping[str, Any], group: Group, *, sharded: bool) -> None:
    """Writes a checkpoint; every process of a group calls this.

    state: plain values and small tensors, which all processes share, among them `run_id` and `step`.
    tensors: trees of parameters and of what has their shapes.
    Raises OSError or RuntimeError where nothing can be written; then the last checkpoint is still there.
    """
    if not sharded:
        if group.rank == 0:
            _write(path, {**state, **tensors}, last=True)
        return
    folder = shard_folder(path)
    names = [f"{state['step']}-{rank}-of-{group.size}" for rank in range(group.size)]
    failure = ""
    try:
        belongs = {"run_id": state["run_id"], "step": state["step"]}
        _write(folder / names[group.rank], {**belongs, **local(tensors)})
    except (OSError, RuntimeError) as error:
        failure = str(error) or type(error).__name__
    failures = [text for text in group.everywhere(failure) if text]
    if failures:
        raise OSError(failures[0])
    if group.rank == 0:
        _write(path, {**state, "shards": names}, last=True)
        # those of the checkpoint before it stay as well
        others = [other for other in folder.iterdir() if other.name not in names]
        known = max((_step(other.name) for other in others), default=-1)
        for other in others:
            if _step(other.name) != known:
                other.unlink(missing_ok=True)


def load(path: Path, device: torch.device) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The state and the parts of the tensors that `save` wrote. ValueError, or another error, for a damaged file."""
    state = read(path, device)
    if "shards" not in state:
        return state, [state]
    parts = [read(shard_folder(path) / Path(name).name, torch.device("cpu")) for name in state["shards"]]
    if any((part["run_id"], part["step"]) != (state["run_id"], state["step"]) for part in parts):
        raise ValueError("its shards belong to another checkpoint")
    return state, parts


def remove(path: Path) -> None:
    """Removes a checkpoint, if there is one."""
    with as_oserror(path):
        path.unlink(missing_ok=True)
        earlier(path).unlink(missing_ok=True)
        folder = shard_folder(path)
        if folder.is_dir():
            for file in folder.iterdir():
                file.unlink(missing_ok=True)
            folder.rmdir()


def from_parts(parts: Sequence[Mapping[Any, Tensor]], like: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Named tensors from the parts of a checkpoint, whole or sharded as those of the same names in `like`."""
    return {name: joined([part[name] for part in parts], like[name]) for name in parts[0]}


def take_moments(
    optimizer: torch.optim.Optimizer, parts: Sequence[Mapping[int, Mapping[str, Tensor]]], parameters: Sequence[Tensor]
) -> None:
    """Puts the moments of a checkpoint, by the index of their parameter, into an optimizer."""
    # by index and not in order, because a parameter that has had no gradient has no state
    moments = {
        index: from_parts([part[index] for part in parts], dict.fromkeys(values, parameters[index]))
        for index, values in parts[0].items()
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    # loading replaces the learning-rate tensors, which recorded graphs read in place
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr


@torch.no_grad()
def copy_whole(sharded: Model, plain: Model) -> None:
    """Copies the weights of a sharded model into one that is not; every process of a group calls this."""
    targets = plain.state_dict()
    tensor: Any
    for name, tensor in sharded.state_dict().items():
        targets[name].copy_(tensor.full_tensor() if is_shard(tensor) else tensor)


def _step(name: str) -> int:
    """The step of a file of a sharded checkpoint; -1 for another file."""
    number = name.partition("-")[0]
    return int(number) if number.isdigit() else -1


def _write(path: Path, content: Mapping[str, Any], *, last: bool = False) -> None:
    """Writes a file. last: one that is there stays as the earlier checkpoint, where files can be renamed."""
    with replacing(path) as temporary:
        torch.save(dict(content), temporary)
        if last and not is_remote(path) and path.is_file():
            path.replace(earlier(path))
