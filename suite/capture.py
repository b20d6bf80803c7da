"""CUDA graphs: record a function of static tensors once and replay it, so that small models are not launch-bound.

The function runs a few times before it is recorded, because lazy initialisation must not happen during recording. What
it changes (parameters, optimizer state, accumulators, random state) is put back afterwards. Recording therefore has no
effect on results, and a resumed run gives the same values as an uninterrupted one.
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
    # one stream for the whole process, because cuBLAS keeps a workspace of 32 MiB for every stream
    return torch.cuda.Stream(device)


def record(
    function: Callable[[], None], touched: Callable[[], Iterable[Tensor]], device: torch.device, pool: Any
) -> Callable[[], None]:
    """A replay of `function` on a CUDA device.

    touched: gives every tensor that the function changes in place. It is called before and after the warm-up; a tensor
    that first appears during the warm-up (optimizer state) is set to zero.
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
