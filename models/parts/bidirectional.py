"""Two copies of a mixer that run in opposite directions, so that every position reads the whole sequence.

    y = past(x) + reverse(future(reverse(x)))

Source: H3 (Fu et al. 2023), appendix F.1: "make the layer bidirectional by making two copies and running them in
opposite directions". The paper does not say how the outputs are joined; here they are added.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from subquad.models.parts.mixer import Mixer


class Bidirectional(Mixer):
    """x [B, T, D] to y [B, T, D] by one mixer for each direction. It reads the future and has no step."""

    def __init__(self, past: Mixer, future: Mixer) -> None:
        super().__init__()
        self.past, self.future = past, future

    def forward(self, x: Tensor) -> Tensor:
        return self.past(x) + self.future(x.flip(1)).flip(1)

    def init_state(self, batch_size: int, capacity: int) -> Any:
        raise ValueError("bidirectional=True reads the future and has no step; set bidirectional=False.")

    def state_size(self, length: int) -> int:
        """Returns the number of elements that the two mixers would keep, each in its own direction.

        No state keeps them, but every run records this number.
        """
        return self.past.state_size(length) + self.future.state_size(length)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{name}.{key}": parameter
            for name, copy in (("past", self.past), ("future", self.future))
            for key, parameter in copy.ssm_parameters().items()
        }
