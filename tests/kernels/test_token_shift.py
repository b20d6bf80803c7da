"""Claims about the token shift; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from kernels.token_shift import token_shift, token_shift_step
from kernels.token_shift.reference import token_shift_reference
from suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEEP = ("mu",)
BACKENDS = ["torch", "triton"]
# several programs of the backward pass, whose chunks cross sequences; widths and lengths that fill no tile; several
# tiles of channels; one position
SIZES = [(3, 45, 24, 5), (2, 7, 5, 3), (1, 3, 600, 2), (2, 1, 16, 6), (1, 1, 1, 1)]


def make_inputs(
    batch: int, length: int, width: int, uses: int, *, delta: bool = True, initial: bool = True
) -> dict[str, Tensor | None]:
    g = torch.Generator().manual_seed(width)
    normal = partial(torch.randn, generator=g, dtype=torch.float64)
    return {
        "x": normal(batch, length, width),
        "mu": torch.rand(uses, width, generator=g, dtype=torch.float64),
        "delta": 0.5 * normal(uses, batch, length, width) if delta else None,
        "initial_state": normal(batch, width) if initial else None,
    }


def cast(inputs: dict, dtype: torch.dtype) -> dict:
    return {name: x.to(DEVICE, dtype) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def gradients(inputs: dict, backend: str) -> list[Tensor]:
    """Gradients of a fixed weighted sum of all results, for all tensors."""
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor)]
    results = token_shift(**inputs, backend=backend)
    total = sum(
        (x * torch.linspace(u - 2, u - 1, x.numel()).bfloat16().to(x).view_as(x)).sum() for u, x in enumerate(results)
    )
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "mu"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["triton"])
def test_results_and_gradients_are_those_of_the_equation(backend, dtype, delta, size):
    # with an initial state in one half of the cases
    inputs = make_inputs(*size, delta=delta, initial=delta == (size[0] > 1))
    op = partial(token_shift, backend=backend)
    assert_matches_reference(op, token_shift_reference, inputs, dtype=dtype, keep=KEEP, device=DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mu_may_weigh_the_present_input(backend):
    inputs = make_inputs(2, 9, 12, 3, delta=False) | {"weighs": "now"}
    op = partial(token_shift, backend=backend)
    assert_matches_reference(op, token_shift_reference, inputs, keep=KEEP, device=DEVICE)


@pytest.mark.parametrize("weighs", ["before", "now"])
def test_steps_are_the_positions_of_a_sequence(weighs):
    inputs = make_inputs(2, 5, 4, 3, delta=weighs == "before")
    x, mu, delta, state = inputs.values()
    whole = torch.stack(token_shift(**inputs, weighs=weighs))
    for t in range(5):
        at = None if delta is None else delta[:, :, t]
        step = token_shift_step(x[:, t], state, mu, at, weighs=weighs)
        assert torch.equal(torch.stack(step), whole[:, :, t])
        state = x[:, t]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_of_a_batch_do_not_see_each_other(backend):
    inputs = cast(make_inputs(3, 11, 4, 2, initial=False), torch.float32)
    results = token_shift(**inputs, backend=backend)
    found = gradients(inputs, backend)[0]
    alone = {**inputs, "x": inputs["x"][1:2].detach(), "delta": inputs["delta"][:, 1:2].detach()}
    for y, of_one in zip(results, token_shift(**alone, backend=backend), strict=True):
        assert torch.equal(y[1:2], of_one)
    other = {**inputs, "x": inputs["x"].detach().clone(), "delta": inputs["delta"].detach().clone()}
    other["x"][0], other["delta"][:, 2] = 7.0, 7.0
    assert torch.equal(gradients(other, backend)[0][1], found[1])
