"""An operator as its laws see it: calls of its implementations on small inputs, and how their results are judged.

A call of a kernel that Triton interprets takes long, so what has been computed is kept, and several laws are judged
from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from subquad.suite.bench.cases import label
from subquad.suite.bench.contracts import Implementation, Shape, Workload
from subquad.suite.laws.accuracy import Expected, at_least_float32, cast, expected, outputs_of

SEED = 5
TINY = 5
"""Positions of the sequences on which laws are tried that ask little of a kernel's tiles."""
HALF = {torch.bfloat16, torch.float16}

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """An implementation of an operator on inputs of a shape in a dtype."""

    implementation: Implementation
    shape: Mapping[str, int | str]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.implementation.name} at {label(self.shape)} in {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Verdict:
    """The law that the results of a call break, compared with the reference, and how; or nothing."""

    broken: str = ""
    message: str = ""
    dtypes: tuple[torch.dtype, ...] = ()
    """The dtypes of the outputs."""


@dataclass(eq=False)
class Operator:
    """An operator as the laws see it.

    dtypes:   those in which results are compared with the reference.
    compiled: whether implementations that compile something run on this device.
    """

    workload: Workload
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    device: str = "cpu"
    compiled: bool = True
    shapes: tuple[Shape, ...] = ()
    _kept: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.shapes:
            self.shapes = tuple(self.workload.small) or tuple(map(self.workload.short, self.workload.shapes["quick"]))

    def between(self, inputs: Inputs, length: int, start: int, end: int) -> Inputs:
        """The inputs at some positions of sequences of this length."""

        def part(name: str, x: Any) -> Any:
            axis = self.workload.time.get(name)
            if axis is None or not isinstance(x, Tensor) or x.dim() <= axis or x.shape[axis] != length:
                return x
            return x.narrow(axis, start, end - start)

        return {name: part(name, x) for name, x in inputs.items()}

    @property
    def is_step(self) -> bool:
        """Whether it is a step of decoding, which takes a state and returns the next one."""
        return bool(self.workload.states) and not self.workload.time

    def functions(self) -> list[tuple[Implementation, Callable[..., Any]]]:
        """Our implementations that can be loaded and run here."""
        found = []
        for implementation in self.workload.implementations:
            if implementation.kind == "ours" and (self.compiled or not implementation.cold_start):
                try:
                    found.append((implementation, implementation.load()))
                except ImportError:
                    continue
        return found

    def calls(self) -> list[Call]:
        """Every implementation on every shape in every dtype that it supports."""
        return [
            Call(implementation, shape, dtype)
            for implementation, _ in self.functions()
            for shape in self.shapes
            for dtype in self.dtypes
            if implementation.supports(shape, dtype) is None
        ]

    def once(self, shapes: int | None = None) -> list[Call]:
        """Every implementation on the first shapes in the first dtype that it supports."""
        found = []
        for implementation, _ in self.functions():
            for shape in self.shapes[:shapes]:
                dtypes = (t for t in (torch.float32, torch.bfloat16) if implementation.supports(shape, t) is None)
                if (dtype := next(dtypes, None)) is not None:
                    found.append(Call(implementation, shape, dtype))
        return found

    def compiled_calls(self) -> list[Call]:
        """The calls of `once` of implementations that compile something."""
        return [call for call in self.once() if call.implementation.cold_start]

    def tiny(self, shapes: int | None = 1) -> list[Call]:
        """The calls of `once` on a single sequence of a few positions."""
        small = {"B": 1, "T": TINY}
        found = [
            replace(
                call, shape={k: min(v, small.get(k, v)) if isinstance(v, int) else v for k, v in call.shape.items()}
            )
            for call in self.once(shapes)
        ]
        return [call for call in found if "P" not in call.shape]

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, which is called once for each key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def inputs(self, shape: Shape) -> Inputs:
        """The inputs of a shape in float64."""
        return self.workload.make_inputs(shape, torch.float64, torch.Generator().manual_seed(SEED))

    def rounded(self, call: Call, inputs: Inputs | None = None) -> Inputs:
        """Inputs in the dtypes of a call, on the device."""
        inputs = self.inputs(call.shape) if inputs is None else inputs
        wide = at_least_float32(call.dtype)
        found = {name: cast(x, wide if name in self.workload.keep else call.dtype) for name, x in inputs.items()}
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in found.items()}

    def expected(self, shape: Shape, dtype: torch.dtype) -> Expected:
        """The results of the reference."""

        def make() -> Expected:
            return expected(
                self.workload.reference,
                self.inputs(shape),
                dtype=dtype,
                keep=self.workload.keep,
                grad=self.workload.backward,
                floors=self.workload.floors,
            )

        found: Expected = self.kept(("expected", label(shape), dtype), make)
        return found

    def function(self, call: Call, view: Callable[[Tensor, int], Tensor] | None = None) -> Callable[..., Any]:
        """The implementation as a function of our inputs; `view` changes its inputs and its outputs."""
        run = next(run for implementation, run in self.functions() if implementation is call.implementation)

        def op(**given: Any) -> Any:
            native = call.implementation.to_native(given)
            if view is None:
                return call.implementation.from_native(run(**native))
            # the state that a call updates stays where it is
            seen = {
                name: view(x, i) if isinstance(x, Tensor) and name not in self.workload.in_place else x
                for i, (name, x) in enumerate(native.items())
            }
            return tuple(view(x, i) for i, x in enumerate(outputs_of(call.implementation.from_native(run(**seen)))))

        return op

    def verdict(self, call: Call) -> Verdict:
        """Compares results and gradients of a call with the reference: in float32 with views as inputs.

        What takes no float32 is called with views and with plain inputs. Where they differ, plain inputs and memory
        tell which law is broken.
        """
        return self.kept((call.implementation.name, label(call.shape), call.dtype), lambda: self._verdict(call))

    def _verdict(self, call: Call) -> Verdict:
        wanted = self.expected(call.shape, call.dtype)
        dtypes: list[torch.dtype] = []

        def judged(view: Callable[[Tensor, int], Tensor] | None) -> str:
            function = self.function(call, view)

            def op(**given: Any) -> Any:
                outputs = function(**given)
                dtypes[:] = [x.dtype for x in outputs_of(outputs)]
                return outputs

            try:
                wanted.assert_met_by(op, self.device)
            except AssertionError as error:
                return str(error)
            except ValueError:
                # views may be refused in words; plain inputs may not
                if view is None:
                    raise
                return judged(None)
            return ""

        only_half = call.implementation.supports(call.shape, torch.float32) is not None
        view = scattered if only_half or call.dtype not in HALF else None
        with poisoned_memory():
            message = judged(view) or (judged(None) if only_half else "")
        if not message:
            return Verdict(dtypes=tuple(dtypes))
        if view is not None:
            with poisoned_memory():
                plain = judged(None)
            if not plain:
                return Verdict("views", message)
            message = plain
        return Verdict("accuracy" if judged(None) else "poisoned", message)

    @torch.no_grad()
    def forward(self, call: Call, inputs: Inputs) -> list[Tensor]:
        """Outputs of a call with these inputs, which are as in `rounded`. States that it updates are copied before."""
        own = {name: x.clone() if name in self.workload.in_place else x for name, x in inputs.items()}
        return outputs_of(self.function(call)(**own))

    def first(self, call: Call) -> list[Tensor]:
        """Outputs of the first call with the inputs of its shape."""
        made: list[Tensor] = self.kept(("first", str(call)), lambda: self.forward(call, self.rounded(call)))
        return made


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` returns memory full of NaN meanwhile, so that a result which no kernel wrote cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # filling belongs to the deterministic mode; an operation without a deterministic implementation only warns
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1000).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def scattered(x: Tensor, kind: int) -> Tensor:
    """x as a view of larger memory that is full of NaN, in one of three forms; gradients pass through it."""
    if x.dim() == 0 or not x.numel():
        return x
    around = torch.full_like(x, torch.nan if x.is_floating_point() or x.is_complex() else 0)
    # pairs of a real and an imaginary part stay together
    kind = 1 if x.dim() > 1 and x.shape[-1] == 2 else kind
    if x.dim() == 1 or kind % 3 == 0:
        # every second element
        return torch.stack([x, around], -1)[..., 0]
    if kind % 3 == 1:
        # the middle of a projection, with the first two axes of memory exchanged
        parts = torch.cat([around, x, around], -1).transpose(0, 1).contiguous().transpose(0, 1)
        return parts[..., x.shape[-1] : 2 * x.shape[-1]]
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
