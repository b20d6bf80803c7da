"""Linear maps of few rows: the kernels and plain PyTorch against the map as written, with every norm and option."""

import pytest
import torch

from subquad.kernels.skinny_linear import Norm, skinny_linear
from subquad.kernels.skinny_linear.reference import skinny_linear_reference
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEEP = ("norm_weight", "norm_bias", "bias", "residual")


def with_norm(op, kind):
    def run(norm_weight=None, norm_bias=None, **inputs):
        norm = None if norm_weight is None else Norm(kind, norm_weight, norm_bias, 1e-3)
        return op(**inputs, norm=norm)

    return run


def inputs(rows, width, outputs, *, group=None, layer=False, **options):
    """Arguments with x of mean 1/2; options name the tensors that are given, and the activation."""
    g = torch.Generator().manual_seed(rows + width)

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    made = {"x": normal(rows, width) + 0.5, "weight": normal(outputs, width) * width**-0.5}
    if group is not None:
        made["norm_weight"] = normal(group) * 0.2 + 1
    if layer:
        made["norm_bias"] = normal(width)
    sizes = {"bias": (outputs,), "gate": (rows, width), "residual": (rows, outputs)}
    for name, wanted in options.items():
        made[name] = normal(*sizes[name]) if wanted is True else wanted
    return made


CASES = {
    "plain": ({"width": 48, "outputs": 20}, "rms"),
    "rms": ({"width": 72, "outputs": 33, "group": 72, "residual": True}, "rms"),
    "layer": ({"width": 50, "outputs": 18, "group": 50, "layer": True, "bias": True, "activation": "gelu"}, "layer"),
    "groups and gate": ({"width": 64, "outputs": 17, "group": 16, "gate": True, "residual": True}, "rms"),
    "swiglu": ({"width": 136, "outputs": 16, "gate": True, "residual": True}, "rms"),
    "silu": ({"width": 32, "outputs": 5, "bias": True, "activation": "silu"}, "rms"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rows", [1, 3, 18])
def test_it_equals_the_map_as_written(case, backend, rows):
    options, kind = CASES[case]
    if backend == "triton" and rows > 1 and ("group" in options or "gate" in options):
        pytest.skip("the kernels take norms and gates of one row only")
    op = with_norm(lambda **given: skinny_linear(**given, backend=backend), kind)
    assert_matches_reference(
        op, with_norm(skinny_linear_reference, kind), inputs(rows, **options), dtype=torch.bfloat16, keep=KEEP,
        device=DEVICE, grad=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_pytorch_has_gradients_in_every_precision(dtype):
    options, kind = CASES["groups and gate"]
    assert_matches_reference(
        with_norm(skinny_linear, kind), with_norm(skinny_linear_reference, kind), inputs(3, **options), dtype=dtype
    )


def test_a_mean_far_from_zero_does_not_cancel_in_a_layer_norm():
    given = inputs(1, 96, 16, group=96, layer=True)
    given["x"] += 200.0
    op = with_norm(lambda **more: skinny_linear(**more, backend="triton"), "layer")
    assert_matches_reference(
        op, with_norm(skinny_linear_reference, "layer"), given, dtype=torch.bfloat16, keep=(*KEEP, "x"),
        device=DEVICE, grad=False,
    )  # fmt: skip


def test_the_result_has_the_wider_dtype_of_weight_and_residual():
    x, weight = torch.randn(2, 32, device=DEVICE), torch.randn(4, 32, device=DEVICE).bfloat16()
    for backend in ("torch", "triton"):
        assert skinny_linear(x, weight, backend=backend).dtype == torch.bfloat16
        residual = torch.zeros(2, 4, device=DEVICE)
        assert skinny_linear(x, weight, residual=residual, backend=backend).dtype == torch.float32


def test_a_part_of_a_wider_tensor_is_read_in_place():
    both = torch.randn(1, 96, device=DEVICE).bfloat16()
    gate, up = both.chunk(2, dim=-1)
    weight = torch.randn(16, 64, device=DEVICE).bfloat16()[:, :48]
    whole = skinny_linear(up.contiguous(), weight.contiguous(), gate=gate.contiguous(), backend="triton")
    assert torch.equal(skinny_linear(up, weight, gate=gate, backend="triton"), whole)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "gate", "residual", "norm_weight", "norm_bias"])
def test_no_input_alone_loses_its_gradient_to_the_kernels(name):
    given = inputs(1, 16, 8, group=16, layer=True, bias=True, gate=True, residual=True)
    given = {n: x.to(DEVICE, torch.bfloat16) for n, x in given.items()}
    given[name].requires_grad_()
    with pytest.raises(ValueError, match="has no gradient"):
        with_norm(skinny_linear, "layer")(**given, backend="triton")
