"""Every kernel test runs on poisoned memory."""

import pytest


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory):
    pass
