"""A kernel that only says what it was asked for, and tensors that say they are on a GPU, for tests of launches."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

STREAM = 17


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on the GPU of an index."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    index = 0

    def get_device(self) -> int:
        return self.index


def on_device(offset: int = 0, dtype: torch.dtype = torch.float32, index: int = 0) -> torch.Tensor:
    """An empty tensor that begins `offset` bytes behind a multiple of 64."""
    memory = torch.zeros(128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset
    x = memory[start : start + 16].view(dtype) if start % dtype.itemsize == 0 else memory[start : start + 16]
    found = x.as_subclass(OnDevice)
    found.index = index
    return found


class Kernel:
    """Keeps what Triton's public `kernel[grid](...)` was asked for, and with what its answers were relaunched.

    names: of the parameters; those in capitals are constexprs, but for T.   keep: whether anything is kept.
    """

    def __init__(self, *names: str, keep: bool = True) -> None:
        self.arg_names = [*names, "BLOCK"] if "BLOCK" not in names else list(names)
        self.params = [
            SimpleNamespace(name=name, is_constexpr=name.isupper() and name != "T") for name in self.arg_names
        ]
        self.keep = keep
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.started: list[tuple[Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: Any) -> Any:
        def ask(**named: Any) -> Any:
            if self.keep:
                self.asked.append((grid, named))
            return SimpleNamespace(function=len(self.asked), packed_metadata="metadata", run=self._run)

        return ask

    def _run(self, x: int, y: int, z: int, *given: Any) -> None:
        if self.keep:
            # a stream, which of the compiled kernels, no metadata of the launch and no hooks
            assert given[0] == STREAM
            assert given[2:6] == ("metadata", None, None, None)
            self.started.append(((x, y, z), given[1:2] + given[6:]))


@contextlib.contextmanager
def on_a_gpu(*passes: Any, computes: bool = False) -> Iterator[list[tuple[Any, ...]]]:
    """Gives the launches while CPU tensors say they are on a GPU for which all is compiled.

    passes:   the `Replayed` that are called meanwhile; what they and the launcher keep is forgotten afterwards.
    computes: whether Triton's interpreter carries a launch out, with the tensors at the addresses that it got. Else
              nothing starts.
    """
    from triton.runtime.interpreter import InterpretedFunction

    from subquad.kernels import launch as module
    from subquad.kernels.replay import Replayed

    started: list[tuple[Any, ...]] = []
    publicly = module._launch_publicly

    def ask(kernel: Any, axes: Any, named: dict[str, Any]) -> Any:
        def run(x: int, y: int, z: int, *given: Any) -> None:
            started.append((x, y, z, *given))
            if computes:
                arguments = dict(zip(kernel.arg_names, given[6:], strict=True))
                likes = {name: named[name] for name in arguments if isinstance(named[name], torch.Tensor)}
                # a GPU carries it out without operations of torch
                with _disable_current_modes():
                    given = {name: (arguments[name], like) for name, like in likes.items() if like.numel()}
                    kernel[x, y, z](**arguments | likes | tensors_at(given, older))

        if computes:
            with _disable_current_modes():
                publicly(kernel, axes, named)
        started.append((*axes, *named.values()))
        return SimpleNamespace(run=run, function=1, packed_metadata="metadata")

    def params(kernel: Any) -> list[Any]:
        annotations = kernel.fn.__annotations__
        return [
            SimpleNamespace(name=name, is_constexpr=annotations.get(name) == "tl.constexpr")
            for name in kernel.arg_names
        ]

    launcher = module.launch
    older = tensors() if computes else []
    # so that a launch need not look through what was there before
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "params", property(params), raising=False)
        patch.setattr(torch.Tensor, "get_device", lambda x: 0)
        patch.setattr(module, "_launch_publicly", ask)
        patch.setattr(launcher, "relaunches", True)
        patch.setattr(launcher, "current_stream", lambda device: STREAM)
        patch.setattr(launcher, "_known", module.Launcher()._known)
        for one in passes:
            patch.setattr(one, "_known", Replayed(one.function)._known)
        yield started


def tensors() -> list[torch.Tensor]:
    """All tensors that are not hidden from the garbage collector."""
    return [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]


def tensors_at(given: dict[str, tuple[int, torch.Tensor]], older: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The memory from an address on, in the dtype of the tensor beside it, each under its name.

    older: tensors that are hidden from the garbage collector.
    """
    memories = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in older + tensors() if x.numel()}
    found = {}
    for name, (address, like) in given.items():
        start = max((start for start in memories if start <= address), default=0)
        offset, nbytes = address - start, memories[start].nbytes() if start else 0
        assert offset < nbytes, "a kernel got an address at which there is no tensor"
        place = offset // like.element_size(), ((nbytes - offset) // like.element_size(),), (1,)
        found[name] = torch.empty(0, dtype=like.dtype).set_(memories[start], *place)
    return found
