"""The comparison that every test and benchmark of a kernel with its reference uses.

Rule: against the reference in float64, an implementation may err at most twice as much as plain PyTorch does, that is
the reference run in the tested dtype on the same rounded inputs, plus a floor of a few roundings. The rule holds for
every output (final states too) and the gradient of every tensor input (initial states too), in the root mean square
and in the largest element. Errors are relative to the root mean square of the exact value; that of an element which is
larger than this is relative to the element, because a rounding is relative to what is rounded.

    assert_matches_reference(op, reference, {"x": x, "A": A, "chunk": 64}, dtype=torch.bfloat16, keep=("A",))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SLACK = 2.0
# a sum of a few hundred terms in another order, in roundings; below float32 the one rounding of the result remains
FLOOR = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2,
    torch.float16: torch.finfo(torch.float16).eps / 2,
}
MAX_OVER_RMS = 8.0
"""Floor of the error of the largest element, as a multiple of the floor of the root mean square error."""


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts a floating tensor to dtype and a complex one to a complex type of at least that precision.

    Anything else is returned unchanged.
    """
    if not isinstance(value, Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return value.to(dtype) if value.is_floating_point() else value


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def outputs_of(result: Any) -> list[Tensor]:
    """The tensors among the outputs of an operator, without those that are None."""
    return [part for part in (result if isinstance(result, (tuple, list)) else [result]) if part is not None]


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float64, a complex one with its two parts along a last axis."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def relative_error(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """(root mean square, largest element) of the relative error, as the module says; 0/0 is 0."""
    # two tensors on a GPU are compared there, which takes milliseconds where a CPU takes seconds
    actual, exact = wide(actual.to(exact.device)), wide(exact)
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)} instead of {tuple(exact.shape)}"
    assert torch.isfinite(actual).all(), "not finite"
    difference, scale = (actual - exact).abs(), exact.square().mean().sqrt().item()
    if scale == 0.0:
        return (0.0, 0.0) if difference.max() == 0 else (float("inf"), float("inf"))
    return difference.square().mean().sqrt().item() / scale, (difference / exact.abs().clamp(min=scale)).max().item()


def assert_close(
    actual: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    *,
    plain: Tensor | None = None,
    what: str = "",
    floor: float | None = None,
) -> None:
    """The rule for one tensor; `plain` is what plain PyTorch gives in dtype (None: only the floor is granted).

    floor: instead of that of dtype, for an operator that says how much it gives away.
    """
    try:
        error = relative_error(actual, exact)
    except AssertionError as reason:
        raise AssertionError(f"{what}: {reason}") from None
    base = (0.0, 0.0) if plain is None else relative_error(plain, exact)
    granted = FLOOR[dtype] if floor is None else floor
    for name, err, ref, factor in zip(("rms", "max"), error, base, (1.0, MAX_OVER_RMS), strict=True):
        allowed = SLACK * ref + factor * granted
        # zeros have a relative error of one, so a bound that large would prove nothing
        assert name == "max" or allowed < 0.5, f"{what}: tolerance {allowed:.1e} would accept zeros"
        assert err <= allowed, f"{what}: {name} error {err:.2e} > {allowed:.2e} (plain PyTorch in {dtype}: {ref:.2e})"


def run(
    op: Callable[..., Any], inputs: Mapping[str, Any], cotangents: Sequence[Tensor] | None
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Outputs, and where cotangents are given the gradient of sum <output, cotangent> for each tensor input."""
    outputs, leaves = _called(op, inputs, cotangents is not None)
    return outputs, {} if cotangents is None else _gradients(outputs, leaves, cotangents)


def _called(
    op: Callable[..., Any], inputs: Mapping[str, Any], requires_grad: bool
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and the copies of the tensor inputs that require gradients."""
    copies = {
        name: value.detach().clone().requires_grad_(requires_grad and (value.is_floating_point() or value.is_complex()))
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }
    leaves = {name: copy for name, copy in copies.items() if isinstance(copy, Tensor) and copy.requires_grad}
    return outputs_of(op(**copies)), leaves


def _gradients(
    outputs: Sequence[Tensor], leaves: Mapping[str, Tensor], cotangents: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    pairs = [(o, c.to(o)) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    assert pairs, "no output has a gradient"
    gradients = torch.autograd.grad(
        [o for o, _ in pairs], list(leaves.values()), [c for _, c in pairs], allow_unused=True
    )
    return dict(zip(leaves, gradients, strict=True))


@dataclass(frozen=True)
class Expected:
    """The results of a reference for inputs rounded to a dtype: exact ones, and those of plain PyTorch."""

    inputs: dict[str, Any]
    """The rounded inputs."""
    dtype: torch.dtype
    cotangents: list[Tensor] | None
    """Gradients of the outputs; None: gradients are not judged."""
    exact: tuple[list[Tensor], dict[str, Tensor | None]]
    """Outputs and gradients in float64."""
    plain: tuple[list[Tensor], dict[str, Tensor | None]]
    """Outputs and gradients of the reference in the dtype."""
    floors: Mapping[str, float]
    """Inputs whose gradients may err by so many times the floor of the dtype."""

    def assert_met_by(self, op: Callable[..., Any], device: str = "cpu") -> None:
        """Asserts that outputs and gradients of op follow the rule of this module."""
        on_device = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        outputs, gradients = run(op, on_device, self.cotangents)
        exact_outputs, exact_gradients = self.exact
        assert len(outputs) == len(exact_outputs), f"{len(outputs)} outputs instead of {len(exact_outputs)}"
        for index, (actual, exact, plain) in enumerate(zip(outputs, exact_outputs, self.plain[0], strict=True)):
            assert_close(actual, exact, self.dtype, plain=plain, what=f"output {index}")
        for name, exact_gradient in exact_gradients.items():
            actual_gradient, plain_gradient = gradients[name], self.plain[1][name]
            if exact_gradient is None or not exact_gradient.any():
                assert actual_gradient is None or not actual_gradient.any(), f"gradient of {name} should be zero"
                continue
            assert actual_gradient is not None, f"gradient of {name} is missing"
            given = self.inputs[name].dtype
            assert actual_gradient.dtype == given, f"gradient of {name} has dtype {actual_gradient.dtype}"
            floor = FLOOR[self.dtype] * self.floors.get(name, 1.0)
            what = f"gradient of {name}"
            assert_close(actual_gradient, exact_gradient, self.dtype, plain=plain_gradient, what=what, floor=floor)


def expected(
    reference: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    keep: Sequence[str] = (),
    device: str = "cpu",
    grad: bool = True,
    floors: Mapping[str, float] | None = None,
) -> Expected:
    """The results of the reference for these inputs; see `assert_matches_reference`."""
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    rounded = {name: cast(value, at_least_float32(dtype) if name in keep else dtype) for name, value in inputs.items()}
    exact_inputs = {name: cast(value, torch.float64) for name, value in rounded.items()}
    generator = torch.Generator().manual_seed(1234)
    exact_outputs, leaves = _called(reference, exact_inputs, grad)
    scale = wide(exact_outputs[0]).square().mean().sqrt().item() if exact_outputs[0].numel() else 1.0
    assert 0.02 < scale < 50, f"test data give outputs of size {scale:.1e}; choose data with outputs of order one"
    cotangents = None
    if grad:
        drawn = [torch.randn(o.shape, generator=generator, dtype=o.dtype).to(o.device) for o in exact_outputs]
        # rounded once, so that all three runs see the same
        cotangents = [cast(cast(cotangent, dtype), torch.float64) for cotangent in drawn]
    exact = exact_outputs, {} if cotangents is None else _gradients(exact_outputs, leaves, cotangents)
    return Expected(rounded, dtype, cotangents, exact, run(reference, rounded, cotangents), floors or {})


def assert_matches_reference(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    keep: Sequence[str] = (),
    device: str = "cpu",
    reference_device: str = "cpu",
    grad: bool = True,
    floors: Mapping[str, float] | None = None,
) -> None:
    """Asserts that outputs and gradients of op follow the rule of this module.

    inputs: keyword arguments of both, tensors in float64 or complex128; they are rounded to dtype first, so that the
        exact result is that of the rounded inputs. Those named in `keep` are rounded to float32 at the coarsest.
    device, reference_device: where op and where the reference runs. A loop of small operations is fastest on a CPU.
    floors: inputs whose gradients may err by so many times the floor, for an operator that says how much it gives away.
    """
    wanted = expected(reference, inputs, dtype=dtype, keep=keep, device=reference_device, grad=grad, floors=floors)
    wanted.assert_met_by(op, device)
