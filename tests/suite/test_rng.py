"""A purpose has a stream of its own: drawing for one cannot move another."""

import numpy as np
import torch

from subquad.suite.rng import numpy_generator, torch_seed


def test_streams_repeat_and_differ_by_purpose_seed_and_index():
    def draw(*key):
        return tuple(numpy_generator(*key).integers(0, 2**31, 4))

    assert draw(0, "data") == draw(0, "data")
    assert len({draw(0, "data"), draw(0, "order"), draw(1, "data"), draw(0, "data", 1), draw(0, "data", 0, 1)}) == 5


def test_global_generators_do_not_matter():
    before = numpy_generator(0, "data").random(3)
    torch.rand(7)
    np.random.default_rng().random(7)
    assert (numpy_generator(0, "data").random(3) == before).all()


def test_torch_seeds_fit_and_repeat():
    assert 0 <= torch_seed(0, "init") < 2**63
    assert torch_seed(5, "x") == torch_seed(5, "x")
    assert len({torch_seed(5, "x"), torch_seed(5, "y"), torch_seed(6, "x"), torch_seed(5, "x", 1)}) == 4
