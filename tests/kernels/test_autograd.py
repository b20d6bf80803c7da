"""The base class of the operators' autograd functions: what it refuses, on which paths, and what it lets through."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

from subquad import kernels, models
from subquad.kernels import OPERATORS
from subquad.kernels.autograd import Function, OnceDifferentiable
from subquad.kernels.causal_conv1d import causal_conv1d_step
from subquad.kernels.fft_conv import fft_conv
from subquad.run_suite import REPOSITORY
from subquad.suite.laws.accuracy import outputs_of
from subquad.suite.laws.calls import Operator, is_float, scattered

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFUSED = "cannot be differentiated twice"


class Square(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return x * x + y

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient, gradient


class Forgetful(OnceDifferentiable):
    @staticmethod
    def forward(ctx, x):
        ctx.twice = 2 * x
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return ctx.twice * gradient


def leaf(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("by_inputs", [True, False])
def test_a_second_derivative_is_refused_on_every_path(linear, by_inputs):
    x = leaf(3)
    y = Square.apply(2 * x, x.detach())
    (gradient,) = torch.autograd.grad(y.sum() if linear else y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(gradient.sum(), x) if by_inputs else gradient.sum().backward()


def test_an_input_that_is_not_saved_is_refused_at_the_first_gradient():
    x = leaf(3)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(Forgetful.apply(x).sum(), x, create_graph=True)
    (gradient,) = torch.autograd.grad(Forgetful.apply(x).sum(), x)
    torch.testing.assert_close(gradient, 2 * x.detach())


def test_recorded_gradients_have_the_same_values():
    x = leaf(3)
    (plain,) = torch.autograd.grad(Square.apply(x, x.detach()).sum(), x)
    (recorded,) = torch.autograd.grad(Square.apply(x, x.detach()).sum(), x, create_graph=True)
    assert torch.equal(plain, recorded)
    assert recorded.requires_grad


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda u: f(u).sum()),
        torch.vmap,
        lambda f: lambda u: torch.func.jvp(f, (u.detach(),), (torch.ones_like(u),)),
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_transforms_of_torch_func_are_refused_in_one_sentence(transform):
    filter = leaf(2, 8)
    with pytest.raises(RuntimeError, match=r"^fft_conv: torch\.func\.grad, vmap .* do not work on it"):
        transform(lambda u: fft_conv(u.expand(1, 8, 2), filter))(leaf(8, 2))


class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def test_a_function_can_be_compiled():
    """Dynamo knows no `apply` but torch's own."""
    x = leaf(3)
    y = torch.compile(lambda x: 2 * Cube.apply(x), backend="aot_eager", fullgraph=True)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, 2 * x**3)
    torch.testing.assert_close(gradient, 6 * x**2)


def test_every_function_has_the_base_class():
    for package in (kernels, models):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                importlib.import_module(module.name)
            except ImportError:
                continue
    own = [
        c for c in _below(torch.autograd.Function) if c.__module__.startswith(("subquad.kernels.", "subquad.models."))
    ]
    assert len(own) > 25
    strangers = [c for c in own if not issubclass(c, Function) and c.__name__ != "_Refusal"]
    assert not strangers


def _below(parent):
    for child in parent.__subclasses__():
        yield child
        yield from _below(child)


def test_gradients_pass_through_steps_of_a_convolution_that_overwrite_their_state():
    """The steps that have a workload are judged by the laws of operators."""

    def total(x):
        state = x.clone()
        return sum(causal_conv1d_step(leaf(1, 2, seed=3), leaf(2, 3), None, state).square().sum() for _ in range(3))

    torch.autograd.gradcheck(total, leaf(1, 2, 2, seed=7))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_hook_may_change_the_strides_of_what_is_saved_for_backward(name):
    """A hook that gives back contiguous copies, as one that moves tensors to the host does, changes no gradient."""
    found = Operator(REPOSITORY.operators.load(name), device=DEVICE)
    if not found.workload.backward:
        pytest.skip("its gradients are not judged")
    for call in found.tiny():
        if not call.implementation.cold_start:
            continue
        given, gradients = found.rounded(call), []
        for hook in (lambda x: x, torch.Tensor.contiguous):
            leaves = {n: x.clone().requires_grad_() if is_float(x) else x for n, x in given.items()}
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, hook):
                outputs = outputs_of(found.function(call, scattered)(**leaves))
            trained = [x for x in leaves.values() if is_float(x)]
            total = sum(x.abs().square().sum() for x in outputs if x.requires_grad)
            gradients.append(torch.autograd.grad(total, trained, allow_unused=True))
        for plain, copied in zip(*gradients, strict=True):
            assert (plain is None) == (copied is None)
            assert plain is None or torch.equal(plain, copied), call
