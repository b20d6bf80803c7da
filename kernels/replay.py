"""The allocations and launches of a pass, made again without its Python: `forward = Replayed(_forward)`.

A pass of several launches chooses tiles and plans, allocates, and finds a compiled kernel at each launch, all of which
is the same for equal inputs. At the second call of a key, `Replayed` writes down what the pass allocates and launches.
From the third on it allocates the results and one piece of memory for all that is temporary, and starts the compiled
kernels with the new addresses. The key has the device, the options with their types, and of every tensor its shape,
strides, dtype and the lowest four bits of its address, by which kernels are chosen and compiled.

A pass is written down only if it does nothing but allocate, make views and launch, which a dispatch mode of torch
observes. Where it does more (a copy, a sum), or is itself observed (fake tensors and other modes, a profiler's hook,
`torch.compile`), it is called as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.kernels.launch import Heard, Launcher, Relaunch, cdiv, launch

Tensors = tuple[Tensor | None, ...]
Results = tuple[Any, ...]
Arguments = Callable[[Sequence[Any]], tuple[Any, ...]]

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
MAX_RECORDINGS = 1024
"""Number of keys that a pass keeps. A recording takes some 20 kB, and sequences may have thousands of lengths."""
ALIGNMENT = 512
"""Temporary tensors begin at multiples of so many bytes, as those that torch allocates on a GPU."""


class Recording(NamedTuple):
    """The allocations and launches of a pass.

    Its kernels find their arguments in one list for each call: the stream, the addresses of inputs, results and
    temporary tensors, and the constants.
    """

    results: list[Callable[[], Any]]
    """Each makes an empty tensor, or gives again what is no tensor."""
    offsets: list[int]
    """Temporary tensors begin at these bytes of their common memory."""
    num_bytes: int
    constants: list[Any]
    launches: list[tuple[Relaunch, Arguments]]
    """The compiled kernel, and what takes its arguments from the list."""


class Replayed:
    """A function of (tensors, *options); the first tensor is given, and each other one may be None.

    It returns a tuple of tensors that it allocates, and of what is no tensor. It may depend on what the key has and on
    nothing else; its kernels may write to the inputs. All tensors are of one device. Those that are temporary live to
    the end of the call, even where the function gives one back earlier.
    """

    def __init__(
        self,
        function: Callable[..., Results],
        launcher: Launcher = launch,
        kinds: tuple[type, ...] = (Tensor, torch.nn.Parameter),
    ) -> None:
        """kinds: of tensors; those of other classes, such as fake ones, may have no memory.

        The function is called, too, with a tensor whose memory holds its negative, which `launch` refuses.
        """
        self.function, self.launcher, self.kinds = function, launcher, kinds
        # a list of nothing, then of None, and from the second call on of None and the recording, or None without one
        self._known: Callable[..., list[Recording | None]] = functools.lru_cache(MAX_RECORDINGS, typed=True)(
            lambda *key: []
        )

    def __call__(self, tensors: Tensors, *options: Any) -> Results:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self.function(tensors, *options)
        first, launcher = tensors[0], self.launcher
        assert first is not None
        device = first.get_device()
        if device < 0 or not launcher.relaunches or launcher.is_profiled():
            return self.function(tensors, *options)
        key: list[Any] = []
        values: list[Any] = [None]
        for x in tensors:
            if x is None:
                key.append(None)
                values.append(None)
            elif type(x) in self.kinds and not x.is_neg():
                address = x.data_ptr()
                key.append((x.shape, x.stride(), x.dtype, address & 15))
                values.append(address)
            else:
                return self.function(tensors, *options)
        known = self._known(device, *options, tuple(key))
        if len(known) < 2:
            place = len(known)
            recording, results = self._record(tensors, options) if known else (None, self.function(tensors, *options))
            # not appended: two threads may make the first call at the same time
            known[place : place + 1] = [recording]
            return results
        recording = known[1]
        if recording is None:
            return self.function(tensors, *options)
        results = tuple([make() for make in recording.results])
        values += [x.data_ptr() if isinstance(x, Tensor) else None for x in results]
        if recording.num_bytes:
            # given back before the kernels have run, to what runs behind them on the same stream
            memory = torch.empty(recording.num_bytes, dtype=torch.uint8, device=first.device)
            begin = memory.data_ptr()
            values += [begin + offset for offset in recording.offsets]
        values += recording.constants
        values[0] = launcher.current_stream(device)
        for relaunch, arguments in recording.launches:
            relaunch.run(*arguments(values))
        return results

    def _record(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Recording | None, Results]:
        with self.launcher.heard() as heard, _Watch() as watch:
            results = self.function(tensors, *options)
        return _recording(tensors, results, watch, heard), results


class _Watch(TorchDispatchMode):
    """Keeps all tensors that are allocated in this context, and sees whether torch does more."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}
        """By the address of their memory."""
        self.does_more = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ALLOCATIONS:
            self.made[result.data_ptr()] = result
        elif not (func.is_view and isinstance(result, Tensor)):
            self.does_more = True
        elif result.untyped_storage().data_ptr() not in self.made and result.data_ptr() != args[0].data_ptr():
            # an input is told by where it begins, and by nothing but that
            self.does_more = True
        return result


