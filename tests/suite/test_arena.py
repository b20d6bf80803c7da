"""Claims about `bench --arena`, on operators made for the purpose and on processes that answer as they are told."""

from __future__ import annotations

import time
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from subquad.kernels import OPERATORS
from subquad.kernels.delta_rule.workloads import WORKLOAD as DELTA_RULE
from subquad.kernels.workload import Implementation
from subquad.run_suite import REPOSITORY
from subquad.suite.bench import arena as arena_module
from subquad.suite.bench.arena import METHOD, Arena, competing, has_peers, one_for_every_peer
from subquad.suite.bench.cases import Case
from subquad.suite.bench.measure import Ceilings, find
from subquad.suite.bench.worker import ChildError, TookTooLong, Worker
from subquad.suite.commands.arena import measure
from subquad.suite.registry import Entry, Registry
from subquad.suite.store import storage
from tests.suite import toy_operators

CPU = torch.device("cpu")
LIMITS = Ceilings(copy=[1e10], matmul={"bfloat16": [1e11]})
FAST = Implementation("cumsum", "ours", lambda: lambda x: x.cumsum(1))
PEER = replace(FAST, name="peer", kind="peer", packages=("pytest", "no-such-package"))
SUM = replace(toy_operators.SUM, implementations=(FAST, PEER))
CASES = competing(SUM, ["short"])


class Told:
    """A process that answers with times (ms), or raises, by implementation."""

    def __init__(self, **answers):
        self.answers, self.asked, self.stopped = answers, [], 0

    def ask(self, what, *, timeout_s, case, budget_ms, recorded):
        name = case["implementation"]
        self.asked.append(name)
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        samples, reason = answer if isinstance(answer, tuple) else (answer, "")
        failed = recorded and reason != ""
        return {"samples": [] if failed else samples, "extra_bytes": 8, "not_recorded": reason if failed else ""}

    def stop(self):
        self.stopped += 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def told(monkeypatch, *processes, **options):
    """The timings of the cases by `processes`, forward alone, by implementation."""
    left = iter(processes)
    monkeypatch.setattr(arena_module, "Worker", lambda *_: next(left))
    with Arena({}, lambda op: SUM, "cpu", LIMITS, **options) as arena:
        groups = list(arena.time(case for case in CASES if not case.backward))
    return {timing.case.implementation: timing for group in groups for timing in group}


def test_a_time_is_that_of_the_fastest_process(monkeypatch):
    processes = [Told(cumsum=[2.0, 2.0, 9.0], peer=[3.0]), Told(cumsum=[1.0], peer=[5.0]), Told(cumsum=[4.0], peer=[4])]
    found = told(monkeypatch, *processes)
    assert found["cumsum"].samples_ms == [1.0]
    assert found["cumsum"].config["processes"] == [2.0, 1.0, 4.0]
    assert found["peer"].median_ms == 3.0
    assert found["peer"].config["method"] == METHOD
    assert found["peer"].config["packages"] == {"pytest": pytest.__version__}


def test_what_is_wrong_in_one_process_has_no_time_and_is_not_asked_again(monkeypatch):
    wrong = ChildError("failed", "wrong at B2")
    processes = [Told(cumsum=[2.0], peer=[3.0]), Told(cumsum=[2.0], peer=wrong), Told(cumsum=[2.0], peer=[1.0])]
    found = told(monkeypatch, *processes)
    assert (found["peer"].status, found["peer"].reason, found["peer"].samples_ms) == ("failed", "wrong at B2", [])
    assert processes[2].asked == ["cumsum"]
    assert found["cumsum"].status == "ok"


def test_a_call_that_cannot_be_recorded_is_timed_as_it_is_in_a_fresh_process_and_marked(monkeypatch):
    answer = ([1.0], "RuntimeError: capture")
    processes = [Told(cumsum=[2.0], peer=answer) for _ in range(3)]
    found = told(monkeypatch, *processes)
    assert found["peer"].samples_ms == [1.0]
    assert found["peer"].config["not_recorded"] == "RuntimeError: capture"
    assert found["cumsum"].config["not_recorded"] == ""
    assert [process.stopped for process in processes] == [1, 1, 1]


