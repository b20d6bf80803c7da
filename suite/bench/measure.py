"""Measures time and extra memory of one case on this device, and the best rates of the device itself.

On a GPU, times are those of `triton.testing.do_bench`: device events around each call, with the L2 cache overwritten
before each call. They include host work that the device does not hide. On a CPU they are wall time. An implementation
that breaks the accuracy rule of `suite.laws.accuracy` on the same kernel sizes is not timed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.suite.bench.cases import Case, label
from subquad.suite.bench.contracts import Cost, Implementation, Shape, Workload
from subquad.suite.environment import version_of
from subquad.suite.laws import accuracy
from subquad.suite.laws.accuracy import outputs_of
from subquad.suite.runs import RunEnded
from subquad.suite.training.numerics import numerics

SEED = 20
COPY_BYTES = 2**30
TF32_PRODUCTS = 3
"""Products of TF32 parts that keep the digits of a float32 product."""
MATMUL_SIZE = 8192


class Unavailable(RunEnded):
    """Raised if a case cannot be timed here: a missing peer, an unsupported shape, a wrong result, or no memory."""

    def __init__(self, status: str, reason: object) -> None:
        super().__init__(status, " ".join(str(reason).split())[:300])


@dataclass(frozen=True)
class Ceilings:
    """The best rates of this device: bytes/s of a copy (read and written) and flop/s of a product, both measured."""

    copy: list[float]
    """Samples, in bytes/s."""
    matmul: dict[str, list[float]]
    """Samples in flop/s by dtype: `bfloat16` and `tf32` on matrix units, `float32` without TF32."""
    exponentials: float | None = None
    """Exponentials a second of an NVIDIA GPU, computed: 16 per clock and multiprocessor at the highest clock."""

    def floor_ms(self, cost: Cost, dtype: str) -> float:
        """Lower bound of any implementation's time (ms): the slowest of bytes, matrix products and exponentials."""
        seconds = cost.num_bytes / statistics.median(self.copy)
        if self.exponentials:
            seconds = max(seconds, cost.num_exponentials / self.exponentials)
        if cost.matrix:
            seconds = max(seconds, cost.num_flops / self.products(dtype))
        return 1e3 * seconds

    def products(self, dtype: str) -> float:
        """The best rate of products of this dtype, in flop/s, with the digits that the accuracy rule asks for.

        Products of float32 run on matrix units as three products of TF32 parts, where that is faster.
        """
        rate = statistics.median(self.matmul.get(dtype) or self.matmul["bfloat16" if "16" in dtype else "float32"])
        parts = self.matmul.get("tf32", [0.0]) if dtype == "float32" else [0.0]
        return max(rate, statistics.median(parts) / TF32_PRODUCTS)


def find(workload: Workload, name: str) -> Implementation:
    """The implementation of that name."""
    return next(found for found in workload.implementations if found.name == name)


def versions_in(implementation: Implementation) -> dict[str, str]:
    """Versions of the packages of an implementation that are installed, by their names."""
    found = {name: version_of(name) for name in implementation.packages}
    return {name: version for name, version in found.items() if version}


def sample(call: Callable[[], object], device: torch.device, budget_ms: float = 100.0) -> list[float]:
    """Times of single calls in ms, as many as fit into about `budget_ms`, at least three."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return list(do_bench(call, warmup=max(1, int(budget_ms / 4)), rep=max(1, int(budget_ms)), return_mode="all"))
    call()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 3 or (len(samples) < 1000 and time.perf_counter() - begin < budget_ms / 1e3):
        start = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - start))
    return samples


def ceilings(device: torch.device) -> Ceilings:
    """Measures the copy bandwidth and the matrix rates of this device (smaller problems on a CPU)."""
    gpu = device.type == "cuda"
    source = torch.randint(127, (COPY_BYTES if gpu else COPY_BYTES // 16,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = [2e3 * source.numel() / ms for ms in sample(partial(target.copy_, source), device)]
    size = MATMUL_SIZE if gpu else 512
    matmul = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32), ("tf32", torch.float32)):
        if name == "tf32" and not gpu:
            continue
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        with numerics("tf32" if name == "tf32" else "fp32"):
            times = sample(partial(torch.mm, a, b, out=torch.empty_like(a)), device)
        matmul[name] = [2e3 * size**3 / ms for ms in times]
    exponentials = None
    if gpu and torch.version.cuda:
        chip = torch.cuda.get_device_properties(device)
        # kHz; older versions of torch do not tell
        exponentials = 16e3 * chip.multi_processor_count * getattr(chip, "clock_rate", 0) or None
    return Ceilings(copy, matmul, exponentials)


def load(workload: Workload, case: Case) -> Callable[..., Any]:
    """The callable of a case; Unavailable where it cannot be had or cannot run this shape."""
    if reason := refusal(workload, case):
        raise Unavailable("n/a", reason)
    try:
        return find(workload, case.implementation).load()
    except Exception as error:  # a broken binary raises anything from OSError to AttributeError
        raise Unavailable("n/a", f"{type(error).__name__}: {error}") from None


def refusal(workload: Workload, case: Case) -> str | None:
    """The reason why an implementation cannot run a case even where it is installed, or None."""
    implementation = find(workload, case.implementation)
    if case.backward and not implementation.backward:
        return "it has no backward pass"
    return implementation.supports(dict(case.shape), case.torch_dtype)


def gate(workload: Workload, case: Case, device: torch.device) -> None:
    """Unavailable("failed") where the implementation breaks the accuracy rule on the case's shape cut short."""
    call, implementation = load(workload, case), find(workload, case.implementation)
    short = workload.short(dict(case.shape))

    def op(**given: Any) -> Any:
        return implementation.from_native(call(**implementation.to_native(given)))

    try:
        wanted = _expected(workload, short, case)
        replace(wanted, floors={**workload.floors, **implementation.floors}).assert_met_by(op, str(device))
    except Exception as error:
        # an implementation may have assertions of its own, which say nothing about its accuracy
        if isinstance(error, AssertionError) and _raised_in(error) == accuracy.__file__:
            raise Unavailable("failed", f"wrong at {label(short)}: {error}") from None
        raise _broken(implementation, case, error) from None


