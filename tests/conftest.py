"""Setup of all tests: Triton's interpreter without a GPU, memory full of NaN, and a time limit for quick tests.

Triton decides when it is first imported whether kernels are compiled or interpreted, so this file decides before any
test is collected. A process that only hands tests to workers imports neither Triton nor torch.
"""

import contextlib
import gc
import os
import sys

import pytest

from tests import time_limit
from tests.time_limit import pytest_addoption

__all__ = ["poisoned_memory", "pytest_addoption"]

# before torch is imported: workers, and the processes that tests start, share the cores, and with a thread for every
# core each they take three times as long
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    time_limit.pytest_configure(config)
    if getattr(config.option, "numprocesses", None):
        return
    import torch
    from hypothesis import settings

    # on a busy processor an example may take longer than the 0.2 s that are its limit by default
    settings.register_profile("untimed", settings(), deadline=None)
    settings.load_profile("untimed")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        with contextlib.suppress(ImportError):
            from tests.interpreter import change_the_interpreter

            change_the_interpreter()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # the workers of pytest-xdist need the same order
    items.sort(key=lambda item: item.path)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Every second worker reads files from the last on, and finds half of them compiled, as another finds the others.

    In a fresh clone, to compile the tests with pytest's assertions takes a worker six seconds.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", {}).get("workerid", "gw0")
    if isinstance(collector, pytest.Directory) and int(worker[2:]) % 2:
        report.result.reverse()
    return report


MANY = 50
"""Modules imported since the last time from which on it pays to hide them, too."""
hidden = 0
"""Modules that were loaded when objects were hidden from the garbage collector."""


def hide_from_the_garbage_collector():
    """Hide modules and collected tests from the garbage collector, which would walk through them hundreds of times.

    They live to the end. Every run collects garbage at its end, which takes up to half a second with them.
    """
    global hidden
    gc.collect()
    gc.freeze()
    hidden = len(sys.modules)


def pytest_collection():
    # nothing that is collected is garbage
    gc.disable()


def pytest_collection_finish():
    gc.enable()
    # nearly nothing that tests leave behind needs the collector, which runs after every 700 objects by default
    gc.set_threshold(20_000)
    hide_from_the_garbage_collector()


def pytest_runtest_logfinish():
    # the first run imports half of torch, and other tests whole libraries
    if len(sys.modules) > hidden + MANY:
        hide_from_the_garbage_collector()


def pytest_unconfigure():
    # Triton's bindings report objects as leaked that are still hidden at the end of the process
    gc.unfreeze()


@pytest.fixture
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, so that a result which no kernel wrote cannot pass."""
    from subquad.suite.laws import calls

    with calls.poisoned_memory():
        yield
