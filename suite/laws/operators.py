"""Laws that every operator must obey, as functions that `check operator NAME` and the tests call.

Each takes an `Operator`: the workload of an operator, the device on which it is tried, and what has been computed of it
so far, since a call of a kernel that Triton interprets takes long and several laws can be judged from one. A law tries
our implementations on the small shapes of the workload, and raises AssertionError where it is broken. Together they
hold that results and gradients are those of the reference, whatever the inputs look like in memory, that a sequence may
be split and its future is not seen, and that second derivatives are right or refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from suite.bench.cases import label
from suite.bench.contracts import Implementation, Shape, Workload
from suite.laws.accuracy import Expected, assert_close, at_least_float32, cast, expected, outputs_of, relative_error
from suite.laws.tasks import NotApplicable

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
    """How the results of a call compare with the reference: the law that they break and how, or nothing."""

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

    def tiny(self) -> list[Call]:
        """The calls of `once` on a single sequence of a few positions."""
        small = {"B": 1, "T": TINY}
        found = [
            replace(
                call, shape={k: min(v, small.get(k, v)) if isinstance(v, int) else v for k, v in call.shape.items()}
            )
            for call in self.once(1)
        ]
        return [call for call in found if "P" not in call.shape]

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, once for each key."""
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
        """What the reference gives."""

        def make() -> Expected:
            return expected(
                self.workload.reference,
                self.inputs(shape),
                dtype=dtype,
                keep=self.workload.keep,
                grad=self.workload.backward,
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

        Where they differ, plain inputs and memory tell which law is broken.
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

        view = scattered if call.dtype not in HALF else None
        with poisoned_memory():
            message = judged(view)
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
    """What `torch.empty` returns is full of NaN meanwhile, so that a result which no kernel wrote cannot pass."""
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


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _assert_no(operator: Operator, law: str, calls: list[Call]) -> None:
    """Asserts that no call breaks this law, as far as `Operator.verdict` tells."""
    for call in calls:
        found = operator.verdict(call)
        assert found.broken != law, f"{call}: {found.message}"


def results_are_those_of_the_reference(operator: Operator) -> None:
    """Outputs, final states and all gradients err at most twice as much as plain PyTorch does."""
    _assert_no(operator, "accuracy", operator.calls())


def inputs_may_have_any_memory(operator: Operator) -> None:
    """Inputs and gradients of outputs may have any strides, and what lies between their elements is not read."""
    _assert_no(operator, "views", operator.calls())


def no_memory_is_read_before_it_is_written(operator: Operator) -> None:
    """Results do not depend on what newly allocated memory holds."""
    _assert_no(operator, "poisoned", operator.calls())


def results_have_one_dtype(operator: Operator) -> None:
    """All implementations give results of the same dtypes."""
    found: dict[Any, tuple[Call, tuple[torch.dtype, ...]]] = {}
    for call in operator.calls():
        if dtypes := operator.verdict(call).dtypes:
            other, wanted = found.setdefault((label(call.shape), call.dtype), (call, dtypes))
            assert dtypes == wanted, f"{call}: results in {dtypes}, and of {other} in {wanted}"


def the_reference_has_the_right_gradients(operator: Operator) -> None:
    """Gradients of the reference are its slopes: the derivatives along a direction are those of finite differences."""
    if not operator.workload.backward:
        raise NotApplicable("its gradients are not judged")
    states = operator.workload.states
    for shape in operator.shapes:
        # a stabiliser in a state is no function of the inputs
        inputs = {name: x for name, x in operator.inputs(shape).items() if name != "return_final_state"}
        generator = torch.Generator().manual_seed(SEED)
        names = [name for name, x in inputs.items() if _is_float(x) and name not in states]
        leaves = {name: inputs[name].clone().requires_grad_() for name in names}
        outputs = outputs_of(operator.workload.reference(**{**inputs, **leaves}))
        weights = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in outputs]

        def total(outputs: list[Tensor], weights: list[Tensor] = weights) -> Tensor:
            parts = ((o * w.conj()).sum() for o, w in zip(outputs, weights, strict=True))
            return sum((part.real if part.is_complex() else part for part in parts), torch.zeros(()))

        gradients = torch.autograd.grad(total(outputs), list(leaves.values()), allow_unused=True)
        directions = {
            name: torch.randn(inputs[name].shape, generator=generator, dtype=inputs[name].dtype)
            for name, gradient in zip(names, gradients, strict=True)
            if gradient is not None
        }
        slope = sum(
            (g.conj() * directions[name]).sum().real.item()
            for name, g in zip(names, gradients, strict=True)
            if g is not None
        )
        step, ends = 1e-6, []
        with torch.no_grad():
            for sign in (1, -1):
                moved = {name: inputs[name] + sign * step * way for name, way in directions.items()}
                ends.append(total(outputs_of(operator.workload.reference(**{**inputs, **moved}))).item())
        measured = (ends[0] - ends[1]) / (2 * step)
        near = abs(measured - slope) <= 1e-5 * max(1.0, abs(measured), abs(slope))
        assert near, f"reference at {label(shape)}: slope {measured:.6g} by differences, {slope:.6g} by gradients"


