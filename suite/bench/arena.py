"""The arena: our kernels and other projects' on the same inputs, each judged, and timed as a user with a graph sees it.

Three processes time every case. In each an implementation runs at full size, so that it tunes itself, is judged by the
accuracy rule, and is recorded as a CUDA graph, so that its host does not count; one that cannot be recorded is timed
as it is called, and its row says so. The time of a case is that of the fastest process, because what a kernel chooses
when it tunes itself differs from process to process. One that is wrong, ends with an error or takes too long in any of
them has no time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any, Self

from subquad.suite.bench.cases import Case, cases
from subquad.suite.bench.contracts import Implementation, Workload
from subquad.suite.bench.measure import Ceilings, find, versions_in
from subquad.suite.bench.run import BUDGET_MS, Timing
from subquad.suite.bench.worker import ChildError, TookTooLong, Worker

METHOD = 2
"""The number of the method of measuring, which every row records: 1 is that of `bench`, calls from Python in one
process; 2 is the above. It is raised when the same kernel would get another time."""
PROCESSES = 3
LIMIT_S = 240.0
"""Seconds that an implementation may take in one process. Some choose among hundreds of configurations."""
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


class OutOfTime(Exception):
    """The time that the arena was given is over."""


class Arena:
    """The processes.

    targets: the table of operators, as `module:attribute`.
    load: gives the workload of an operator.
    ends_at: the time of `time.monotonic` at which no case is timed any more; None: no end.
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
        self.make = lambda: Worker(targets, str(device))
        self.stack = ExitStack()
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        self.workers = [self.stack.enter_context(self.make()) for _ in range(PROCESSES)]
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def time(self, wanted: Iterable[Case]) -> Iterator[list[Timing]]:
        """Times the cases, all implementations of one shape, dtype and pass together. Ends early where time is over."""
        for _, group in groupby(wanted, key=lambda case: (case.op, case.shape, case.dtype, case.backward)):
            try:
                yield self._group(list(group))
            except OutOfTime:
                return

    def _group(self, group: Sequence[Case]) -> list[Timing]:
        answers: dict[Case, list[dict[str, Any]]] = {case: [] for case in group}
        refused: dict[Case, ChildError] = {}
        # one implementation after the other in each process, so that a drift of the clock affects all alike
        for worker in self.workers:
            for case in group:
                if case not in refused:
                    try:
                        answers[case].append(self._measured(worker, case))
                    except ChildError as error:
                        refused[case] = error
        return [self._timing(case, answers[case], refused.get(case)) for case in group]

    def _measured(self, worker: Worker, case: Case) -> dict[str, Any]:
        """The answer of a process, and that of a fresh one for what cannot be recorded."""
        answer = self._ask(worker, case, recorded=True)
        if answer["samples"]:
            return answer
        worker.stop()
        return {**self._ask(worker, case, recorded=False), "not_recorded": answer["not_recorded"]}

    def _ask(self, worker: Worker, case: Case, *, recorded: bool) -> dict[str, Any]:
        left = self.limit_s if self.ends_at is None else self.ends_at - time.monotonic()
        if left <= 0:
            raise OutOfTime
        options: dict[str, Any] = {"case": case.to_json(), "budget_ms": self.budget_ms, "recorded": recorded}
        try:
            answer: dict[str, Any] = worker.ask("timed", timeout_s=min(left, self.limit_s), **options)
        except TookTooLong:
            if left < self.limit_s:
                raise OutOfTime from None
            raise
        return answer

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
