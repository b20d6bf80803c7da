"""200 runs, shared by worker processes and a Ray cluster, while workers, parents and nodes are killed 50 times."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from subquad.suite.executors.contract import Settings, choose
from subquad.suite.executors.local import run_all
from subquad.suite.executors.processes import children
from subquad.suite.store import endings, storage
from subquad.suite.store.claims import find_claims
from tests.processes import with_subquad
from tests.suite.test_workers import Recording, servers, values
from tests.suite.toy import make_run

HOME = Path(__file__).resolve().parents[2]
NUM_RUNS = 200
KILLS = {"worker": 30, "parent": 10, "node": 10}
CPU = torch.device("cpu")


def make_runs():
    return [make_run(model={"fault": "slow"}, train={"epochs": 6}, seed=seed) for seed in range(NUM_RUNS)]


def work(root, address):
    """Body of a parent: carries out what is left on a Ray cluster, or here in two workers without an address."""
    runs = [run for run in make_runs() if ending(root, run) is None]
    if address:
        choose("ray", [f"address={address}"])(runs, Path(root), Recording(), Settings(device="cpu"))
    else:
        run_all(runs, Path(root), CPU, Recording(), jobs=2)


def ending(root, run):
    return endings.ending(storage.result_path(Path(root), run.experiment, run.scale, run.run_id))


class Parent:
    """A parent that is started again whenever it is gone."""

    def __init__(self, root, address=""):
        self.code = f"from tests.suite.test_kills import work; work({str(root)!r}, {address!r})"
        self.log = (root.parent / f"parent-{'ray' if address else 'local'}.log").open("a")
        self.process = None

    def keep(self):
        if self.process is None or self.process.poll() is not None:
            environment = with_subquad(HOME) | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-c", self.code], cwd=HOME, env=environment, stdout=self.log, stderr=self.log
            )

    def workers(self):
        """Processes that carry out runs."""
        with contextlib.suppress(OSError):
            return [worker for server in servers(self.process.pid) for worker in children(server)]
        return []

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_run_has_its_rows_once_after_fifty_kills(tmp_path, monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs ray; pip install -e '.[ray]'")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    root = tmp_path / "results"
    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={**node, "num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(**node) for _ in range(2)]
    local, ray = Parent(root), Parent(root, cluster.address)
    chance = random.Random(0)
    left = [kind for kind, count in KILLS.items() for _ in range(count)]
    chance.shuffle(left)
    num_kills = len(left)
    runs = make_runs()
    try:
        while left:
            local.keep()
            ray.keep()
            time.sleep(0.1)
            # the kills are spread over the grid, so that most of them hit a process that trains
            stored = sum(ending(root, run) is not None for run in runs)
            if stored < (num_kills - len(left)) * (NUM_RUNS - 10) // num_kills:
                continue
            time.sleep(chance.uniform(0.0, 1.0))
            kind = left[-1]
            if kind == "worker":
                if not (workers := local.workers()):
                    continue
                os.kill(chance.choice(workers), signal.SIGKILL)
            elif kind == "parent":
                chance.choice([local, ray]).kill()
            else:
                cluster.remove_node(nodes.pop(chance.randrange(len(nodes))), allow_graceful=False)
                nodes.append(cluster.add_node(**node))
            left.pop()
            print(f"{kind} killed, {len(left)} left, {stored} runs stored", flush=True)
        deadline = time.monotonic() + 1200
        while any(ending(root, run) is None for run in runs):
            assert time.monotonic() < deadline
            local.keep()
            time.sleep(1)
        assert local.process.wait(timeout=300) == 0
    finally:
        for parent in (local, ray):
            if parent.process is not None:
                parent.kill()
        cluster.shutdown()
    # a run that was killed with each of its workers has a row that says so, and is repeated by the next call
    again = [run for run in runs if ending(root, run).status == "failed"]
    assert all("killed" in ending(root, run).error for run in again)
    run_all(again, root, CPU, Recording())
    files = storage.files([root], runs[0].experiment)
    assert sorted(path.stem for path in files) == sorted(run.run_id for run in runs)
    rows = storage.read(files)
    assert set(rows["status"]) == {"ok"}
    assert (rows[rows["metric"] == "run"].groupby("run_id").size() == 1).all()
    assert not rows.duplicated(["run_id", "metric", "split", "slice", "step"]).any()
    assert rows.groupby("run_id").size().nunique() == 1
    assert not [path for path in root.rglob("*") if path.suffix in (".tmp", ".checkpoint")]
    # a parent that is killed between the rows of a run and the end of its claim leaves one that nobody heeds
    assert not [claim for claim in find_claims(root, runs[0].experiment) if claim.live]
    some = chance.sample(runs, 20)
    run_all(some, tmp_path / "alone", CPU, Recording())
    assert values(root, some) == values(tmp_path / "alone", some)
