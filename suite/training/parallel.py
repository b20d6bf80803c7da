"""Several processes that train one run together, each on its own device (data parallelism).

Every process takes the same steps on the same batches, and of each batch the part of its rows. The loss is that of the
whole batch: with n labels in all and n_i of them in part i,

    loss = sum_i (n_i / n) loss_i,

and so is its gradient, which DDP or FSDP add up over the processes. Parts of a part (`micro_batch_size`) are added up
in the same way, one after the other. So a run gives the values that one process gives, up to the rounding of sums in
another order. Where layers draw dropout, each process draws its own for every step.

Below `SHARD_FROM` parameters every process has the whole model (`DistributedDataParallel`). Above, each has its share
of every parameter and of the optimizer's state, and layers are gathered while they are used (`fully_shard`, FSDP2).
Rank 0 decides when to save and when to stop, and writes the rows.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from subquad.suite.contracts import IGNORE, Batch
from subquad.suite.model import Model

SHARD_FROM = 10**9
"""Number of parameters from which a model is sharded, unless the caller decides."""
PATIENCE = datetime.timedelta(days=7)
"""The time for which a process waits for the decision of another one, which may be saving a checkpoint meanwhile."""


class _Whole(nn.Module):
    """A model as the root of what is divided: its forward pass calls a function that uses the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@dataclass(frozen=True)
class Piece:
    """Rows of a batch that a process computes at a time."""

    batch: Batch
    labels: Tensor | None = None
    """Number of labels of the whole batch; None where the piece is all of it."""
    is_last: bool = True
    """Whether it is the last piece of this process."""

    def share(self, loss: Tensor) -> Tensor:
        """The share n_i / n of the whole batch's loss, given the mean loss of this piece."""
        if self.labels is None:
            return loss
        mine = (self.batch.targets != IGNORE).sum()
        # the mean over no label is no number
        return torch.where((mine > 0) | (self.labels == 0), loss, 0.0) * (mine.to(loss.dtype) / self.labels)

    def exchanging(self, whole: Any) -> contextlib.AbstractContextManager[Any]:
        """A context for the passes of the piece, so that DDP exchanges gradients once, with the last one.

        whole: the function that `Group.divide` gave.
        """
        waits = not self.is_last and isinstance(whole, nn.parallel.DistributedDataParallel)
        return whole.no_sync() if waits else contextlib.nullcontext()


