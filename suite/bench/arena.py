"""The arena: our kernels and other projects' on the same inputs, each judged, and timed as a user with a graph sees it.

Three processes time every case, one after the other. In each the implementation runs at full size, so that it tunes
itself, is judged by the accuracy rule, and is recorded as a CUDA graph, so that its host does not count; one that
cannot be recorded is timed as it is called, and its row says so. The time of a case is that of the fastest process,
because what a kernel chooses when it tunes itself differs from process to process. One that is wrong, ends with an
error or takes too long in any of them has no time.

Nearly all of the time goes into compiling, so many cases are prepared side by side, each in a process of its own. Once
one process for each implementation of a comparison is ready, all others stand still, and these are timed in turn. An
implementation tunes itself while others are prepared. This makes its choice noisier, though little: a tuner compares
medians of single kernels, most of which take less than the time (about 2 ms) after which a GPU turns to another
process, and the fastest of three choices counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from itertools import groupby
from threading import Condition, RLock
from typing import Any, Self

import torch

from subquad.suite.bench.cases import NOT_INSTALLED, Case, cases
from subquad.suite.bench.contracts import Implementation, Workload
from subquad.suite.bench.measure import Ceilings, find, refusal, versions_in
from subquad.suite.bench.run import BUDGET_MS, Timing
from subquad.suite.bench.worker import TICK_S, ChildError, Worker
from subquad.suite.environment import cores, version_of

METHOD = 3
"""The number of the method of measuring, which every row records: 1 is that of `bench`, calls from Python in one
process; 2 is the above without anything side by side, so that nothing disturbs an implementation that tunes itself; 3
is the above. It is raised when the same kernel would get another time."""
PROCESSES = 3
LIMIT_S = 240.0
"""Seconds that an implementation may take in one process. Some choose among hundreds of configurations."""
MOST = 16
"""Processes that are prepared at once at most. Each also has about 2 GiB of the host's memory."""
SETTLE_S = 0.5
"""Seconds in which the GPU ends what it was given by processes that now stand still or were killed."""
PROCESS_BYTES = 2 * 2**30
COPIES = 4
"""A process needs about this memory for its context and scratch, and so many times the minimum traffic of its case: the
rows of other projects' kernels have up to 3.3 times that traffic beyond the inputs."""
SCALE = "arena"


def competing(workload: Workload, sets: Sequence[str], *, on_gpu: bool = True) -> list[Case]:
    """Our kernels and those of other projects. On a GPU our chunked path in plain PyTorch is no kernel."""
    left_out = {found.name for found in workload.implementations if found.kind != "ours" and not is_peer(found)}
    left_out |= {"torch"} if on_gpu else set()
    every = cases(workload, sets, ("ours", "torch", "peer"))
    return [case for case in every if case.implementation not in left_out]


def one_for_every_peer(workload: Workload) -> list[Case]:
    """The cases of the shapes that a workload names for the arena, by default the quick ones, and of one more shape for
    each peer that takes none of these."""
    every = competing(workload, ("quick", "paper"))
    chosen = {tuple(shape.items()) for shape in workload.shapes.get("arena", workload.shapes["quick"])}
    for peer in filter(is_peer, workload.implementations):
        own = [case for case in every if case.implementation == peer.name]
        suited = [case.shape for case in own if peer.supports(dict(case.shape), case.torch_dtype) is None]
        if suited and chosen.isdisjoint(suited):
            chosen.add(suited[0])
    return [case for case in every if case.shape in chosen]


def is_peer(implementation: Implementation) -> bool:
    """Whether it is a kernel of another project. PyTorch's are known by their package; its formulas are no kernels."""
    return implementation.kind == "peer" or (implementation.kind == "torch" and bool(implementation.packages))


def has_peers(workload: Workload) -> bool:
    """Whether another project has a kernel for this operator."""
    return any(map(is_peer, workload.implementations))


