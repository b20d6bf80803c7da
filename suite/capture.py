"""CUDA graphs: a function of static tensors recorded once and replayed, so small models are not launch-bound.

Recording runs the function a few times first (lazy initialisation must not happen while recording). Whatever it
changes, parameters, optimizer state, accumulators, random state, is put back afterwards, so recording leaves no trace
and a resumed run continues with the numbers of an uninterrupted one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

WARMUPS = 2


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # one for the whole process: cuBLAS keeps a workspace of 32 MiB for every stream it has seen
    return torch.cuda.Stream(device)


def record(
    function: Callable[[], None], touched: Callable[[], Iterable[Tensor]], device: torch.device, pool: Any
) -> Callable[[], None]:
    """A replay of `function` on a CUDA device.

    touched: every tensor the function changes in place, asked before and after the warm-up; one that first appears
    during it (optimizer state) is taken to start from zero.
    """
    before = {id(tensor): (tensor, tensor.detach().clone()) for tensor in touched()}
    random_state = torch.cuda.get_rng_state(device)
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        function()
    with torch.no_grad():
        for tensor in touched():
            if id(tensor) in before:
                tensor.copy_(before[id(tensor)][1])
            else:
                tensor.zero_()
    torch.cuda.set_rng_state(random_state, device)
    return graph.replay
