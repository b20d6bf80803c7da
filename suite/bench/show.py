"""Tables of a benchmark on a terminal: a bar while it runs, the table of an operator when its last case is done."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from suite.bench.cases import Case
from suite.bench.measure import Ceilings
from suite.bench.run import Timing, Verdict

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class _Bench:
    """Context manager: the bar, and a table for every operator."""

    columns: ClassVar[Sequence[str]]

    def __init__(self, console: Console, cases: Sequence[Case]) -> None:
        self.console = console
        self.left = Counter(case.op for case in cases)
        self.table: Table | None = None
        self.previous = ""
        self.notes: dict[str, None] = {}
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
        self._print()

    def _add(self, case: Case, cells: Sequence[str], style: str = "", note: str = "") -> None:
        if self.table is None:
            self.table = Table(box=None, pad_edge=False)
            self.table.add_column(case.op, overflow="fold")
            self.table.add_column("implementation", overflow="fold")
            for name in self.columns:
                self.table.add_column(name, justify="right", no_wrap=True)
        short = f"{case.label} {DTYPES.get(case.dtype, case.dtype)} {'fwd+bwd' if case.backward else 'fwd'}"
        self.table.add_row("" if short == self.previous else short, case.implementation, *cells, style=style)
        self.previous = short
        if note:
            self.notes[f"{case.implementation}: {note}"] = None
        self.bar.advance(self.task)
        self.left[case.op] -= 1
        if not self.left[case.op]:
            self._print()

    def _print(self) -> None:
        if self.table is None:
            return
        self.bar.console.print(self.table, highlight=False, markup=False)
        for note in self.notes:
            self.bar.console.print(note, style="dim", highlight=False, markup=False)
        self.bar.console.print()
        self.table, self.previous, self.notes = None, "", {}


class Timings(_Bench):
    """How fast each implementation is, against the floor of this device."""

    columns = ("median ms", "spread", "of floor", "GB/s", "TFLOP/s", "extra MiB", "cold s")

    def __init__(self, console: Console, cases: Sequence[Case], ceilings: Ceilings) -> None:
        super().__init__(console, cases)
        rates = ", ".join(
            f"{name} products {statistics.median(x) / 1e12:.3g} TFLOP/s" for name, x in ceilings.matmul.items()
        )
        console.print(f"copy {statistics.median(ceilings.copy) / 1e12:.2f} TB/s, {rates}\n", highlight=False)

    def add(self, timing: Timing) -> None:
        """One more line."""
        median = timing.median_ms
        if median is None or timing.floor_ms is None:
            note = f"{timing.status}: {timing.reason}"
            self._add(timing.case, [timing.status, *[""] * 6], style="dim", note=note)
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
    """This revision against a base."""

    columns = ("verdict", "base ms", "this ms", "ratio", "95 % interval", "noise", "limit")
    style: ClassVar[dict[str, str]] = {"slower": "red", "broken": "red", "faster": "green"}

    def add(self, verdict: Verdict) -> None:
        """One more line."""
        found, style = verdict.comparison, self.style.get(verdict.word, "")
        if found is None:
            reason = verdict.reason or f"the base has none ({verdict.base_reason})"
            self._add(verdict.case, [verdict.word, *[""] * 6], style, note=reason)
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
