"""The inner decoding step of an H3 layer: the kernel and plain PyTorch against the step as written."""

import pytest
import torch

from subquad.kernels.h3_inner import h3_inner_step
from subquad.kernels.h3_inner.reference import h3_inner_step_reference
from subquad.kernels.h3_inner.workloads import make_inputs, with_state
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(rows, width, taps, states, *, dtype=torch.float64, seed=3):
    shape = {"B": rows, "D": width, "M": taps, "N": states}
    return make_inputs(shape, dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_shared_eigenvalues_a_trained_B_another_rate_and_views(backend):
    given = inputs(2, 12, 4, 3)
    given |= {name: given[name][:1] for name in ("log_A_real", "A_imag")}
    given |= {"B": torch.randn(12, 3, 2, dtype=torch.float64), "dt_scale": 0.5}
    streams = torch.stack([given[name] for name in "qkv"], dim=1)
    step = with_state(lambda **more: h3_inner_step(**more, backend=backend))

    def of_views(streams, window, **rest):
        q, k, v = streams.unbind(1)
        # time first, as a model may keep it
        window = window.transpose(0, 2).contiguous().transpose(0, 2)
        return step(q=q, k=k, v=v, window=window, **rest)

    def exact(streams, **rest):
        q, k, v = streams.unbind(1)
        return h3_inner_step_reference(q=q, k=k, v=v, **rest)

    rest = {name: value for name, value in given.items() if name not in ("q", "k", "v")}
    assert_matches_reference(of_views, exact, {"streams": streams, **rest}, device=DEVICE, grad=False)
