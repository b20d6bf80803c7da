"""Autotuned kernels of other projects: compiles all their configurations together, and not one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from subquad.suite.environment import cores


@contextmanager
def forms_compiled_together() -> Iterator[None]:
    """Within it, Triton compiles all forms of an autotuned kernel on all cores before it times the first.

    Triton's autotuner compiles a form, times it, and goes on to the next, so that one core works for minutes on the
    kernels of a model while the GPU waits. What is timed, and which form wins, stays as it was. Triton before 3.6,
    whose threads end with the first form that cannot be compiled, tunes as always.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return
    prune = Autotuner.prune_configs

    def prune_and_compile(self: Any, kwargs: dict[str, Any]) -> Any:
        forms = prune(self, kwargs)
        given = {**self.nargs, **kwargs, "warmup": True}
        # a form that cannot be compiled says so when it is timed; one with a hook may change its arguments there. An
        # older Triton does not know `ignore_errors`
        with suppress(Exception), AsyncCompileMode(pool, ignore_errors=True):
            for form in forms:
                if form.pre_hook is None:
                    self.fn.run(**given, **form.all_kwargs())
        return forms

    with ThreadPoolExecutor(cores()) as pool:
        Autotuner.prune_configs = prune_and_compile
        try:
            yield
        finally:
            Autotuner.prune_configs = prune