def the_future_is_not_seen(operator: Operator) -> None:
    """Later inputs change no earlier output by more than rounding, and do change the later ones, which are right."""
    if not operator.workload.time:
        raise NotApplicable("it has no axis of time")
    for call in operator.once():
        length = int(call.shape["T"])
        cut = length // 2
        inputs = operator.inputs(call.shape)
        changed = dict(inputs)
        for name, axis in operator.workload.time.items():
            x = inputs.get(name)
            if isinstance(x, Tensor) and x.dim() > axis and x.shape[axis] == length:
                changed[name] = torch.cat([x.narrow(axis, 0, cut), x.narrow(axis, cut, length - cut) / 2], axis)
        before, after = operator.first(call), operator.forward(call, operator.rounded(call, changed))
        exact = outputs_of(operator.workload.reference(**_in(operator.rounded(call, changed), torch.float64)))
        plain = outputs_of(operator.workload.reference(**_on_cpu(operator.rounded(call, changed))))
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            if a.dim() > 1 and a.shape[1] == length:
                error = max(relative_error(b[:, :cut], a[:, :cut]))
                rounding = 1e3 * torch.finfo(a.dtype).eps
                assert error < rounding, f"{call}: later inputs change the earlier output {i} by {error:.1e}"
                differs = (a != b)[:, cut:].transpose(0, 1).flatten(1).any(1)
                assert differs.all(), f"{call}: output {i} does not depend on the inputs of its own position"
            assert_close(b, exact[i], call.dtype, plain=plain[i], what=f"{call}, a second call: output {i}")


def _on_cpu(inputs: Inputs) -> Inputs:
    return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()}


def _in(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: cast(x, dtype) for name, x in _on_cpu(inputs).items()}


def calls_repeat_and_leave_their_inputs_alone(operator: Operator) -> None:
    """A call repeats its results in every bit, gradients too, and changes none of its inputs."""
    for call in operator.tiny() if operator.device == "cpu" else operator.once():
        given, runs = operator.rounded(call), []
        names = _to_differentiate(operator, given)
        for _ in range(2):
            leaves = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
            runs.append([x.clone() for x in _with_gradients(operator.function(call), leaves, names)])
            for name in given.keys() - set(operator.workload.in_place):
                same = not isinstance(given[name], Tensor) or torch.equal(leaves[name].detach(), given[name])
                assert same, f"{call}: the call has changed its input {name}"
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), f"{call}: two runs differ"


