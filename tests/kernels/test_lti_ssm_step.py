"""One step of the state space model: the kernel and plain PyTorch against the step as written."""

from functools import partial

import pytest
import torch

from subquad.kernels.lti_ssm import lti_ssm_step
from subquad.kernels.lti_ssm.reference import lti_ssm_step_reference
from subquad.kernels.lti_ssm.workloads import STEP, make_step_inputs, with_state
from subquad.suite.laws.accuracy import assert_matches_reference

pytest.importorskip("triton")

from subquad.kernels.lti_ssm.triton.step import Tuning, lti_ssm_step_triton, tuning

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = ("zoh", "bilinear", "dss-exp", "dss-exp-no-scale")
TRITON = with_state(partial(lti_ssm_step, backend="triton"))


def inputs(rows, width, states, *, rule="zoh", dtype=torch.float64, seed=3, **more):
    g = torch.Generator().manual_seed(seed)
    made = make_step_inputs({"B": rows, "D": width, "N": states}, dtype, g) | {"discretization": rule}
    return made | more


def gates(rows, width, dtype=torch.float64):
    g = torch.Generator().manual_seed(5)
    return {name: torch.randn(rows, width, generator=g, dtype=dtype) for name in ("gate_in", "gate_out")}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("given_gates", [("gate_in",), ("gate_out",), ("gate_in", "gate_out")])
def test_either_gate_and_both(backend, given_gates):
    more = {name: gate for name, gate in gates(3, 12).items() if name in given_gates}
    step = with_state(partial(lti_ssm_step, backend=backend))
    assert_matches_reference(
        step, lti_ssm_step_reference, inputs(3, 12, 3) | more, dtype=torch.bfloat16, keep=STEP.keep, device=DEVICE,
        grad=False,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rule", RULES)
def test_shared_eigenvalues_a_trained_B_another_rate_and_no_pairs(backend, rule):
    given = inputs(2, 12, 3, rule=rule)
    given |= {name: given[name][:1] for name in ("log_A_real", "A_imag")}
    given |= {"B": torch.randn(12, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
    given |= {"dt_scale": 0.5, "conj_pairs": False}
    step = with_state(partial(lti_ssm_step, backend=backend))
    assert_matches_reference(step, lti_ssm_step_reference, given, device=DEVICE, grad=False)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_longer_than_float32_has_room_for_has_its_limit(backend, rule):
    """e^89 and e^800 are infinite in float32 and in float64, and infinity times zero is NaN."""
    step, results = with_state(partial(lti_ssm_step, backend=backend)), []
    for log_dt in (60.0, 89.0, 800.0):
        given = inputs(2, 3, 4, rule=rule, dtype=torch.float32)
        given["log_dt"][:2] = log_dt
        given["log_A_real"][1, 0] = log_dt
        results.append(step(**{name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in given.items()}))
    for found in results[1:]:
        for x, limit in zip(found, results[0], strict=True):
            torch.testing.assert_close(x, limit, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_views_are_read_and_a_state_with_any_strides_is_updated_in_place(backend):
    streams = torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    given = inputs(4, 10, 3)
    step = with_state(partial(lti_ssm_step, backend=backend))

    def of_views(streams, state, C, **rest):
        gate_out, gate_in, u = streams.unbind(1)
        wider = torch.full((10, 5, 4), torch.nan, dtype=state.dtype, device=state.device)
        view = wider[:, 1:4].permute(2, 0, 1)
        view.copy_(state)
        # channels with a stride of their own, as after a transposition
        u = u.t().contiguous().t()
        y, after = step(u=u, gate_in=gate_in, gate_out=gate_out, state=view, C=C.flip(2), **rest)
        assert after.data_ptr() == wider[:, 1:4].data_ptr()
        assert wider[:, 0].isnan().all()
        assert wider[:, 4].isnan().all()
        return y, after

    def exact(streams, C, **rest):
        gate_out, gate_in, u = streams.unbind(1)
        return lti_ssm_step_reference(u=u, gate_in=gate_in, gate_out=gate_out, C=C.flip(2), **rest)

    del given["u"]
    assert_matches_reference(of_views, exact, {"streams": streams, **given}, device=DEVICE, grad=False)


@pytest.mark.parametrize("tile", [Tuning(1, 4, 1), Tuning(4, 2, 2), Tuning(2, 16, 4)])
def test_every_tile_gives_the_same_result(tile):
    given = inputs(5, 11, 3) | gates(5, 11)

    def tiled(system, **rest):
        options = {"conj_pairs": True, "dt_scale": 1.0}
        return lti_ssm_step_triton(system=system, tile=tile, **(options | rest))

    assert_matches_reference(with_state(tiled), lti_ssm_step_reference, given, device=DEVICE, grad=False)


@pytest.mark.parametrize("states", [1, 3, 32, 64, 500, 512])
@pytest.mark.parametrize("rows", [1, 3, 16, 1000])
def test_a_program_has_no_more_states_than_its_registers_hold(rows, states):
    tile = tuning(rows, states)
    assert 1 <= tile.rows * tile.block_d * states <= 2048
    assert tile.rows < 2 * rows
