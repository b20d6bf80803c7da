"""The tests of this folder need an accelerator; without one they are not collected.

All of them take about eight minutes of one H200 and 16 cores, most of it to compile kernels. Tests with the mark
`large` take up to 70 GB of the GPU's memory, so they run one after the other:

    python -m pytest -n 16 --dist worksteal -m "not large" tests/gpu
    python -m pytest -m large tests/gpu

References run on the CPU. Sixteen processes with a thread for every core each would take so long that tests time out,
so the processes share the cores.
"""

import os

import pytest
import torch

from subquad.suite.environment import cores

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
if torch.cuda.is_available():
    torch.set_num_threads(max(1, cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(autouse=True)
def freed_memory():
    """Free what a test held on the GPU, because other workers need the memory that a worker keeps for itself."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    # time on a borrowed device may end before the summary, which would be the first to name a failure
    if report.failed and "gpu" in report.nodeid.split("/"):
        print(f"\n{report.nodeid}\n{report.longreprtext[-1500:]}", flush=True)
