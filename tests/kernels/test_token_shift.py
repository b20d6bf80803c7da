"""Claims about the token shift; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from subquad.kernels.token_shift import token_shift, token_shift_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
