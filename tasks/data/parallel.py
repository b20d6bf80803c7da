"""Work for several processes whose results come back in order, so that only the time depends on their number."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def in_order(function: Callable[..., Result], calls: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Result]:
    """`function(*call)` for every call, in order. Up to two calls per worker process are started ahead."""
    # a daemonic process may not start processes
    if workers <= 1 or multiprocessing.current_process().daemon:
        yield from itertools.starmap(function, calls)
        return
    # the forked child of a process with threads may hang
    context = multiprocessing.get_context("spawn")
    pending: collections.deque[Future[Result]] = collections.deque()
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            for call in calls:
                pending.append(pool.submit(function, *call))
                if len(pending) >= 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
