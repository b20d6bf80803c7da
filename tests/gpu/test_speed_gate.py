"""The speed gate on a real device: it always finds a planted slowdown of 5 % and never accuses an unchanged tree."""

from __future__ import annotations

import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subquad.kernels import OPERATORS
from subquad.kernels.causal_conv1d.workloads import WORKLOAD
from subquad.suite.bench import measure
from subquad.suite.bench.base import Base
from subquad.suite.bench.cases import Case
from subquad.suite.bench.compare import compare
from subquad.suite.bench.run import BLOCK_MS, Rows, Verdict
from subquad.suite.bench.worker import Worker

HOME = Path(__file__).resolve().parents[2]
TARGETS = {name: target for name, (target, _) in OPERATORS.items()}
CASE = Case("causal_conv1d", "triton", (("B", 1), ("T", 131072), ("D", 1024), ("W", 4)), "bfloat16", False)
TRIES = 20
PLANT = """

import torch

_unplanted = causal_conv1d_triton


def causal_conv1d_triton(*args, **kwargs):
    result = _unplanted(*args, **kwargs)
    torch.cuda._sleep({cycles})
    return result
"""


def planted_tree(folder: Path, cycles: int) -> Base:
    """A copy of the kernels in which the convolution sleeps for some clock cycles of the GPU after each call."""
    shutil.copytree(HOME / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    with open(folder / "kernels" / "causal_conv1d" / "triton" / "__init__.py", "a") as file:
        file.write(PLANT.format(cycles=cycles))
    return Base(HOME, folder, "planted")


def worker(stack, base=None):
    process = Worker(TARGETS, "cuda", base=base)
    stack(lambda: process.__exit__(None, None, None))
    process.ask("prepare", case=CASE.to_json())
    return process


def block(process):
    return process.ask("sample", case=CASE.to_json(), budget_ms=BLOCK_MS)


@pytest.fixture
def five_percent(tmp_path, request):
    """A worker whose tree sleeps for 5 % of the case's time; the cycles are found by bisection, without the gate."""
    device = torch.device("cuda")
    call = measure.prepare(WORKLOAD, CASE, device)

    def slowdown(cycles):
        def planted():
            call()
            torch.cuda._sleep(cycles)

        ratios = [
            statistics.median(measure.sample(planted, device)) / statistics.median(measure.sample(call, device))
            for _ in range(5)
        ]
        return statistics.median(ratios)

    low, high = 0, 100_000
    while high - low > 100:
        cycles = (low + high) // 2
        low, high = (cycles, high) if slowdown(cycles) < 1.05 else (low, cycles)
    assert slowdown(high) == pytest.approx(1.05, abs=0.006)
    return worker(request.addfinalizer, planted_tree(tmp_path, high))


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(500)
def test_a_planted_five_percent_is_caught_and_an_unchanged_tree_is_not_accused(five_percent, tmp_path, request):
    same = {side: worker(request.addfinalizer) for side in ("A", "B", "control")}
    kept = Rows(Path("results/local"), "gate", torch.device("cuda"), ["gate"])
    verdicts = {"unchanged": [], "planted": []}
    for _ in range(TRIES):
        for name, b in (("unchanged", same["B"]), ("planted", five_percent)):
            workers = {**same, "B": b}
            found = compare(lambda side, workers=workers: block(workers[side]))
            verdicts[name].append(found.verdict)
            case = replace(CASE, implementation=f"{CASE.implementation}-{name}")
            kept.add_verdict(Verdict(case, found), kept.provenance["commit"], WORKLOAD.version)
            print(f"{name:10s} ratio {found.ratio:.4f} [{found.low:.4f}, {found.high:.4f}] noise {found.noise:.2%}")
    print(kept.path)
    assert verdicts["planted"] == ["slower"] * TRIES
    assert verdicts["unchanged"] == ["same"] * TRIES