def reason_against(workload: Workload, case: Case) -> str | None:
    """The reason why a case has no time here, as far as it is known without a process, or None."""
    found = find(workload, case.implementation)
    # the other packages may not be needed here; without a version, nobody would know what was timed
    absent = found.kind == "peer" and found.packages and not version_of(found.packages[0])
    return refusal(workload, case) or (f"{NOT_INSTALLED}{found.packages[0]}" if absent else None)


def groups_of(wanted: Iterable[Case]) -> list[list[Case]]:
    """The comparisons: all implementations of one shape, dtype and pass."""
    return [
        list(group) for _, group in groupby(wanted, key=lambda case: (case.op, case.shape, case.dtype, case.backward))
    ]


def in_order(load: Callable[[str], Workload], wanted: Iterable[Case], has: Callable[[Case], bool]) -> list[Case]:
    """The cases, comparisons with a case that was never tried first, and those in which only one side can run last.

    The operators take turns, so that each has a comparison early.

    has: whether a case was tried before, with this method on this device.
    """
    before: Counter[str] = Counter()

    def rank(group: Sequence[Case]) -> tuple[int, int]:
        workload = load(group[0].op)
        able = [case for case in group if reason_against(workload, case) is None]
        before[workload.op] += 1
        if len({is_peer(find(workload, case.implementation)) for case in able}) < 2:
            return 2, before[workload.op]
        return int(all(map(has, able))), before[workload.op]

    return [case for group in sorted(groups_of(wanted), key=rank) for case in group]


class OutOfTime(Exception):
    """The arena has ended."""