_LAST: list[tuple[Any, accuracy.Expected]] = []
"""The last result of the reference, kept because the reference is slow and several implementations share a case."""


def _expected(workload: Workload, short: Shape, case: Case) -> accuracy.Expected:
    """The result of the reference on a short shape, for inputs rounded to the dtype of the case."""
    key = (workload.make_inputs, workload.reference, tuple(short.items()), case.dtype, case.backward)
    if not _LAST or _LAST[0][0] != key:
        inputs = workload.make_inputs(short, torch.float64, torch.Generator().manual_seed(SEED))
        options: dict[str, Any] = {"dtype": case.torch_dtype, "keep": workload.keep, "grad": case.backward}
        _LAST[:] = [(key, accuracy.expected(workload.reference, inputs, **options))]
    return _LAST[0][1]


def _raised_in(error: Exception) -> str:
    """The file whose code raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_code.co_filename


OUT_OF_MEMORY = "can't allocate memory", "out of memory", "OUT_OF_MEMORY"


def _broken(implementation: Implementation, case: Case, error: Exception) -> Unavailable:
    """The status of an error: a peer may raise anything (n/a); ours may raise only ValueError where it cannot run."""
    # running out of host memory has no exception of its own, and a kernel may ask the driver for memory
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
        return Unavailable("oom", f"{case}: out of memory")
    if "0 active drivers" in str(error):
        # Triton raises this on a machine without a GPU
        return Unavailable("n/a", "its Triton kernel needs a GPU")
    failed = implementation.kind == "ours" and not isinstance(error, ValueError)
    return Unavailable("failed" if failed else "n/a", f"{type(error).__name__}: {error}")


def prepare(workload: Workload, case: Case, device: torch.device) -> Callable[[], Any]:
    """A call without arguments that runs the case once, on inputs it owns."""
    function, implementation = load(workload, case), find(workload, case.implementation)
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator(device=device).manual_seed(SEED)
    inputs = workload.make_inputs(dict(case.shape), dtype, generator)
    for name in workload.keep:
        if isinstance(inputs.get(name), Tensor) and inputs[name].is_floating_point():
            inputs[name] = inputs[name].to(torch.promote_types(dtype, torch.float32))
    with torch.no_grad():
        native = implementation.to_native(inputs)
    if not case.backward:

        def forward() -> Any:
            with torch.no_grad():
                return function(**native)

        return forward
    leaves = [x.detach().requires_grad_() for x in native.values() if _differentiable(x)]
    remaining = iter(leaves)
    native = {name: next(remaining) if _differentiable(value) else value for name, value in native.items()}
    cotangents: list[Tensor] = []

    def step() -> Any:
        outputs = outputs_of(function(**native))
        if not cotangents:
            cotangents.extend(map(torch.randn_like, outputs))
        return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)

    return step


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def checked(workload: Workload, case: Case, device: torch.device) -> Callable[[], Any]:
    """The prepared call, run once at full size.

    Unavailable where it has no memory, fails, or returns NaN or infinity.
    """
    try:
        call = prepare(workload, case, device)
        finite = all(bool(torch.isfinite(part).all()) for part in outputs_of(call()))
    except Unavailable:
        raise
    except Exception as error:
        raise _broken(find(workload, case.implementation), case, error) from None
    if not finite:
        raise Unavailable("failed", f"{case}: the result is not finite at full size")
    return call


def extra_memory(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes allocated at the peak of a call beyond its inputs, results included; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


WARMUPS = 3
"""Calls before a call is recorded. An implementation may choose its configuration in more than its first call."""


def recorded(
    workload: Workload, case: Case, device: torch.device, *, as_graph: bool = True
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """The call of a case that the accuracy rule accepts, recorded as a CUDA graph, and what its row says.

    The row has `extra_bytes` as `extra_memory` gives them, and `not_recorded`, the reason why there is no graph, or an
    empty text. What is left of a failed attempt could disturb times, so they are taken in another process.

    as_graph: whether the call is recorded; False: it is returned as it is.

    Unavailable as of `checked` and `gate`; OutOfMemoryError.
    """
    # called before the accuracy check, because some peers tune themselves to the shape of their first call
    call = checked(workload, case, device)
    gate(workload, case, device)
    for _ in range(WARMUPS):
        call()
    found = {"extra_bytes": extra_memory(call, device), "not_recorded": ""}
    if device.type == "cuda":
        from subquad.suite.training.capture import record

        try:
            call = record(call, lambda: (), device, None) if as_graph else call
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            found["not_recorded"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        # other processes prepare their cases meanwhile
        torch.cuda.empty_cache()
    return call, found
