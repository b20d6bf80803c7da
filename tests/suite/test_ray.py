"""A Ray cluster carries out every run once, whatever happens to its nodes."""

import importlib.util
import sys
from collections import Counter

import pytest
import torch

from subquad.run_suite import REPOSITORY
from subquad.suite.commands.planning import resolved_runs
from subquad.suite.environment import IMPORTED_FROM
from subquad.suite.executors.contract import Settings, choose
from subquad.suite.executors.local import OutOfTimeError, run_all
from subquad.suite.training.scores import Scores
from tests.suite.test_plugin_processes import CHANGING
from tests.suite.test_plugins import GRID
from tests.suite.test_workers import Recording, ending, values
from tests.suite.toy import make_run

CPU = Settings(device="cpu")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray; pip install -e '.[ray]'"),
    pytest.mark.timeout(600),
    # Ray leaves sockets and files of its processes to the end of this one
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of four node processes, the first of which carries out nothing."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    memory = {"object_store_memory": 80_000_000}
    started = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory}
    )
    for _ in range(3):
        started.add_node(num_cpus=1, **memory)
    yield started
    started.shutdown()


def test_a_node_that_is_killed_in_mid_grid_costs_no_row(cluster, tmp_path):
    runs = [make_run(model={"fault": "slow"}, train={"epochs": 20}, seed=seed) for seed in range(7)]
    runs.append(make_run(model={"fault": "error"}))
    killed = []

    class Killing(Recording):
        """A display that kills a node once runs have trained for a while."""

        def progressed(self, run, progress):
            if not killed and len(self.ended) >= 2:
                killed.append(run.run_id)
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    display = Killing()
    ended = choose("ray", [f"address={cluster.address}"])(runs, tmp_path, display, CPU)
    assert killed
    assert Counter(finished.run.run_id for finished in ended) == Counter(run.run_id for run in runs)
    assert [reason for _, reason in display.repeats if "its node is lost" in reason]
    assert {path.stem for path in tmp_path.rglob("*.parquet")} == {run.run_id for run in runs}
    assert ending(tmp_path, runs[-1])[0] == "failed"
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".claim", ".tmp")]
    alone = tmp_path / "alone"
    run_all(runs[:-1], alone, torch.device("cpu"), Recording())
    assert values(tmp_path, runs[:-1]) == values(alone, runs[:-1])


def test_a_killed_process_costs_one_try_of_one_run(cluster, tmp_path):
    dies_once = make_run(model={"fault": "killed once", "fault_file": str(tmp_path / "died")})
    dies, good = make_run(model={"fault": "killed"}), make_run()
    display = Recording()
    choose("ray", [f"address={cluster.address}"])([dies, dies_once, good], tmp_path, display, CPU)
    assert ending(tmp_path, dies)[0] == "failed"
    assert "killed" in ending(tmp_path, dies)[1]
    assert ending(tmp_path, dies_once)[0] == ending(tmp_path, good)[0] == "ok"
    assert Counter(run_id for run_id, _ in display.repeats) == {dies.run_id: 1, dies_once.run_id: 1}


def test_a_cluster_whose_time_is_up_saves_its_runs(cluster, tmp_path):
    runs = [make_run(model={"fault": "slow"}, train={"epochs": 400}, seed=seed) for seed in range(4)]
    display = Recording()
    ray = choose("ray", [f"address={cluster.address}"])
    with pytest.raises(OutOfTimeError):
        ray(runs, tmp_path, display, Settings(device="cpu", within_s=20))
    assert display.stops == 1
    assert len(list(tmp_path.rglob("*.checkpoint"))) == 3
    assert not list(tmp_path.rglob("*.claim"))


def test_what_a_plugin_changes_in_its_slot_is_no_part_of_the_runs_of_others(tmp_path, monkeypatch):
    name = "plugin_that_changes_its_process"
    (tmp_path / f"{name}.py").write_text(CHANGING)
    (tmp_path / "my-grid").mkdir()
    (tmp_path / "my-grid" / "grid.yaml").write_text(GRID)
    choice = {"scale": None, "only": None, "overrides": None, "seeds": "2", "data": None}
    monkeypatch.setattr(Scores, "read", Scores.read)
    monkeypatch.setattr("subquad.suite.executors.ray.IMPORTED_FROM", f"{IMPORTED_FROM}:{tmp_path}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    _, runs = resolved_runs(
        REPOSITORY.with_plugins([str(tmp_path / f"{name}.py")]), str(tmp_path / "my-grid"), **choice
    )
    runs.sort(key=lambda run: -len(run.plugins))
    one, display = choose("ray"), Recording()
    ended = one(runs, tmp_path / "behind", display, Settings(device="cpu", jobs=1))
    assert [finished.status for finished in ended] == ["ok"] * 4, [finished.error for finished in ended]
    assert display.repeats == []
    # a process that cannot import the plugin says so
    (tmp_path / f"{name}.py").write_text("MODELS = {")
    (ended,) = one(runs[:1], tmp_path / "broken", Recording(), Settings(device="cpu", jobs=1))
    assert f"the plugin {name} cannot be imported any more: SyntaxError" in ended.error
    one(runs[2:], tmp_path / "alone", Recording(), Settings(device="cpu", jobs=1))
    assert values(tmp_path / "behind", runs[2:]) == values(tmp_path / "alone", runs[2:])
    losses = [row["value"] for row in values(tmp_path / "behind", runs[:1]) if row["metric"] == "loss"]
    assert 0.0 in losses
    del sys.modules[name]