class Arena:
    """The processes.

    targets: the table of operators, as `module:attribute`.
    load: gives the workload of an operator.
    ends_at: the time of `time.monotonic` at which all processes are ended; None: no end.
    limit_s: seconds that an implementation may take in one process.
    """

    def __init__(
        self,
        targets: Mapping[str, str],
        load: Callable[[str], Workload],
        device: Any,
        ceilings: Ceilings,
        *,
        ends_at: float | None = None,
        limit_s: float = LIMIT_S,
        budget_ms: float = BUDGET_MS,
    ) -> None:
        self.load, self.ceilings, self.ends_at = load, ceilings, ends_at
        self.limit_s, self.budget_ms = limit_s, budget_ms
        gpu = torch.device(device).type == "cuda"
        # all cores compile already; on a CPU, threads of torch are part of what is timed
        self.make = lambda: Worker(targets, str(device), environment={"OMP_NUM_THREADS": "1"} if gpu else None)
        memory = torch.cuda.mem_get_info(device)[0] if gpu else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.memory, self.used, self.room = memory * 4 // 5, 0, Condition()
        self.live: set[Worker] = set()
        self.turn = RLock()
        """Whoever has it measures. Processes start and end in a turn of their own, so that they disturb nobody."""
        self.over = False
        # a process ends with the thread that has started it, and these end with the arena
        count = min(cores(), MOST)
        self.comparing, self.preparing = ThreadPoolExecutor(max(1, count // 2)), ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.over = True
        # those that began meanwhile, too
        while live := list(self.live):
            for worker in live:
                worker.kill()
            time.sleep(TICK_S)
        for pool in (self.comparing, self.preparing):
            pool.shutdown(cancel_futures=True)

    def time(self, wanted: Iterable[Case]) -> Iterator[list[Timing]]:
        """Times the cases, all of a comparison together, the first that is done first. Ends where time is over."""
        left = None if self.ends_at is None else self.ends_at - time.monotonic()
        if left is None or left > 0:
            futures = [self.comparing.submit(self._compared, group) for group in groups_of(wanted)]
            with suppress(TimeoutError):
                for future in as_completed(futures, left):
                    yield future.result()

    def _compared(self, group: Sequence[Case]) -> list[Timing]:
        workload = self.load(group[0].op)
        known = {case: ChildError("n/a", reason) for case in group if (reason := reason_against(workload, case))}
        able = [case for case in group if case not in known]
        traffic = sum(workload.cost(dict(case.shape), case.torch_dtype, case.backward).num_bytes for case in able)
        needed = min(len(able) * PROCESS_BYTES + COPIES * traffic, self.memory)
        answers, refused = self._timed(able, needed)
        if needed < self.memory and any(error.status == "oom" for error in refused.values()):
            # another comparison may have had the memory
            answers, refused = self._timed(able, self.memory)
        return [self._timing(case, answers.get(case, ()), (known | refused).get(case)) for case in group]

    def _timed(
        self, group: Sequence[Case], needed: int
    ) -> tuple[dict[Case, list[dict[str, Any]]], dict[Case, ChildError]]:
        """Asks all processes, and gives their answers for each case and the errors of those that have no time.

        needed: bytes of memory for one process of each case.
        """
        answers: dict[Case, list[dict[str, Any]]] = {case: [] for case in group}
        refused: dict[Case, ChildError] = {}
        with self._room(needed):
            for _ in range(PROCESSES):
                with self._processes() as mine:
                    able = [case for case in group if case not in refused]
                    ready = {case: self.preparing.submit(self._prepared, case, mine) for case in able}
                    wait(ready.values())
                    # one implementation after the other, so that a drift of the clock affects all alike
                    with self._alone(mine):
                        for case, future in ready.items():
                            try:
                                worker, found = future.result()
                                samples = self._ask(worker, "sample", case, budget_ms=self.budget_ms)
                                answers[case].append({**found, "samples": samples})
                            except ChildError as error:
                                refused[case] = error
        return answers, refused

    def _prepared(self, case: Case, mine: set[Worker], not_recorded: str = "") -> tuple[Worker, dict[str, Any]]:
        """A process that is ready to take samples, and what its row says."""
        with self.turn:
            worker = self.make()
            mine.add(worker)
            self.live.add(worker)
        found = self._ask(worker, "record", case, as_graph=not not_recorded)
        if found["not_recorded"]:
            with self.turn:
                worker.stop()
            return self._prepared(case, mine, found["not_recorded"])
        return worker, {**found, "not_recorded": not_recorded}

    def _ask(self, worker: Worker, what: str, case: Case, **options: Any) -> Any:
        if self.over:
            raise OutOfTime
        return worker.ask(what, timeout_s=self.limit_s, case=case.to_json(), **options)

    @contextmanager
    def _room(self, needed: int) -> Iterator[None]:
        """Waits until there are so many bytes of memory, or all that there ever are."""
        with self.room:
            self.room.wait_for(lambda: self.used + needed <= self.memory)
            self.used += needed
        try:
            yield
        finally:
            with self.room:
                self.used -= needed
                self.room.notify_all()

    @contextmanager
    def _processes(self) -> Iterator[set[Worker]]:
        """A set of processes, which end with it."""
        mine: set[Worker] = set()
        try:
            yield mine
        finally:
            with self.turn:
                for worker in mine:
                    worker.kill()
                self.live -= mine
            for worker in mine:
                worker.stop()

    @contextmanager
    def _alone(self, mine: set[Worker]) -> Iterator[None]:
        """The time in which all other processes stand still."""
        with self.turn:
            others = self.live - mine
            for worker in others:
                worker.pause()
            time.sleep(SETTLE_S)
            try:
                yield
            finally:
                for worker in others:
                    worker.resume()

    def _timing(self, case: Case, answers: Sequence[Mapping[str, Any]], refused: ChildError | None) -> Timing:
        workload = self.load(case.op)
        cost = workload.cost(dict(case.shape), case.torch_dtype, case.backward)
        config: dict[str, Any] = {"method": METHOD, "packages": versions_in(find(workload, case.implementation))}
        counts: dict[str, Any] = {
            "floor_ms": self.ceilings.floor_ms(cost, case.dtype),
            "num_bytes": cost.num_bytes,
            "num_flops": cost.num_flops,
        }
        if refused is not None:
            return Timing(case, [], status=refused.status, reason=str(refused), config=config, **counts)
        medians = [statistics.median(answer["samples"]) for answer in answers]
        best = answers[medians.index(min(medians))]
        config |= {"processes": medians, "not_recorded": best["not_recorded"]}
        return Timing(case, best["samples"], extra_bytes=best["extra_bytes"], config=config, **counts)
