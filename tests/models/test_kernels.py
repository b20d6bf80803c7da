"""The filters that models convolve with, and the rows of results that are made of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from subquad.models import MODELS
from subquad.models.backbone import Backbone
from subquad.suite.contracts import TaskSpec
from subquad.suite.training.config import KernelProbe
from subquad.suite.training.learned_kernels import kernel_rows, rank_correlation, spaced

LENGTH = 40
OPTIONS = [
    ("s4d", {}),
    ("s4d", {"discretization": "bilinear", "bidirectional": True}),
    ("dss-softmax", {}),
    ("dss-softmax", {"bidirectional": True}),
    ("dss-exp", {}),
    ("dss-exp-no-scale", {}),
    ("gss", {"reduction": 4}),
    ("h3", {"d_state": 8}),
    ("h3", {"d_state": 64}),
    ("h3", {"inner": "hyena"}),
    ("hyena", {"order": 3}),
    ("mamba", {"inner": "s4d"}),
]


def build(name: str, **options) -> Backbone:
    config = MODELS.load(name)(**{"num_layers": 2, "d_model": 16, **options})
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        spec = TaskSpec("tokens", num_classes=16, readout="token", max_length=LENGTH, vocab_size=16)
        return config.build(spec).eval()
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{n}-{o}" for n, o in OPTIONS])
@torch.no_grad()
def test_the_kernel_of_a_layer_is_its_response_to_an_impulse_less_the_skip(name, options):
    parts = build(name, **options).convolutions()
    assert {key.partition(",")[0] for key in parts} == {"layer=0", "layer=1"}
    for part in parts.values():
        for length in (LENGTH, LENGTH // 2):
            impulse = torch.zeros(1, length, len(part.D), dtype=torch.float64)
            impulse[:, 0] = 1
            response = part(impulse)[0].T
            response[:, 0] -= part.D
            kernel = part.kernel(length)
            assert kernel.shape == (len(part.D), length)
            assert kernel.abs().max() > 1e-3
            torch.testing.assert_close(kernel, response, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_eigenvalues_give_decay_and_rotation_of_the_kernel():
    # with a single eigenvalue |K_k| falls as e^{Re(Lambda) dt k}, and K has the zeros of its cosine
    (part, *_) = build("dss-exp", d_state=1).convolutions().values()
    dt = part.log_dt.exp()
    (eigenvalue,) = part.eigenvalues()
    kernel = part.kernel(LENGTH)
    # K_{k+1} + K_{k-1} |a|^2 = 2 Re(a) K_k with a = e^{Lambda dt}
    a = torch.exp(eigenvalue * dt)[:, None]
    torch.testing.assert_close(kernel[:, 2:] + kernel[:, :-2] * a.abs() ** 2, 2 * a.real * kernel[:, 1:-1])


def test_models_without_a_fixed_filter_have_none_and_say_so():
    for name in ("attention", "gla", "mamba"):
        assert build(name).convolutions() == {}
    (row,) = kernel_rows({}, LENGTH, KernelProbe())
    assert (row["metric"], row["value"], row["status"]) == ("kernel", None, "n/a")


class Part:
    """Kernels and eigenvalues with chosen values."""

    def __init__(self, kernel: Tensor, eigenvalues: Tensor | None = None) -> None:
        self.K = kernel
        if eigenvalues is not None:
            self.eigenvalues = lambda: eigenvalues

    def kernel(self, length: int) -> Tensor:
        return self.K[:, :length]


def spike(*lags: int, length: int = 64) -> Tensor:
    """One kernel for every lag, which is -2 at this lag and 0 elsewhere."""
    return -2.0 * torch.nn.functional.one_hot(torch.tensor(lags), length)


def rows_of(parts, length=64, start=False, **probe):
    return list(kernel_rows(parts, length, KernelProbe(**{"lags": 32, "points": 8, "near": 8, **probe}), start=start))


def one(rows, metric, where=""):
    (value,) = [row["value"] for row in rows if row["metric"] == metric and row["slice"] == where]
    return value


def test_a_curve_is_the_kernels_size_relative_to_its_largest_value_at_any_lag():
    kernel = torch.zeros(2, 64)
    kernel[0, 5], kernel[0, 10], kernel[0, 63] = -1.0, 0.5, 4.0
    kernel[1, 0] = 3.0
    rows = [row for row in rows_of({"layer=0,filter=ssm": Part(kernel)}) if row["metric"] == "kernel"]
    assert [row["slice"] for row in rows] == [f"layer=0,filter=ssm,channel={c},span=4" for c in (0, 1)]
    assert rows[0]["samples"] == [0, 0.25, 0.125, 0, 0, 0, 0, 0]
    assert (rows[0]["value"], rows[1]["value"]) == (0.25, 1)


def test_channels_are_thinned_evenly_and_shares_are_of_all():
    rows = rows_of({"layer=0,filter=ssm": Part(spike(*[0] * 9, 40))}, channels=3)
    shown = [row["slice"].split(",")[2] for row in rows if row["metric"] == "kernel"]
    assert shown == ["channel=0", "channel=3", "channel=6"]
    assert one(rows, "kernels_far") == pytest.approx(0.1)
    assert spaced(5, 9).tolist() == [0, 1, 2, 3, 4]


def test_near_and_far_kernels_are_told_apart():
    even = torch.ones(1, 64)
    leaning = torch.ones(1, 64)
    leaning[:, :8] = 1.9
    rows = rows_of({"layer=0,filter=ssm": Part(torch.cat([spike(7, 8, 63), even, leaning]))})
    assert one(rows, "kernels_near") == pytest.approx(1 / 5)
    assert one(rows, "kernels_far") == pytest.approx(2 / 5)


def test_the_percentile_is_that_of_the_peaks_of_all_layers():
    parts = {f"layer={i},filter=ssm": Part(spike(*range(50 * i, 50 * i + 50), length=101)) for i in (0, 1)}
    assert one(rows_of(parts, length=101), "kernel_peak_p95") == pytest.approx(0.95 * 99)


def test_sequences_shorter_than_the_lags_have_fewer_points_and_no_share_where_all_is_near():
    rows = rows_of({"layer=0,filter=ssm": Part(spike(3, length=7))}, length=7)
    assert [row["samples"] for row in rows if row["metric"] == "kernel"] == [[1, 0]]
    assert {row["metric"] for row in rows} == {"kernel", "kernel_peak_p95"}


def test_a_kernel_of_zeros_stays_zero():
    rows = rows_of({"layer=0,filter=ssm": Part(torch.zeros(1, 64))})
    assert rows[0]["samples"] == [0] * 8


def test_eigenvalues_are_rows_of_every_filter_and_before_the_first_step_the_only_curves():
    eigenvalues = torch.tensor([-0.5 + 1j, 0.25 + 0.5j, -2 + 8j])
    parts = {f"layer={i},filter=ssm": Part(spike(1), eigenvalues) for i in (0, 1)}
    rows = rows_of(parts, start=True)
    assert {row["slice"] for row in rows} == {"at=start", "at=start,layer=0,filter=ssm", "at=start,layer=1,filter=ssm"}
    curves = {(row["metric"], row["slice"]): row["samples"] for row in rows if "samples" in row}
    assert curves["eigenvalue_real", "at=start,layer=1,filter=ssm"] == [-0.5, 0.25, -2]
    assert curves["eigenvalue_imag", "at=start,layer=1,filter=ssm"] == [1, 0.5, 8]
    assert {metric for metric, _ in curves} == {"eigenvalue_real", "eigenvalue_imag"}
    assert one(rows, "eigenvalue_max", "at=start") == 0.25
    assert one(rows, "eigenvalue_ranks", "at=start") == pytest.approx(-1)


def test_there_is_no_rank_correlation_where_all_real_parts_are_the_same():
    parts = {"layer=0,filter=ssm": Part(spike(1), torch.tensor([-0.5 + 1j, -0.5 + 2j]))}
    assert "eigenvalue_ranks" not in {row["metric"] for row in rows_of(parts)}


def test_ranks_of_equal_values_are_shared():
    x, y = torch.tensor([1.0, 2.0, 2.0, 9.0]), torch.tensor([10.0, 30.0, 20.0, 40.0])
    # the ranks are 1, 2.5, 2.5, 4 and 1, 3, 2, 4
    assert rank_correlation(x, y) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_points_that_do_not_divide_the_lags_are_refused():
    with pytest.raises(ValueError, match="points=100 does not divide lags=1024"):
        KernelProbe(points=100)
