"""Claims about the norm; the accuracy rule is that of `suite.laws.accuracy`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from subquad.kernels.norm import norm
from subquad.kernels.norm.reference import norm_reference
from subquad.kernels.norm.triton import Factors, Options, norm_triton
from subquad.kernels.norm.triton.plan import Tuning
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH = partial(norm, backend="torch")
SMALL_TILES = Tuning(forward=64, backward=32, programs_of_processor=3, programs_with_heads=2)

slow = partial(pytest.param, marks=pytest.mark.slow)


def in_small_tiles(
    x,
    weight,
    bias=None,
    *,
    kind="rms",
    eps=1e-5,
    residual=None,
    gate=None,
    gate_activation="silu",
    activation=None,
    gate_first=False,
    out_dtype=None,
    tuning=SMALL_TILES,
):
    """The kernels with small tiles and few programs, so that short inputs have several of both."""
    options = Options(kind, eps, gate_activation, activation, gate_first, out_dtype or x.dtype, tuning)
    return norm_triton(x, residual, Factors(weight, bias, gate, None, None), options)


def make_inputs(
    width,
    *,
    rows=(3, 7),
    kind="rms",
    residual=True,
    gate=False,
    weight=True,
    bias=None,
    by_head=False,
    gate_activation="silu",
    activation=None,
    gate_first=False,
):
    """by_head: weight and bias are [H, V], where H is the last of `rows` and V the width."""
    own = rows[-1:] if by_head else ()
    g = torch.Generator().manual_seed(width)

    def randn(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    inputs = {"x": randn(*rows, width), "weight": randn(*own, width), "kind": kind, "activation": activation}
    if not weight:
        inputs["weight"] = None
    if kind == "layer" if bias is None else bias:
        inputs["bias"] = randn(*own, width)
    if residual:
        inputs["residual"] = randn(*rows, width)
    if gate:
        inputs["gate"] = randn(*rows, width)
        inputs |= {"gate_activation": gate_activation, "gate_first": gate_first}
    return inputs


def on_device(inputs, dtype=torch.float32):
    return {name: value.to(DEVICE, dtype) if torch.is_tensor(value) else value for name, value in inputs.items()}


CASES = {
    "rms with residual": {},
    "layer with residual": {"kind": "layer"},
    "rms alone": {"residual": False},
    "layer alone": {"kind": "layer", "residual": False},
    "gated heads": {"residual": False, "gate": True, "rows": (2, 3, 2)},
    "sigmoid gate": {"residual": False, "gate": True, "gate_activation": "sigmoid"},
    "weights of heads": {"kind": "layer", "by_head": True, "rows": (2, 5, 4)},
    "weights of heads, gated": {"by_head": True, "rows": (2, 5, 3), "residual": False, "gate": True},
    "everything by head": {
        "kind": "layer",
        "by_head": True,
        "rows": (5, 6),
        "gate": True,
        "gate_activation": "sigmoid",
        "activation": "silu",
    },
    "length one by head": {"kind": "l2", "by_head": True, "bias": True, "rows": (7, 2), "residual": False},
    "gate before": {"residual": False, "gate": True, "gate_first": True},
    "everything, gate before": {"kind": "layer", "gate": True, "activation": "silu", "gate_first": True},
    "length one, sigmoid gate before": {
        "kind": "l2",
        "gate": True,
        "gate_activation": "sigmoid",
        "gate_first": True,
        "residual": False,
    },
    "silu before": {"residual": False, "activation": "silu"},
    "everything": {"kind": "layer", "gate": True, "activation": "silu"},
    "layer without bias": {"kind": "layer", "bias": False},
    "rms without weight": {"weight": False},
    "length one": {"kind": "l2", "weight": False, "residual": False},
    "length one with everything": {"kind": "l2", "gate": True, "bias": True, "activation": "silu"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
@pytest.mark.parametrize("op", [TORCH, in_small_tiles], ids=["torch", "triton"])
def test_results_and_gradients_are_those_of_the_equation(op, case, dtype):
    keep = ("weight", "bias", "residual")
    inputs = make_inputs(12, **CASES[case])
    assert_matches_reference(op, norm_reference, inputs, dtype=dtype, keep=keep, device=DEVICE)


@pytest.mark.parametrize("width", [1, 16, 33, slow(64), slow(500), slow(1024)])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_any_width(kind, width):
    # a layer norm of one element has no gradient for x, and an RMS norm of one element nearly none
    inputs = make_inputs(max(width, 2), kind=kind) if width > 1 else make_inputs(1, kind="rms", rows=(5,))
    assert_matches_reference(in_small_tiles, norm_reference, inputs, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16), slow(torch.float16)])
@pytest.mark.parametrize("heads", [slow(1), 3, 4, slow(12)])
@pytest.mark.parametrize("width", [8, 20, slow(32), slow(64)])
def test_every_head_has_its_own_weight_and_bias(width, heads, dtype):
    options = {"kind": "layer", "by_head": True, "gate": True, "residual": False, "gate_activation": "sigmoid"}
    inputs = make_inputs(width, rows=(3, 7, heads), **options)
    # tiles of part of a head's rows, of several heads and tokens, and more tiles than programs
    for forward, backward in ((64, 32), (512, 256)):
        op = partial(in_small_tiles, tuning=Tuning(forward=forward, backward=backward, programs_with_heads=1))
        keep = ("weight", "bias")
        assert_matches_reference(op, norm_reference, inputs, dtype=dtype, keep=keep, device=DEVICE)


@pytest.mark.parametrize("op", [TORCH, in_small_tiles], ids=["torch", "triton"])
def test_the_residual_keeps_its_precision_and_the_result_gets_the_dtype_asked_for(op):
    inputs = on_device(make_inputs(24))
    inputs["x"] = inputs["x"].bfloat16()
    y, total = op(**inputs)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, inputs["residual"] + inputs["x"])
    wide, _ = op(**inputs, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), y)


@pytest.mark.parametrize("place", ["part of a projection", "transposed", "broadcast"])
def test_a_gate_may_lie_anywhere(place):
    inputs = on_device(make_inputs(16, rows=(2, 5, 3), residual=False, gate=True))
    gate = inputs["gate"]
    if place == "part of a projection":
        inputs["gate"] = torch.cat([gate.flatten(-2), gate.flatten(-2)], -1).chunk(2, -1)[1].unflatten(-1, (3, 16))
    elif place == "transposed":
        inputs["gate"] = gate.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        inputs["gate"] = gate = gate[:, :1].expand_as(gate)
    torch.testing.assert_close(in_small_tiles(**inputs), TORCH(**{**inputs, "gate": gate}), rtol=1e-5, atol=1e-5)


def test_a_row_of_zeros_has_length_zero_and_finite_gradients():
    x = torch.zeros(2, 4, device=DEVICE, requires_grad=True)
    options = Options("l2", 1e-6, "silu", None, False, x.dtype, SMALL_TILES)
    y = norm_triton(x, None, Factors(None, None, None, None, None), options)
    assert torch.equal(y, torch.zeros_like(y))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.full_like(dx, 1e3))


def test_the_plain_path_is_the_norm_of_torch_bit_by_bit():
    inputs = make_inputs(24, kind="layer")
    y, total = norm(**inputs)
    assert torch.equal(total, inputs["residual"] + inputs["x"])
    assert torch.equal(y, F.layer_norm(total, (24,), inputs["weight"], inputs["bias"], 1e-5))
    rms = make_inputs(24, residual=False)
    assert torch.equal(norm(**rms), F.rms_norm(rms["x"], (24,), rms["weight"], 1e-5))


@pytest.mark.parametrize("gate_first", [False, True])
def test_a_linear_map_reads_what_stands_behind_the_gate(gate_first):
    inputs = make_inputs(12, residual=False, gate=True, gate_first=gate_first)
    inputs["linear"] = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_matches_reference(partial(norm, backend="triton"), norm_reference, inputs, device=DEVICE)
