"""Claims about `bench --arena`, on operators made for the purpose and on processes that answer as they are told."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import StringIO
from itertools import groupby
from pathlib import Path
from threading import Event

import pytest
import torch
from rich.console import Console

from subquad.kernels import OPERATORS
from subquad.kernels.delta_rule.workloads import WORKLOAD as DELTA_RULE
from subquad.kernels.workload import Implementation
from subquad.run_suite import REPOSITORY
from subquad.suite.bench import arena as arena_module
from subquad.suite.bench.arena import METHOD, Arena, competing, has_peers, in_order, one_for_every_peer
from subquad.suite.bench.cases import Case
from subquad.suite.bench.measure import Ceilings, find
from subquad.suite.bench.worker import ChildError, TookTooLong, Worker
from subquad.suite.commands.arena import _tried_before, measure
from subquad.suite.registry import Entry, Registry
from subquad.suite.store import storage
from tests.suite import toy_operators

CPU = torch.device("cpu")
LIMITS = Ceilings(copy=[1e10], matmul={"bfloat16": [1e11]})
FAST = Implementation("cumsum", "ours", lambda: lambda x: x.cumsum(1))
PEER = replace(FAST, name="peer", kind="peer", packages=("pytest", "no-such-package"))
SUM = replace(toy_operators.SUM, implementations=(FAST, PEER))
CASES = competing(SUM, ["short"])


SHAPES = tuple({"B": 2, "T": length, "D": 3, "kind": "plain"} for length in (4, 8, 12, 16))


class Told:
    """Processes that answer as they are told.

    answers: by implementation, the sample (ms) that its processes take one after the other, or the error of one of
    them, or the reason why its call cannot be recorded; None: they do not answer.
    """

    def __init__(self, **answers):
        self.answers, self.asked, self.started = answers, [], Counter()
        self.working, self.sampling, self.alive = set(), set(), set()

    def __call__(self, *_, **__):
        assert not self.sampling
        process = Process(self)
        self.alive.add(process)
        return process


class Process:
    def __init__(self, told):
        self.told, self.paused, self.ended = told, False, Event()

    def ask(self, what, *, timeout_s, case, as_graph=True, budget_ms=0.0):
        case = Case.from_json(case)
        told, answers = self.told, self.told.answers[case.implementation]
        if what == "record":
            told.asked.append(case)
            told.started[case] += as_graph
            told.working.add(self)
            time.sleep(0.01)
            self.answer = answers[(told.started[case] - 1) % len(answers)]
            if self.answer is None:
                assert self.ended.wait(20)
                raise ChildError("failed", "the timing process ended with signal 9")
            told.working.discard(self)
            if isinstance(self.answer, Exception):
                raise self.answer
            return {"extra_bytes": 8, "not_recorded": self.answer if as_graph and isinstance(self.answer, str) else ""}
        assert not told.sampling
        assert all(process.paused for process in told.working)
        told.sampling.add(self)
        time.sleep(0.005)
        told.sampling.discard(self)
        return [9.0] if isinstance(self.answer, str) else [self.answer]

    def pause(self):
        self.paused = True

    def resume(self):
        self.paused = False

    def kill(self):
        self.ended.set()
        self.told.alive.discard(self)

    stop = kill


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(arena_module, "SETTLE_S", 0.0)


def timings(monkeypatch, told, wanted=None, workload=SUM, **options):
    """The timings of cases, by default those of one comparison, by implementation."""
    monkeypatch.setattr(arena_module, "Worker", told)
    with Arena({}, lambda op: workload, "cpu", LIMITS, **options) as arena:
        groups = list(arena.time(wanted or (case for case in CASES if not case.backward)))
    assert not told.alive
    return {timing.case if wanted else timing.case.implementation: timing for group in groups for timing in group}


def test_a_time_is_that_of_the_fastest_process(monkeypatch):
    found = timings(monkeypatch, Told(cumsum=[2.0, 1.0, 4.0], peer=[3.0, 5.0, 4.0]))
    assert found["cumsum"].samples_ms == [1.0]
    assert found["cumsum"].config["processes"] == [2.0, 1.0, 4.0]
    assert found["peer"].median_ms == 3.0
    assert found["peer"].config["method"] == METHOD
    assert found["peer"].config["packages"] == {"pytest": pytest.__version__}


def test_what_is_wrong_in_one_process_has_no_time_and_is_not_asked_again(monkeypatch):
    told = Told(cumsum=[2.0], peer=[3.0, ChildError("failed", "wrong at B2"), 1.0])
    found = timings(monkeypatch, told)
    assert (found["peer"].status, found["peer"].reason, found["peer"].samples_ms) == ("failed", "wrong at B2", [])
    assert Counter(case.implementation for case in told.asked) == {"cumsum": 3, "peer": 2}
    assert found["cumsum"].config["processes"] == [2.0, 2.0, 2.0]


def test_a_call_that_cannot_be_recorded_is_timed_as_it_is_in_a_fresh_process_and_marked(monkeypatch):
    told = Told(cumsum=[2.0], peer=["RuntimeError: capture"])
    found = timings(monkeypatch, told)
    assert found["peer"].samples_ms == [9.0]
    assert found["peer"].config["not_recorded"] == "RuntimeError: capture"
    assert found["cumsum"].config["not_recorded"] == ""
    assert Counter(case.implementation for case in told.asked) == {"cumsum": 3, "peer": 6}


def test_whoever_is_timed_is_alone_and_no_comparison_is_lost(monkeypatch):
    """The processes themselves assert that all others stand still while one takes samples."""
    monkeypatch.setattr(arena_module, "cores", lambda: 8)
    workload = replace(SUM, shapes={"quick": SHAPES})
    wanted = competing(workload, ["quick"])
    found = timings(monkeypatch, Told(cumsum=[2.0], peer=[3.0]), wanted, workload)
    assert set(found) == set(wanted)
    assert {timing.status for timing in found.values()} == {"ok"}


def test_a_case_that_lacked_memory_beside_others_is_tried_again_alone(monkeypatch):
    oom = ChildError("oom", "out of memory")
    found = timings(monkeypatch, Told(cumsum=[2.0], peer=[oom, 3.0, 3.0, 3.0]))
    assert found["peer"].samples_ms == [3.0]
    assert timings(monkeypatch, Told(cumsum=[2.0], peer=[oom]))["peer"].status == "oom"


def test_comparisons_for_which_there_is_no_memory_wait(monkeypatch):
    monkeypatch.setattr(arena_module, "cores", lambda: 8)
    monkeypatch.setattr(arena_module, "PROCESS_BYTES", 2**60)
    workload = replace(SUM, shapes={"quick": SHAPES})
    told = Told(cumsum=[2.0], peer=[3.0])
    timings(monkeypatch, told, competing(workload, ["quick"]), workload)
    # those of one comparison after those of another
    assert len(list(groupby((case.shape, case.backward) for case in told.asked))) == 8


def test_what_is_known_not_to_run_here_starts_no_process(monkeypatch):
    absent = replace(PEER, name="absent", packages=("no-such-package", "pytest"))
    small = replace(PEER, name="small", supports=lambda shape, dtype: "it is too large")
    one_way = replace(PEER, name="one-way", backward=False)
    workload = replace(SUM, implementations=(FAST, absent, small, one_way))
    told = Told(cumsum=[2.0])
    wanted = [case for case in competing(workload, ["short"]) if case.backward]
    found = timings(monkeypatch, told, wanted, workload)
    reasons = {case.implementation: timing.reason for case, timing in found.items()}
    assert reasons == {
        "cumsum": "",
        "absent": "not installed: no-such-package",
        "small": "it is too large",
        "one-way": "it has no backward pass",
    }
    assert {timing.status for timing in found.values()} == {"ok", "n/a"}
    assert len(told.asked) == 3


def test_time_that_is_over_ends_the_arena_and_its_processes(monkeypatch):
    told = Told(cumsum=[1.0], peer=[1.0])
    assert timings(monkeypatch, told, ends_at=time.monotonic()) == {}
    assert told.asked == []
    slow = replace(PEER, name="slow", supports=lambda shape, dtype: None if shape["T"] == 4 else "it is slow")
    workload = replace(SUM, implementations=(FAST, PEER, slow), shapes={"quick": SHAPES})
    monkeypatch.setattr(arena_module, "cores", lambda: 8)
    told = Told(cumsum=[1.0], peer=[1.0], slow=[None])
    found = timings(monkeypatch, told, competing(workload, ["quick"]), workload, ends_at=time.monotonic() + 1)
    assert {dict(case.shape)["T"] for case in found} == {8, 12, 16}
    assert {timing.status for case, timing in found.items() if case.implementation != "slow"} == {"ok"}


def test_comparisons_that_were_never_tried_come_first_and_what_compares_nothing_last():
    half = replace(PEER, supports=lambda shape, dtype: "it takes even lengths" if shape["T"] == 12 else None)
    workload = replace(SUM, implementations=(FAST, half), shapes={"quick": SHAPES}, backward=False)
    other = replace(workload, op="other")
    load = {"running_sum": workload, "other": other}.get
    wanted = [case for work in (workload, other) for case in competing(work, ["quick"])]
    tried = {case for case in wanted if case.op == "running_sum" and dict(case.shape)["T"] == 4}
    ordered = in_order(load, wanted, tried.__contains__)
    assert sorted(map(str, ordered)) == sorted(map(str, wanted))
    found = [(op, dict(shape)["T"]) for (op, shape), _ in groupby(ordered, key=lambda case: (case.op, case.shape))]
    assert found == [
        ("other", 4),
        ("running_sum", 8),
        ("other", 8),
        ("running_sum", 16),
        ("other", 16),
        ("running_sum", 4),
        ("running_sum", 12),
        ("other", 12),
    ]


def test_a_worker_that_hangs_is_replaced_but_not_for_a_pause_and_one_in_which_a_case_fails_lives_on():
    targets = {"hangs": "tests.suite.toy_operators:HANGS", "causal_conv1d": OPERATORS["causal_conv1d"][0]}
    slow, fast = ({**CASES[0].to_json(), "op": "hangs", "implementation": name} for name in ("sleep", "cumsum"))
    wrong = Case("causal_conv1d", "torch", (("B", 1), ("T", 8), ("D", 2), ("W", 9)), "bfloat16", False)
    with Worker(targets, "cpu") as worker:
        states = []

        def pause():
            worker.pause()
            time.sleep(1.5)
            states.extend([Path(f"/proc/{worker.process.pid}/stat").read_text().split()[2], worker.process.poll()])
            worker.resume()

        with ThreadPoolExecutor() as pool:
            paused = pool.submit(lambda: (time.sleep(0.5), pause()))
            begin = time.monotonic()
            with pytest.raises(TookTooLong, match="more than 1 s"):
                worker.ask("record", timeout_s=1, case=slow)
            assert time.monotonic() - begin > 2.4
            paused.result()
        assert states == ["T", None]
        for _ in range(2):
            with pytest.raises(ChildError, match=r"W in 2\.\.4"):
                worker.ask("prepare", timeout_s=100, case=wrong.to_json())
        assert worker.ask("record", timeout_s=60, case=fast)["not_recorded"] == ""
        assert worker.ask("sample", timeout_s=60, case=fast, budget_ms=1.0)


def test_rows_are_continued_for_the_same_code_and_versions_alone(monkeypatch, tmp_path):
    operators = Registry("operator", {"running_sum": Entry("tests.suite.test_arena:SUM", "")})
    repository = replace(REPOSITORY, operators=operators)
    told = Told(cumsum=[1.0], peer=[ChildError("n/a", "ModuleNotFoundError: No module named 'peer'")])
    monkeypatch.setattr(arena_module, "Worker", told)
    monkeypatch.setattr("subquad.suite.bench.measure.ceilings", lambda device: LIMITS)

    def call(commit, minutes=None):
        monkeypatch.setenv("SUBQUAD_COMMIT", commit)
        storage_commit.cache_clear()
        told.asked.clear()
        console = Console(file=StringIO(), width=200)
        measure(repository, ["running_sum"], "short", minutes, "cpu", tmp_path / "results", {}, console)
        return console.file.getvalue(), [case.implementation for case in told.asked]

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
    # a kernel that was not installed was not tried, and rows of another device do not count
    tried = _tried_before(repository, tmp_path / "results", rows[0]["device"])
    assert {implementation for _, implementation, _ in tried} == {"cumsum"}
    assert _tried_before(repository, tmp_path / "results", "another device") == set()
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