def test_time_that_is_over_ends_the_arena_between_two_comparisons(monkeypatch):
    late = Told(cumsum=[1.0], peer=TookTooLong("failed", "it took more than 5 s"))
    fine = Told(cumsum=[1.0], peer=[1.0])
    assert told(monkeypatch, fine, fine, fine, ends_at=time.monotonic()) == {}
    # the limit of a case is longer than what is left, so the peer is not to blame
    assert told(monkeypatch, late, late, late, ends_at=time.monotonic() + 5) == {}
    assert told(monkeypatch, late, late, late)["peer"].reason == "it took more than 5 s"


def test_a_worker_that_hangs_is_replaced_and_one_in_which_a_case_fails_lives_on():
    targets = {"hangs": "tests.suite.toy_operators:HANGS", "causal_conv1d": OPERATORS["causal_conv1d"][0]}
    slow, fast = ({**CASES[0].to_json(), "op": "hangs", "implementation": name} for name in ("sleep", "cumsum"))
    wrong = Case("causal_conv1d", "torch", (("B", 1), ("T", 8), ("D", 2), ("W", 9)), "bfloat16", False)
    with Worker(targets, "cpu") as worker:
        with pytest.raises(TookTooLong, match="more than 1 s"):
            worker.ask("timed", timeout_s=1, case=slow, budget_ms=1.0)
        for _ in range(2):
            with pytest.raises(ChildError, match=r"W in 2\.\.4"):
                worker.ask("prepare", timeout_s=100, case=wrong.to_json())
        assert worker.ask("timed", timeout_s=60, case=fast, budget_ms=1.0)["samples"]


def test_rows_are_continued_for_the_same_code_and_versions_alone(monkeypatch, tmp_path):
    operators = Registry("operator", {"running_sum": Entry("tests.suite.test_arena:SUM", "")})
    repository = replace(REPOSITORY, operators=operators)
    asked = []

    def process(*_):
        asked.append(Told(cumsum=[1.0], peer=ChildError("n/a", "no module named 'peer'")))
        return asked[-1]

    monkeypatch.setattr(arena_module, "Worker", process)
    monkeypatch.setattr("subquad.suite.bench.measure.ceilings", lambda device: LIMITS)

    def call(commit, minutes=None):
        monkeypatch.setenv("SUBQUAD_COMMIT", commit)
        storage_commit.cache_clear()
        asked.clear()
        console = Console(file=StringIO(), width=200)
        measure(repository, ["running_sum"], "short", minutes, "cpu", tmp_path / "results", {}, console)
        return console.file.getvalue(), [name for found in asked for name in found.asked]

    from subquad.suite.environment import commit as storage_commit

    text, _ = call("aaaa", minutes=0)
    assert "stopped with 4 cases left" in text
    text, names = call("aaaa")
    assert names.count("cumsum") == 2 * 3
    text, names = call("aaaa")
    assert "4 cases, 4 of them timed before" in text.replace("\n", " ")
    assert names == []
    (path,) = (tmp_path / "results/kernels/arena").glob("*.parquet")
    rows = storage.load(path).to_pylist()
    assert len({row["started_at"] for row in rows}) == 1
    times = {(row["model"], row["slice"]): row for row in rows if row["metric"] == "time"}
    assert len(times) == 4
    assert {row["status"] for (name, _), row in times.items() if name == "peer"} == {"n/a"}
    assert call("aaaa-dirty")[1] != []
    assert call("bbbb")[1] != []
    assert len(list(path.parent.glob("*.parquet"))) == 3
    storage_commit.cache_clear()


def test_every_peer_is_timed_on_a_shape_that_it_takes():
    """FlashKDA takes decays of channels alone, which no other shape of the delta rule in the arena has."""
    found = one_for_every_peer(DELTA_RULE)
    taken = {case.implementation for case in found if not supports(case)}
    assert taken == {implementation.name for implementation in DELTA_RULE.implementations} - {"torch"}
    assert {dict(case.shape)["decay"] for case in found} == {"head", "key"}
    assert len({case.shape for case in found}) == len(DELTA_RULE.shapes["arena"]) + 1


def supports(case):
    return find(DELTA_RULE, case.implementation).supports(dict(case.shape), case.torch_dtype)


def test_an_operator_without_a_peer_is_left_out():
    assert has_peers(SUM)
    assert not has_peers(replace(SUM, implementations=(FAST, replace(FAST, name="plain", kind="torch"))))
    with pytest.raises(ValueError, match="no other project has a kernel for embedding"):
        measure(REPOSITORY, ["embedding"], None, None, "cpu", None, {}, Console())