def parts_equal_the_whole(operator: Operator) -> None:
    """Two parts of a sequence, where the second starts from the state of the first, give what the whole gives."""
    states, time = operator.workload.states, operator.workload.time
    shapes = [shape for shape in operator.shapes if time and "return_final_state" in operator.inputs(shape)]
    if not shapes:
        raise NotApplicable("it has no state")
    for call in operator.once():
        if call.shape not in shapes:
            continue
        inputs, length = operator.rounded(call), int(call.shape["T"])
        (*whole,) = operator.first(call)
        cut = 2 * length // 3 + 1
        parts = []
        for start, end in ((0, cut), (cut, length)):
            part = dict(inputs)
            for name, axis in time.items():
                x = part.get(name)
                if isinstance(x, Tensor) and x.dim() > axis and x.shape[axis] == length:
                    part[name] = x.narrow(axis, start, end - start)
            parts.append(operator.forward(call, part))
            inputs = {**inputs, **dict(zip(states, parts[-1][-len(states) :], strict=True))}
        ends = len(whole) - len(states)
        joined = [torch.cat([a, b], 1) for a, b in zip(parts[0][:ends], parts[1][:ends], strict=True)]
        wanted = operator.expected(call.shape, call.dtype)
        for i, x in enumerate([*joined, *parts[1][ends:]]):
            assert_close(
                x, wanted.exact[0][i], call.dtype, plain=wanted.plain[0][i], what=f"{call} in two parts: output {i}"
            )


def few_elements_are_enough(operator: Operator) -> None:
    """A single position is right, and a batch without a sequence has an empty result or is refused in words."""
    for call in operator.once(1):
        if "T" in call.shape and "P" not in call.shape:
            one = replace(call, shape={**call.shape, "T": 1})
            inputs = operator.rounded(one)
            _assert_right_gradients(operator, one, inputs, None, _to_differentiate(operator, inputs))
        if "B" not in call.shape:
            continue
        none = replace(call, shape={**call.shape, "B": 0})
        try:
            outputs = operator.forward(none, operator.rounded(none))
        except ValueError as refusal:
            if operator.workload.op not in str(refusal):
                raise AssertionError(f"{none}: refused without the name of the operator: {refusal}") from None
            continue
        for x, like in zip(outputs, operator.first(call), strict=True):
            assert x.shape == (0, *like.shape[1:]), f"{none}: a result of shape {list(x.shape)}"


def _to_differentiate(operator: Operator, inputs: Inputs) -> list[str]:
    """The names of inputs whose gradients are judged."""
    return [name for name, x in inputs.items() if _is_float(x) and operator.workload.backward]


def _assert_right_gradients(
    operator: Operator, call: Call, inputs: Inputs, output: int | None, names: list[str]
) -> None:
    """Outputs, and gradients of these inputs alone in a loss of one output or of all, are those of the reference."""

    def results(op: Callable[..., Any], given: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        leaves = {name: given[name].detach().clone().requires_grad_() for name in names}
        outputs = outputs_of(op(**{**given, **leaves}))
        chosen = [x for i, x in enumerate(outputs) if output in (None, i) and x.requires_grad]
        if not chosen:
            return outputs, [torch.zeros_like(leaf) for leaf in leaves.values()]
        found = torch.autograd.grad(chosen, list(leaves.values()), _weights(chosen), allow_unused=True)
        return outputs, [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves.values(), strict=True)]

    outputs, found = results(operator.function(call), inputs)
    exact_outputs, right = results(operator.workload.reference, _in(inputs, torch.float64))
    for i, (x, exact) in enumerate(zip(outputs, exact_outputs, strict=True)):
        _assert_similar({f"{call}: output {i}": x}, {f"{call}: output {i}": exact})
    loss = "a loss of all outputs" if output is None else f"a loss of output {output} alone"
    what = [f"{call}: gradient of {name} in {loss}, asked for {', '.join(names)}" for name in names]
    _assert_similar(dict(zip(what, found, strict=True)), dict(zip(what, right, strict=True)))


def _weights(outputs: list[Tensor]) -> list[Tensor]:
    """Cotangents that need no random numbers."""
    return [torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view(x.shape).to(x) for x in outputs]


