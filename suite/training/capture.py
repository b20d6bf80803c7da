"""CUDA graphs: record a function of static tensors once and replay it, so that small models are not launch-bound.

The function runs a few times before it is recorded, because lazy initialisation must not happen during recording. What
it changes (parameters, optimizer state, accumulators, random state) is put back afterwards. Recording therefore has no
effect on results, and a resumed run gives the same values as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from subquad.suite.contracts import Batch, Segment
from subquad.suite.training.data import take

WARMUPS = 2


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # one stream for the whole process, because cuBLAS keeps a workspace of 32 MiB for every stream
    return torch.cuda.Stream(device)


def record(
    function: Callable[[], None], touched: Callable[[], Iterable[Tensor]], device: torch.device, pool: Any
) -> Callable[[], None]:
    """A replay of `function` on a CUDA device.

    touched: gives every tensor that the function changes in place. It is called before and after the warm-up; a tensor
    that first appears during the warm-up (optimizer state) is set to zero.
    """
    with unchanged(touched, device):
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                function()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        before = generator.clone_state()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                function()
        except BaseException:
            # the generator would still wait for the end of the recording, and refuse to draw any number after it
            generator.graphsafe_set_state(before)
            raise
    return graph.replay


@contextlib.contextmanager
def unchanged(touched: Callable[[], Iterable[Tensor]], device: torch.device) -> Iterator[None]:
    """A context whose end puts back what was changed in it: tensors, as in `record`, and the random state."""
    before = {id(tensor): (tensor, tensor.detach().clone()) for tensor in touched()}
    cuda = device.type == "cuda"
    random_state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    yield
    with torch.no_grad():
        for tensor in touched():
            if id(tensor) in before:
                tensor.copy_(before[id(tensor)][1])
            else:
                tensor.zero_()
    if cuda:
        torch.cuda.set_rng_state(random_state, device)
    else:
        torch.set_rng_state(random_state)


class BatchGraphs:
    """Calls functions of a batch as CUDA graphs, one graph for every kind of call and shape of batch.

    touched: as in `record`.
    recording: gives a context in which a graph is recorded, e.g. one in which a clock stands still.
    """

    def __init__(
        self,
        touched: Callable[[], Iterable[Tensor]],
        device: torch.device,
        recording: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.touched, self.device, self.recording = touched, device, recording
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[Any, tuple[Callable[[], None], Batch]] = {}

    def call(self, kind: str, function: Callable[[Batch], None], segment: Segment, rows: Tensor) -> None:
        """Calls `function` on the given rows of a segment. kind: tells functions apart."""
        shapes = segment.inputs.shape[1:], segment.targets.shape[1:]
        key = (kind, len(rows), *shapes, segment.inputs.dtype, segment.rate)
        if key not in self._recorded:
            with self.recording():
                static = take(segment, rows)
                replay = record(lambda: function(static), self.touched, self.device, self._pool)
            self._recorded[key] = replay, static
        replay, static = self._recorded[key]
        torch.index_select(segment.inputs, 0, rows, out=static.inputs)
        torch.index_select(segment.targets, 0, rows, out=static.targets)
        if static.positions is not None and segment.positions is not None:
            torch.index_select(segment.positions, 0, rows, out=static.positions)
        replay()
