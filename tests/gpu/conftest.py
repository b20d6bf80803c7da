"""The tests of this folder need an accelerator; without one they are skipped with that reason.

All of them take about eight minutes of one H200 and 16 cores, most of it to compile kernels:

    python -m pytest -n 16 --dist worksteal tests/gpu

The workers share the memory of the GPU. So each of them frees what its last test held, and tests with the mark `large`,
some of which take more than 10 GiB, run one at a time.
"""

import contextlib
import os

import pytest
import torch
from filelock import FileLock


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def shared_memory(request, tmp_path_factory):
    if not torch.cuda.is_available():
        yield
        return
    # the folder above the base is the same for all workers, and the base itself where there are none
    base = tmp_path_factory.getbasetemp()
    lock = FileLock((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "large.lock")
    with lock if request.node.get_closest_marker("large") else contextlib.nullcontext():
        yield
        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    # time on a borrowed device may end before the summary, which would be the first to name a failure
    if report.failed and "gpu" in report.nodeid.split("/"):
        print(f"\n{report.nodeid}\n{report.longreprtext[-1500:]}", flush=True)