def outputs_have_gradients_of_their_own(operator: Operator) -> None:
    """A loss of one output alone has its gradients, and so has any part of the inputs."""
    if not operator.workload.backward:
        raise NotApplicable("its gradients are not judged")
    for call in operator.tiny():
        inputs = operator.rounded(call)
        names = _to_differentiate(operator, inputs)
        num_outputs = len(operator.forward(call, inputs))
        for output in range(num_outputs) if num_outputs > 1 else ():
            _assert_right_gradients(operator, call, inputs, output, names)
        for part in (names[::2], names[1::2]) if len(names) > 1 else ():
            _assert_right_gradients(operator, call, inputs, None, part)


def _assert_similar(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Tensors agree to a hundredth, which roundings of float32 stay below and a wrong term does not.

    What is zero in exact arithmetic may be of the size of a rounding of the others.
    """
    largest = max((x.abs().max().item() for x in exact.values() if x.numel()), default=0.0)
    for name, x in found.items():
        y = exact[name]
        assert x.shape == y.shape, f"{name} has the shape {list(x.shape)} in place of {list(y.shape)}"
        assert torch.isfinite(x).all(), f"{name} is not finite"
        error = (x.cpu().to(y.dtype) - y).abs().square().mean().sqrt().item()
        size, eps = y.abs().square().mean().sqrt().item(), torch.finfo(x.dtype).eps
        allowed = max(1e-2, 4 * eps) * size + 50 * eps * largest
        assert error <= allowed, f"{name} is wrong by {error:.1e}, of a size of {size:.1e}"


def second_derivatives_are_right_or_refused(operator: Operator) -> None:
    """Second derivatives are right or refused, by `.backward()` and `autograd.grad`, of linear and square losses."""
    if not operator.workload.backward:
        raise NotApplicable("its gradients are not judged")

    def asked(op: Callable[..., Any], inputs: Inputs, linear: bool, backward: bool) -> dict[str, Tensor]:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if _is_float(x)}
        outputs = [o for o in outputs_of(op(**{**inputs, **leaves})) if o.requires_grad]
        weights = _weights(outputs)
        real = [(torch.view_as_real(x * w) if x.is_complex() else x * w) for x, w in zip(outputs, weights, strict=True)]
        loss = torch.stack([x.sum() if linear else x.square().sum() for x in real]).sum()
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
        total = torch.stack([loss, *(g.abs().square().sum() for g in first if g is not None)]).sum()
        if backward:
            total.backward()
            found = [leaf.grad for leaf in leaves.values()]
        else:
            found = list(torch.autograd.grad(total, list(leaves.values()), allow_unused=True))
        return {
            name: torch.zeros_like(leaf) if g is None else g
            for (name, leaf), g in zip(leaves.items(), found, strict=True)
        }

    for call in operator.tiny():
        inputs = operator.rounded(call)
        for linear in (True, False):
            exact = asked(operator.workload.reference, _in(inputs, torch.float64), linear, True)
            for backward in (True, False):
                try:
                    found = asked(operator.function(call), inputs, linear, backward)
                except (RuntimeError, ValueError):
                    continue
                how = f"{'a linear' if linear else 'a square'} loss by {'.backward()' if backward else 'autograd.grad'}"
                what = {name: f"{call}: second derivative of {name} in {how}" for name in found}
                _assert_similar({what[n]: x for n, x in found.items()}, {what[n]: x for n, x in exact.items()})


def steps_have_gradients(operator: Operator) -> None:
    """Gradients through two steps in a row are right, or the first step refuses them in words."""
    if not operator.is_step:
        raise NotApplicable("it is no step")
    states = operator.workload.states

    def gradients(op: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if _is_float(x)}
        given, outputs = {**inputs, **leaves}, []
        given.update({name: leaves[name].clone() for name in states})
        for _ in range(2):
            results = outputs_of(op(**given))
            outputs.append(results[0])
            given.update(zip(states, results[-len(states) :], strict=True))
        total = torch.stack([(x * w).sum() for x, w in zip(outputs, _weights(outputs), strict=True)]).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if g is None else g
            for (name, leaf), g in zip(leaves.items(), found, strict=True)
        }

    for call in operator.once(1):
        inputs = operator.rounded(call)
        exact = gradients(operator.workload.reference, _in(inputs, torch.float64))
        try:
            found = gradients(operator.function(call), inputs)
        except ValueError:
            continue
        except RuntimeError as error:
            raise AssertionError(f"{call}: no gradient through two steps: {str(error).splitlines()[0]}") from None
        what = {name: f"{call}: gradient of {name} through two steps" for name in found}
        _assert_similar({what[n]: x for n, x in found.items()}, {what[n]: x for n, x in exact.items()})


def shapes_are_known_without_data(operator: Operator) -> None:
    """A fake tensor, which has no data, gets results of the right shapes and dtypes."""
    calls = [call for call in operator.once(1) if not call.implementation.cold_start]
    if not calls:
        raise NotApplicable("none of its implementations is plain PyTorch")
    for call in calls:
        real = operator.first(call)
        with FakeTensorMode() as mode, torch.no_grad():
            fake = {
                name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in operator.rounded(call).items()
            }
            found = outputs_of(operator.function(call)(**fake))
        for i, (a, b) in enumerate(zip(real, found, strict=True)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{call}: output {i} is {b.dtype} {list(b.shape)}"


def recorded_calls_give_the_same(operator: Operator) -> None:
    """A call that is recorded as a CUDA graph gives, with other inputs too, what a call outside of it gives."""
    if operator.device == "cpu":
        raise NotApplicable("CUDA graphs need a GPU")
    for call in operator.once():
        inputs = operator.rounded(call)
        leaves = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        names = _to_differentiate(operator, inputs)
        run = functools.partial(_with_gradients, operator.function(call), leaves, names)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # a first call compiles kernels and fills caches, which cannot be recorded
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            recorded = run()
        other = operator.rounded(call, _halved(operator.inputs(call.shape), operator.workload.time))
        for given in (other, inputs):
            _load(leaves, given)
            graph.replay()
            torch.cuda.synchronize()
            found = [x.clone() for x in recorded]
            _load(leaves, given)
            for i, (a, b) in enumerate(zip(found, run(), strict=True)):
                assert torch.equal(a, b), f"{call}: result {i} of the recorded call differs"


def _load(leaves: Inputs, given: Inputs) -> None:
    """Copies inputs into the memory that a recorded call reads."""
    with torch.no_grad():
        for name, x in leaves.items():
            if isinstance(x, Tensor):
                x.copy_(given[name])


def _halved(inputs: Inputs, names: Mapping[str, int]) -> Inputs:
    return {name: x / 2 if name in names and _is_float(x) else x for name, x in inputs.items()}


def _with_gradients(op: Callable[..., Any], leaves: Inputs, names: list[str]) -> list[Tensor]:
    """Outputs of a call, and the gradients of these inputs for cotangents that need no random numbers."""
    for name in names:
        leaves[name].requires_grad_()
    outputs = outputs_of(op(**leaves))
    if not names:
        return [x.detach() for x in outputs]
    chosen = [o for o in outputs if o.requires_grad]
    # made on the device, since a recorded call cannot copy from the host
    weights = [torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape).to(o) for o in chosen]
    found = torch.autograd.grad(chosen, [leaves[name] for name in names], weights, allow_unused=True)
    return [x.detach() for x in (*outputs, *found) if x is not None]


ACCURACY: tuple[Callable[[Operator], None], ...] = (
    results_are_those_of_the_reference,
    inputs_may_have_any_memory,
    no_memory_is_read_before_it_is_written,
    results_have_one_dtype,
)
"""Laws that one comparison of every call with the reference judges."""

LAWS: tuple[Callable[[Operator], None], ...] = (
    *ACCURACY,
    the_reference_has_the_right_gradients,
    the_future_is_not_seen,
    parts_equal_the_whole,
    few_elements_are_enough,
    calls_repeat_and_leave_their_inputs_alone,
    outputs_have_gradients_of_their_own,
    second_derivatives_are_right_or_refused,
    steps_have_gradients,
    shapes_are_known_without_data,
    recorded_calls_give_the_same,
)
"""All laws, in the order in which `check operator` tries them."""
