"""Every kernel compiles with the oldest Triton that pyproject.toml allows, which a release installs for this test.

Budgets are of the newest version. What only that one compiles ends with an error of the compiler on a GPU, and nowhere
before: a rounded-up quotient is a constant in Triton 3.9 and no constant in 3.6.
"""

import pytest

from subquad.kernels import OPERATORS
from subquad.suite.bench import budgets


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    budgets.reason() is None or budgets.triton_version() is None, reason="needs a Triton that has no budgets"
)
def test_every_kernel_compiles():
    collection = budgets.collect({name: target for name, (target, _) in OPERATORS.items()}, ["sm_90"])
    reasons = {name: found for name, found in collection.found["sm_90"].items() if isinstance(found, str)}
    assert not reasons
    assert not collection.failures
    assert not collection.unavailable
