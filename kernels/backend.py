"""Chooses and records the backend of an operator: Triton on an accelerator, plain PyTorch everywhere else."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from subquad.kernels.checks import check_tensors
from subquad.kernels.versions import VERSIONS

R = TypeVar("R")

NO_GRADIENT = "has no gradient; call it under torch.no_grad()"
"""The obstacle of step functions, whose kernels are forward only."""

NO_ELEMENT = "needs at least one element"
"""The obstacle of inputs in which a size is zero, where launchers cannot plan; plain PyTorch gives the empty result."""

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Use(TypedDict):
    """Version (`kernels.versions`) and backend of an operator that was used: "triton", "torch" or "triton+torch"."""

    version: int
    backend: str


_recorders: ContextVar[tuple[dict[str, Use], ...]] = ContextVar("recorders", default=())


@contextlib.contextmanager
def record_operators() -> Iterator[dict[str, Use]]:
    """Context manager that yields a dictionary, which fills with every operator that this thread calls, by name.

    A step function counts as its operator. A recorder inside another one feeds both.
    """
    used: dict[str, Use] = {}
    token = _recorders.set((*_recorders.get(), used))
    try:
        yield used
    finally:
        _recorders.reset(token)


def record(op: str, backend: str) -> None:
    """Tells the recorders that `op` runs on "triton" or "torch". Names that are not operators are ignored."""
    recorders = _recorders.get()
    if not recorders:
        return
    name = op.removesuffix("_step")
    if name not in VERSIONS:
        return
    for used in recorders:
        backends = {backend, *used[name]["backend"].split("+")} if name in used else {backend}
        used[name] = {"version": VERSIONS[name], "backend": "+".join(sorted(backends, reverse=True))}


# torch.compile cannot trace a context variable, so it records while it traces; `torch.compiler.assume_constant_result`
# sets the same mark, and imports for that as much as torch itself
record._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def triton_missing() -> str | None:
    """The reason why Triton cannot be imported or is too old, or None."""
    try:
        import triton
    except ImportError as error:
        return f"needs the package triton ({error})"
    # functions of constants, of which the kernels' tiles are computed, came with version 3.5
    if not hasattr(triton, "constexpr_function"):
        return f"needs Triton 3.5 or newer (this is {triton.__version__})"
    return None


def use_triton(
    op: str,
    backend: str,
    x: Tensor,
    *others: Tensor | None,
    beside: Sequence[object] = (),
    obstacle: str | None = None,
    is_faster: bool = True,
) -> bool:
    """Whether `op` runs in Triton, by its first input x and its other tensor inputs; the answer is recorded.

    On every backend, ValueError is raised where one of them is not of a floating point dtype or lies on another device.

    beside: further inputs, of which those that are tensors must lie on the device too: integers and complex numbers.

    backend: "torch" never does. "auto" does on a CUDA device, where Triton can be imported, every dtype is float32,
        bfloat16 or float16, there is no obstacle and the kernels are faster than PyTorch. "triton" always does, and
        where it cannot raises ValueError; besides CUDA tensors it takes CPU tensors under Triton's interpreter
        (TRITON_INTERPRET=1) and meta tensors, for which a launcher computes shapes only.
    obstacle: why the operator's kernels cannot take these arguments, as the end of a sentence that begins with
        "backend='triton'", or None.
    is_faster: whether the operator's kernels were measured to be faster than PyTorch for these arguments.
    """
    check_tensors(op, x, *others, beside=beside)
    chosen = chooses_triton(op, backend, x, *others, obstacle=obstacle, is_faster=is_faster)
    record(op, "triton" if chosen else "torch")
    return chosen


def chooses_triton(
    op: str, backend: str, x: Tensor, *others: Tensor | None, obstacle: str | None = None, is_faster: bool = True
) -> bool:
    """The answer of `use_triton`, which is not recorded: `op` is not about to run."""
    if backend == "torch":
        return False
    if backend not in ("auto", "triton"):
        raise ValueError(f"{op}: backend={backend!r} is not one of 'auto', 'torch', 'triton'.")
    if backend == "auto" and (x.device.type != "cuda" or not is_faster):
        return False
    reason = obstacle or _general_obstacle(x, *others)
    if reason and backend == "triton":
        raise ValueError(f"{op}: backend='triton' {reason}; use backend='auto' or 'torch'.")
    return reason is None


def made_once(choose: Callable[..., R]) -> Callable[..., R]:
    """Decorator of checks and choices (tensors, *options), which are made once for equal forms of tensors on a GPU.

    choose: returns the choice, or raises an error, which is not kept. It depends on nothing but the options and the
    shapes, dtypes and devices of the tensors, of which the first is given and each other one may be None.
    """
    # a list that is empty until the choice is made; types tell 1, 1.0 and True apart
    kept: Callable[..., list[R]] = functools.lru_cache(4096, typed=True)(lambda *key: [])

    @functools.wraps(choose)
    def choice(tensors: tuple[Tensor | None, ...], *options: Any) -> R:
        x = tensors[0]
        # sizes of fake tensors may be symbols, which are no keys
        if torch.compiler.is_compiling() or x is None or x.get_device() < 0 or isinstance(x, FakeTensor):
            return choose(tensors, *options)
        forms = tuple([None if x is None else (x.shape, x.dtype, x.device) for x in tensors])
        try:
            known = kept(forms, *options)
        except TypeError:
            # an option that cannot be a key, such as a list, is for the check to refuse
            return choose(tensors, *options)
        if not known:
            known.append(choose(tensors, *options))
        return known[0]

    return choice


_AS_IT_IS = contextlib.nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Makes the device of x the current one, on which Triton launches."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(x.device)


def _general_obstacle(x: Tensor, *others: Tensor | None) -> str | None:
    if (missing := triton_missing()) is not None:
        return missing
    for tensor in (x, *others):
        if tensor is not None and tensor.dtype not in TRITON_DTYPES:
            return f"takes float32, bfloat16 and float16, got {tensor.dtype}"
    kind = x.device.type
    if kind in ("cuda", "meta"):
        return None
    from triton import knobs

    if kind == "cpu" and knobs.runtime.interpret:
        return None
    return f"needs a CUDA device (or, on the CPU, TRITON_INTERPRET=1 before the start), got {kind}"
