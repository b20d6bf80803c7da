"""Laws that every operator must obey, as functions that `check operator NAME` and the tests call.

Each takes an `Operator`, tries our implementations on the small shapes of its workload, and raises AssertionError where
it is broken. Together they hold that results and gradients are those of the reference, whatever the inputs look like in
memory, that a sequence may be split and its future is not seen, and that second derivatives are right or refused.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from subquad.suite.bench.cases import label
from subquad.suite.laws.accuracy import assert_close, cast, outputs_of, relative_error
from subquad.suite.laws.calls import HALF, SEED, Call, Inputs, Operator, is_float
from subquad.suite.laws.tasks import NotApplicable


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


def dtypes_may_be_mixed(operator: Operator) -> None:
    """Inputs of several dtypes give right results, in dtypes that all implementations agree on, or are refused."""
    found: dict[Any, tuple[Call, list[torch.dtype]]] = {}
    for call in operator.tiny():
        inputs = operator.rounded(call)
        names = [name for name, x in inputs.items() if is_float(x) and not x.is_complex()]
        other = torch.float32 if call.dtype in HALF else torch.bfloat16
        if len(names) < 2:
            raise NotApplicable("it takes one tensor")
        for chosen in (names[:1], names[1::2]):
            given = {**inputs, **{name: inputs[name].to(other) for name in chosen}}
            what = f"{call}, {' and '.join(chosen)} in {other}"
            try:
                results = operator.forward(call, given)
            except (ValueError, RuntimeError) as refusal:
                if not isinstance(refusal, ValueError) or not re.match(r"\w+: ", str(refusal)):
                    raise AssertionError(f"{what}: refused without the name of an operator: {refusal}") from None
                continue
            dtypes = [x.dtype for x in results]
            first, wanted = found.setdefault((call.dtype, *chosen), (call, dtypes))
            assert dtypes == wanted, f"{what}: results in {dtypes}, and of {first} in {wanted}"
            exact = outputs_of(operator.workload.reference(**_in(given, torch.float64)))
            _assert_similar(
                {f"{what}: output {i}": x for i, x in enumerate(results)},
                {f"{what}: output {i}": x for i, x in enumerate(exact)},
            )


def the_reference_has_the_right_gradients(operator: Operator) -> None:
    """Gradients of the reference are its slopes: the derivatives along a direction are those of finite differences."""
    if not operator.workload.backward:
        raise NotApplicable("its gradients are not judged")
    states = operator.workload.states
    for shape in operator.shapes:
        # a stabiliser in a state is no function of the inputs
        inputs = {name: x for name, x in operator.inputs(shape).items() if name != "return_final_state"}
        generator = torch.Generator().manual_seed(SEED)
        names = [name for name, x in inputs.items() if is_float(x) and name not in states]
        leaves = {name: inputs[name].clone().requires_grad_() for name in names}
        outputs = outputs_of(operator.workload.reference(**{**inputs, **leaves}))
        weights = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in outputs]

        def total(outputs: list[Tensor], weights: list[Tensor] = weights) -> Tensor:
            parts = ((o * w.conj()).sum() for o, w in zip(outputs, weights, strict=True))
            return sum((part.real if part.is_complex() else part for part in parts), torch.zeros(()))

        gradients = torch.autograd.grad(total(outputs), list(leaves.values()), allow_unused=True)
        # an element moves in proportion to its size: over a sequence, a step size of 1e-3 that moves by 1e-6 turns a
        # phase so far that the function is no longer a straight line between the two ends
        directions = {
            name: torch.randn(x.shape, generator=generator, dtype=x.dtype) * torch.where(x == 0, 1.0, x.abs())
            for (name, x), gradient in zip(((name, inputs[name]) for name in names), gradients, strict=True)
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
        if length < 2:
            continue
        cut = length // 2
        inputs = operator.inputs(call.shape)
        early = operator.between(inputs, length, 0, cut)
        late = operator.between(inputs, length, cut, length)
        changed = {
            name: torch.cat([early[name], late[name] / 2], operator.workload.time[name]) if early[name] is not x else x
            for name, x in inputs.items()
        }
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
    on_cpu = operator.device == "cpu"
    # PyTorch's own kernels need not repeat on a GPU
    for call in operator.tiny() if on_cpu else operator.compiled_calls():
        given = operator.rounded(call)
        names, first = _to_differentiate(operator, given), None
        # an operator may know from its third call on what it launches on a GPU
        for _ in range(2 if on_cpu else 4):
            leaves = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
            found = [x.clone() for x in _with_gradients(operator.function(call), leaves, names)]
            for name in given.keys() - set(operator.workload.in_place):
                same = not isinstance(given[name], Tensor) or torch.equal(leaves[name].detach(), given[name])
                assert same, f"{call}: the call has changed its input {name}"
            first = first or found
            assert all(map(torch.equal, found, first)), f"{call}: two runs differ"


def results_need_no_gradients(operator: Operator) -> None:
    """Results are right where no gradient is recorded, too, which many operators compute by another path."""
    for call in operator.once():
        wanted = operator.expected(call.shape, call.dtype)
        for i, x in enumerate(operator.first(call)):
            what = f"{call} without gradients: output {i}"
            assert_close(x, wanted.exact[0][i], call.dtype, plain=wanted.plain[0][i], what=what)


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
            parts.append(operator.forward(call, operator.between(inputs, length, start, end)))
            inputs = {**inputs, **dict(zip(states, parts[-1][-len(states) :], strict=True))}
        ends = len(whole) - len(states)
        joined = [torch.cat([a, b], 1) for a, b in zip(parts[0][:ends], parts[1][:ends], strict=True)]
        wanted = operator.expected(call.shape, call.dtype)
        for i, x in enumerate([*joined, *parts[1][ends:]]):
            assert_close(
                x, wanted.exact[0][i], call.dtype, plain=wanted.plain[0][i], what=f"{call} in two parts: output {i}"
            )


def what_is_not_a_number_lasts(operator: Operator) -> None:
    """A NaN half-way in one input of a recurrence reaches all outputs that it reaches in the reference, and the state.

    Some element of the state is NaN then; an exponent beside it need not be.
    """
    states = operator.workload.states
    if not states:
        raise NotApplicable("it has no state")
    for call in operator.once(1):
        inputs = operator.rounded(call)
        for name, x in inputs.items():
            if not is_float(x):
                continue
            spoilt, axis = x.clone(), operator.workload.time.get(name)
            spoilt[tuple(size // 2 if i == axis else 0 for i, size in enumerate(x.shape))] = torch.nan
            given = {**inputs, name: spoilt}
            found = operator.forward(call, given)
            exact = outputs_of(operator.workload.reference(**_in(given, torch.float64)))
            for i, (y, wanted) in enumerate(zip(found, exact, strict=True)):
                finite = y.cpu().isfinite()
                if i > 0 and i >= len(found) - len(states):
                    finite = finite.all()
                lost = wanted.isnan() & finite
                assert not lost.any(), f"{call}: a NaN in {name} is lost in {int(lost.sum())} elements of output {i}"


def strong_decays_forget(operator: Operator) -> None:
    """A log-decay far below zero, or minus infinity, is a decay of zero: results and gradients are right and finite."""
    calls = [call for call in operator.tiny(None) if is_float(operator.inputs(call.shape).get("log_decay"))]
    if not calls:
        raise NotApplicable("it takes no log-decays")
    for call in calls:
        inputs = operator.rounded(call)
        decays = inputs["log_decay"].flatten()
        decays[::3], decays[1::3] = -1000.0, -torch.inf
        inputs["log_decay"] = decays.view_as(inputs["log_decay"])
        _assert_right_gradients(operator, call, inputs, None, _to_differentiate(operator, inputs))


def few_elements_are_enough(operator: Operator) -> None:
    """A single position is right; none, or a batch without a sequence, has an empty result or is refused in words."""
    for call in operator.once(1):
        if "T" in call.shape and "P" not in call.shape:
            one = replace(call, shape={**call.shape, "T": 1})
            inputs = operator.rounded(one)
            _assert_right_gradients(operator, one, inputs, None, _to_differentiate(operator, inputs))
            if operator.workload.time:
                _assert_empty_or_refused(operator, call, operator.between(inputs, 1, 0, 0), 1)
        if "B" in call.shape:
            none = replace(call, shape={**call.shape, "B": 0})
            _assert_empty_or_refused(operator, none, operator.rounded(none), 0)


def _assert_empty_or_refused(operator: Operator, call: Call, inputs: Inputs, axis: int) -> None:
    """Results for inputs without an element are empty along an axis and have gradients, or the call is refused."""
    leaves = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    names = _to_differentiate(operator, inputs)
    what = f"{call}, {('no sequence', 'no position')[axis]}"
    try:
        results = _with_gradients(operator.function(call), leaves, names)
    except ValueError as refusal:
        if not re.match(r"\w+: ", str(refusal)):
            raise AssertionError(f"{what}: refused without the name of an operator: {refusal}") from None
        return
    assert results[0].shape[axis] == 0, f"{what}: a result of shape {list(results[0].shape)}"
    for x in results:
        assert not x.isnan().any(), f"{what}: a result or gradient is NaN"
        assert axis or not x.any(), f"{what}: a gradient is not zero"


def _to_differentiate(operator: Operator, inputs: Inputs) -> list[str]:
    """The names of inputs whose gradients are judged."""
    return [name for name, x in inputs.items() if is_float(x) and operator.workload.backward]


def _assert_right_gradients(
    operator: Operator, call: Call, inputs: Inputs, output: int | None, names: list[str]
) -> None:
    """Outputs, and gradients of these inputs alone in a loss of one output or of all, are those of the reference.

    The signs of the gradients of outputs are lazy, as they are behind operations with complex numbers.
    """

    def results(op: Callable[..., Any], given: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        leaves = {name: given[name].detach().clone().requires_grad_() for name in names}
        own = {name: given[name].clone() for name in operator.workload.in_place}
        outputs = outputs_of(op(**{**given, **leaves, **own}))
        chosen = [x for i, x in enumerate(outputs) if output in (None, i) and x.requires_grad]
        if not chosen:
            return outputs, [torch.zeros_like(leaf) for leaf in leaves.values()]
        weights = [_with_lazy_signs(x) for x in _weights(chosen)]
        found = torch.autograd.grad(chosen, list(leaves.values()), weights, allow_unused=True)
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


def _with_lazy_signs(x: Tensor) -> Tensor:
    """x as a view by torch.conj, or by the imaginary part of one, whose memory holds other signs than its values."""
    return x.conj().resolve_conj().conj() if x.is_complex() else torch._neg_view(-x)


def signs_may_be_lazy(operator: Operator) -> None:
    """Inputs whose signs torch changes only when it reads are read rightly, or refused in words."""
    for call in operator.tiny():
        inputs = operator.rounded(call)
        lazy = {name: x if not is_float(x) else _with_lazy_signs(x) for name, x in inputs.items()}
        try:
            found = operator.forward(call, lazy)
        except (ValueError, RuntimeError) as error:
            if not re.search("conj|negative", str(error)):
                raise AssertionError(f"{call}, lazy signs: {error}") from error
            continue
        exact = outputs_of(operator.workload.reference(**_in(inputs, torch.float64)))
        what = [f"{call}, lazy signs: output {i}" for i in range(len(exact))]
        _assert_similar(dict(zip(what, found, strict=True)), dict(zip(what, exact, strict=True)))


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

    def asked(op: Callable[..., Any], inputs: Inputs, linear: bool) -> dict[str, dict[str, Tensor]]:
        """Gradients of a loss with a penalty on its gradients, by how they are asked for, unless they are refused."""
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if is_float(x)}
        outputs = [o for o in outputs_of(op(**{**inputs, **leaves})) if o.requires_grad]
        weighed = [x * w for x, w in zip(outputs, _weights(outputs), strict=True)]
        real = [torch.view_as_real(x) if x.is_complex() else x for x in weighed]
        loss = torch.stack([x.sum() if linear else x.square().sum() for x in real]).sum()
        found = {}
        with contextlib.suppress(RuntimeError, ValueError):
            first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
            total = torch.stack([loss, *(g.abs().square().sum() for g in first if g is not None)]).sum()
            with contextlib.suppress(RuntimeError, ValueError):
                all_at_once = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, retain_graph=True)
                found["autograd.grad"] = dict(zip(leaves, all_at_once, strict=True))
            total.backward()
            found[".backward()"] = {name: leaf.grad for name, leaf in leaves.items()}
        return {
            how: {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in gradients.items()}
            for how, gradients in found.items()
        }

    for call in operator.tiny():
        inputs = operator.rounded(call)
        for linear in (True, False):
            exact = asked(operator.workload.reference, _in(inputs, torch.float64), linear)[".backward()"]
            for how, found in asked(operator.function(call), inputs, linear).items():
                loss = "a linear" if linear else "a square"
                what = {name: f"{call}: second derivative of {name} in {loss} loss by {how}" for name in found}
                _assert_similar({what[n]: x for n, x in found.items()}, {what[n]: x for n, x in exact.items()})


def forward_mode_is_right_or_refused(operator: Operator) -> None:
    """A derivative in forward mode, in one input alone, is right or refused; kernels do not drop it without a word."""
    if not (operator.workload.backward or operator.is_step):
        raise NotApplicable("its gradients are not judged")

    def tangents(op: Callable[..., Any], inputs: Inputs, name: str) -> list[Tensor]:
        given = {n: x.clone() if isinstance(x, Tensor) else x for n, x in inputs.items()}
        with forward_ad.dual_level():
            given[name] = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
            pairs = [forward_ad.unpack_dual(x) for x in outputs_of(op(**given))]
        return [torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent for pair in pairs]

    for call in operator.tiny():
        if not call.implementation.cold_start:
            continue
        inputs = operator.rounded(call)
        for name in (name for name, x in inputs.items() if is_float(x)):
            try:
                found = tangents(operator.function(call), inputs, name)
            except (RuntimeError, ValueError):
                continue
            exact = tangents(operator.workload.reference, _in(inputs, torch.float64), name)
            what = [f"{call}: derivative of output {i} in {name}, in forward mode" for i in range(len(exact))]
            _assert_similar(dict(zip(what, found, strict=True)), dict(zip(what, exact, strict=True)))


def steps_have_gradients(operator: Operator) -> None:
    """Gradients through two steps in a row are right, or the first step refuses them in words."""
    if not operator.is_step:
        raise NotApplicable("it is no step")
    states = operator.workload.states

    def gradients(op: Callable[..., Any], inputs: Inputs) -> dict[str, Tensor]:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if is_float(x)}
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
    # Triton's interpreter computes with the data of tensors on a CPU
    calls = [call for call in operator.once(1) if operator.device != "cpu" or not call.implementation.cold_start]
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
    for call in operator.compiled_calls():
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
    return {name: x / 2 if name in names and is_float(x) else x for name, x in inputs.items()}


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
    dtypes_may_be_mixed,
    the_reference_has_the_right_gradients,
    the_future_is_not_seen,
    parts_equal_the_whole,
    what_is_not_a_number_lasts,
    strong_decays_forget,
    few_elements_are_enough,
    calls_repeat_and_leave_their_inputs_alone,
    results_need_no_gradients,
    outputs_have_gradients_of_their_own,
    signs_may_be_lazy,
    second_derivatives_are_right_or_refused,
    forward_mode_is_right_or_refused,
    steps_have_gradients,
    shapes_are_known_without_data,
    recorded_calls_give_the_same,
)
"""All laws, in the order in which `check operator` tries them."""
