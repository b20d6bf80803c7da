"""Measures where the time of a step goes, by kernel on a GPU and by operation of torch on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from subquad.suite.training.measure import synchronize

WARM_UP = 3
"""Steps before the first that counts: kernels are compiled and memory is taken in the first ones."""


class Share(NamedTuple):
    """The part of a step that one kernel or operation takes."""

    name: str
    calls: float
    """Calls a step."""
    microseconds: float
    """Time a step: of the device for a kernel, of one thread of the host for an operation, without what it calls."""


def shares(step: Callable[[], None], device: torch.device, count: int) -> list[Share]:
    """The kernels or operations of a step, by the mean of `count` steps, the longest first.

    On a GPU these are the kernels, copies and fills of the device. Their sum is the time of a step only where they run
    one after the other and the host launches them fast enough, as in a recorded graph.
    """
    on_gpu = device.type == "cuda"
    for _ in range(WARM_UP):
        step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        for _ in range(count):
            step()
        synchronize(device)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    parts = []
    for event in found.key_averages():
        # a named range, such as that of an optimizer's step, repeats the time of the kernels in it
        if event.device_type == wanted and not (on_gpu and event.is_user_annotation):
            time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            parts.append(Share(event.key, event.count / count, time / count))
    return sorted((part for part in parts if part.microseconds > 0), key=lambda part: -part.microseconds)
