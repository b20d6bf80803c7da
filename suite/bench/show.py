"""Prints the lines of a benchmark, each as soon as it is measured, so that a crash loses none of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from subquad.suite.bench.cases import Case
from subquad.suite.bench.measure import Ceilings
from subquad.suite.bench.run import Timing, Verdict

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _name(case: Case) -> str:
    return f"{case.label} {DTYPES.get(case.dtype, case.dtype)} {'fwd+bwd' if case.backward else 'fwd'}"


class _Bench:
    """Context manager: a bar, above it the lines of the cases, and a heading for every operator."""

    columns: ClassVar[dict[str, int]]
    """Headings and their widths."""

    def __init__(self, console: Console, cases: Sequence[Case]) -> None:
        self.console = console
        self.widths = (
            max((len(text) for case in cases for text in (_name(case), case.op)), default=0),
            max(len(text) for text in ("implementation", *(case.implementation for case in cases))),
        )
        self.op = ""
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("bench", total=len(cases))

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def _line(self, name: str, implementation: str, text: str, style: str = "") -> None:
        line = f"{name:{self.widths[0]}}  {implementation:{self.widths[1]}}  {text}".rstrip()
        self.bar.console.print(Text(line, style), soft_wrap=True)

    def _cells(self, cells: Sequence[str]) -> str:
        return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, self.columns.values(), strict=True))

    def _add(self, case: Case, cells: Sequence[str] | str, style: str = "") -> None:
        """Prints a line of cells under the headings, or of words where there is no time."""
        if case.op != self.op:
            self.op = case.op
            self.bar.console.print()
            self._line(case.op, "implementation", self._cells(list(self.columns)), "bold")
        self._line(_name(case), case.implementation, cells if isinstance(cells, str) else self._cells(cells), style)
        self.bar.advance(self.task)


class Timings(_Bench):
    """Lines with the time of each implementation beside the lower bound on this device."""

    columns: ClassVar[dict[str, int]] = {
        "median ms": 10,
        "spread": 7,
        "of floor": 8,
        "GB/s": 6,
        "TFLOP/s": 7,
        "extra MiB": 9,
        "cold s": 6,
    }

    def __init__(self, console: Console, cases: Sequence[Case], ceilings: Ceilings) -> None:
        super().__init__(console, cases)
        rates = ", ".join(
            f"{name} products {statistics.median(x) / 1e12:.3g} TFLOP/s" for name, x in ceilings.matmul.items()
        )
        console.print(f"copy {statistics.median(ceilings.copy) / 1e12:.2f} TB/s, {rates}", highlight=False)

    def add(self, timing: Timing) -> None:
        """One more line."""
        median = timing.median_ms
        if median is None or timing.floor_ms is None:
            self._add(timing.case, f"{timing.status}: {timing.reason}", "red" if timing.status == "failed" else "dim")
            return
        cells = [
            f"{median:.4f}",
            "" if timing.spread is None else f"{timing.spread:.1%}",
            f"{timing.floor_ms / median:.0%}",
            f"{timing.num_bytes / median / 1e6:.0f}",
            f"{timing.num_flops / median / 1e9:.1f}",
            "" if timing.extra_bytes is None else f"{timing.extra_bytes / 2**20:.1f}",
            "" if timing.cold_start_s is None else f"{timing.cold_start_s:.1f}",
        ]
        self._add(timing.case, cells)


class Verdicts(_Bench):
    """Lines that compare this revision with a base."""

    columns: ClassVar[dict[str, int]] = {
        "verdict": 7,
        "base ms": 10,
        "this ms": 10,
        "ratio": 6,
        "95 % interval": 14,
        "noise": 6,
        "limit": 6,
    }
    style: ClassVar[dict[str, str]] = {"slower": "red", "broken": "red", "faster": "green"}

    def add(self, verdict: Verdict) -> None:
        """One more line."""
        found, style = verdict.comparison, self.style.get(verdict.word, "")
        if found is None:
            reason = verdict.reason or f"the base has none ({verdict.base_reason})"
            # the reason may begin with the same status
            self._add(verdict.case, f"{verdict.word}: {reason.removeprefix(f'{verdict.word}: ')}", style)
            return
        base, ours = (statistics.median(found.samples[side]) for side in "AB")
        cells = [
            verdict.word,
            f"{base:.4f}",
            f"{ours:.4f}",
            f"{found.ratio:.3f}",
            f"[{found.low:.3f}, {found.high:.3f}]",
            f"{found.noise:.1%}",
            f"{found.limit:.3f}",
        ]
        self._add(verdict.case, cells, style)