def _recording(tensors: Tensors, results: Results, watch: _Watch, heard: list[Heard]) -> Recording | None:
    """Returns the allocations and launches of a pass, or None where it did more or they cannot be told from this."""
    given = [(x.data_ptr(), i) for i, x in enumerate(tensors, 1) if x is not None and x.numel()]
    places = dict(given)
    if watch.does_more or len(places) < len(given) or any(x is not None and x.is_complex() for x in tensors):
        return None
    makers: list[Callable[[], Any]] = []
    for i, x in enumerate(results, 1 + len(tensors)):
        makers.append(_maker(x))
        if isinstance(x, Tensor) and x.numel():
            # a result has a memory of its own, and is all of it
            whole = watch.made.pop(x.data_ptr(), None)
            if whole is None or (whole.shape, whole.stride()) != (x.shape, x.stride()):
                return None
            places[x.data_ptr()] = i
    launches: list[tuple[Relaunch, Arguments]] = []
    constants: list[Any] = []
    offsets: list[int] = []
    starts: dict[int, int] = {}
    num_bytes = 0
    for relaunch, axes, arguments in heard:
        if relaunch is None:
            return None
        row = []
        for x in (*axes, _STREAM, relaunch.function, relaunch.metadata, None, None, None, *arguments):
            if x is _STREAM:
                row.append(0)
            elif not isinstance(x, Tensor) or not x.numel():
                # a tensor without elements has the address 0
                constants.append(0 if isinstance(x, Tensor) else x)
                row.append(-len(constants))
            else:
                address, memory = x.data_ptr(), x.untyped_storage()
                if address not in places:
                    if memory.data_ptr() not in watch.made:
                        return None
                    if memory.data_ptr() not in starts:
                        starts[memory.data_ptr()] = num_bytes
                        num_bytes += cdiv(memory.nbytes(), ALIGNMENT) * ALIGNMENT
                    places[address] = 1 + len(tensors) + len(results) + len(offsets)
                    offsets.append(starts[memory.data_ptr()] + address - memory.data_ptr())
                row.append(places[address])
        launches.append((relaunch, itemgetter(*row)))
    return Recording(makers, offsets, num_bytes, constants[::-1], launches)


_STREAM = object()


def _maker(x: Any) -> Callable[[], Any]:
    """Makes an empty tensor like x, or gives what is no tensor."""
    if not isinstance(x, Tensor):
        return lambda: x
    # a contiguous tensor may have other strides where a size is one
    if x.dim() and x.stride() == torch.empty(x.shape, device="meta").stride():
        # sizes one by one are read faster than a tuple
        return functools.partial(torch.empty, *x.shape, dtype=x.dtype, device=x.device)
    return functools.partial(torch.empty_strided, tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)