@dataclass(frozen=True)
class Group:
    """The processes that train together, as one of them sees it. The default is a process alone."""

    rank: int = 0
    size: int = 1
    control: Any = None
    """The process group, of host memory, on which decisions are exchanged."""
    sharded: bool | None = None
    """Whether parameters are sharded; None: from `SHARD_FROM` on."""

    def shards(self, model: Model) -> bool:
        """Whether this group shards the parameters of a model."""
        if self.size == 1 or self.sharded is not None:
            return self.size > 1 and bool(self.sharded)
        return sum(parameter.numel() for parameter in model.parameters()) >= SHARD_FROM

    def divide(self, model: Model) -> Callable[..., Any]:
        """Lets the group compute with the model; with shards, its parameters become DTensors in place.

        Gives a function that calls a function of the model with the given arguments. ValueError for a model with a norm
        over the batch, of which no process has all rows.
        """
        if self.size == 1:
            return lambda function, *arguments: function(*arguments)
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            raise ValueError("a batch norm is over all rows of a batch, of which no process has all; use one process")
        if not self.shards(model):
            with warnings.catch_warnings():
                # the new name of `broadcast_buffers` is not in every version of torch that is allowed
                warnings.simplefilter("ignore", FutureWarning)
                return nn.parallel.DistributedDataParallel(
                    _Whole(model), broadcast_buffers=False, gradient_as_bucket_view=True
                )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        # a layer that ends with a reshaped product returns a view, which nothing changes in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        mesh = init_device_mesh(next(model.parameters()).device.type, (self.size,))
        for layer in _separate_layers(model):
            fully_shard(layer, mesh=mesh)
            if hasattr(layer, "forward_at"):
                register_fsdp_forward_method(layer, "forward_at")
        whole: Any = fully_shard(_Whole(model), mesh=mesh)
        return cast(Callable[..., Any], whole)

    def pieces(self, batch: Batch, size: int | None = None) -> Iterator[Piece]:
        """This process's rows of a batch, in pieces of at most `size` rows; as many pieces in every process.

        A piece that would have no rows is a row without a label.
        """
        rows = len(batch.inputs)
        if self.size == 1 and (size is None or size >= rows):
            yield Piece(batch)
            return
        labels = (batch.targets.long() != IGNORE).sum()
        mine = -(-rows // self.size)
        count = -(-mine // (size or mine))
        bounds = [index * rows // (self.size * count) for index in range(self.size * count + 1)]
        for number in range(count):
            first = self.rank * count + number
            start, stop = bounds[first : first + 2]
            part = slice(start, stop) if stop > start else slice(0, 1)
            targets = batch.targets[part].long()
            if stop == start:
                targets = torch.full_like(targets, IGNORE)
            positions = None if batch.positions is None else batch.positions[part]
            yield Piece(Batch(batch.inputs[part], targets, positions), labels, is_last=number + 1 == count)

    def total(self, losses: Sequence[Tensor]) -> Tensor:
        """The loss of a batch from the shares of this process's pieces."""
        if self.size == 1 and len(losses) == 1:
            return losses[0]
        total = torch.zeros((), dtype=torch.float64, device=losses[0].device)
        for loss in losses:
            total += loss
        self.add_up([total])
        return total

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replaces each tensor, in every process, by its sum over the processes."""
        if self.size > 1:
            for tensor in tensors:
                torch.distributed.all_reduce(tensor)

    def agreed(self, value: Any) -> Any:
        """The value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def everywhere(self, value: Any) -> list[Any]:
        """The values of all processes."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.control)
        return values


ALONE = Group()
_current = ALONE


def current() -> Group:
    """The group that this process belongs to."""
    return _current


def join(rank: int, size: int, device: torch.device, *, address: str = "env://", sharded: bool | None = None) -> Group:
    """Makes this process part of a group; it returns once all have joined.

    address: where the processes meet, as for `torch.distributed.init_process_group`.
    """
    global _current
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)
    _current = Group(rank, size, dist.new_group(backend="gloo", timeout=PATIENCE), sharded)
    return _current


def leave() -> None:
    """Ends the membership of this process."""
    global _current
    if _current.size > 1:
        torch.distributed.destroy_process_group()
    _current = ALONE


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _separate_layers(model: Model) -> list[nn.Module]:
    """The layers of a model that can be sharded one by one; none where layers share parameters."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    owners = [id(parameter) for layer in layers for parameter in layer.parameters()]
    return list(layers) if len(owners) == len(set(owners)) else []


# ------------------------------------------------------------------ tensors that may be shards


def is_shard(tensor: Any) -> bool:
    """Whether this process has only its share of a tensor."""
    # only a DTensor has this method; to import its class takes time
    return hasattr(tensor, "to_local")


def local(tree: Any) -> Any:
    """A tree of dictionaries and tensors with, of every shard, what this process has."""
    if isinstance(tree, Mapping):
        return {key: local(value) for key, value in tree.items()}
    return tree.to_local() if is_shard(tree) else tree


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The tensor whose shares, along the first axis, are the parts, as a tensor or a shard in the manner of `like`."""
    # a tensor that is not sharded is the same in all parts
    whole = (
        parts[0] if len(parts) == 1 or parts[0].shape == like.shape or parts[0].ndim == 0 else torch.cat(list(parts))
    )
    if not is_shard(like) or whole.ndim == 0:
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(whole.to(like.device), sharded.device_mesh, sharded.placements, src_data_rank=None)
