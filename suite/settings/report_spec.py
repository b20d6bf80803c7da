"""Options of a grid for its report: source of the published values, selection of runs, table and figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, field_validator

from subquad.suite.bounds import NonNegative, Score
from subquad.suite.metrics import SPENT, check_direction, smaller_is_better
from subquad.suite.options import Config, parse


class Select(Config):
    """Selection of the runs that a table shows, e.g. those with the best learning rate by validation accuracy.

    The best value of `best_of` has the best mean of `by` over the seeds. Of values with exactly equal means, the one
    with the smallest mean loss on `split` is chosen where all their runs have a loss, and else the first of the grid.
    """

    best_of: tuple[str, ...] = Field(min_length=1)
    by: str = "accuracy"
    split: Literal["train", "valid", "test"] = "valid"
    enough: Score | None = None
    """Value of `by`, as it is stored, from which on a run is good enough: once a setting has a value of `best_of` with
    which all its seeds are, `run` does not try the values after it in the grid (`suite.store.enough`). The table shows
    the first such value of the grid, whether or not later ones were run, and says where an earlier one is missing."""
    success: Score | None = None
    """Value of a cell, in the shown unit, from which on a run has succeeded. Where it is given, the report also counts
    the runs that succeed at every value of `best_of`, not at the best one alone."""

    def check_options(self) -> None:
        check_direction(self.by)
        if self.split == "train" and self.by != "loss":
            raise ValueError(f"by: training rows have the loss alone, got {self.by!r}; take it, or split: valid")

    @property
    def rule(self) -> str:
        """The note of a report says in these words how the shown value of `best_of` is chosen."""
        first = "" if self.enough is None else f"first with {self.enough:g} in every seed, else "
        ties = "" if self.by == "loss" else ", ties by loss"
        return f"{first}best by {self.by} on {self.split}, mean over seeds{ties}"

    def evaluation(self, found: Iterable[tuple[int, float | None]], keep: str | None) -> tuple[int, float] | None:
        """Step and score (the value, with its sign changed where smaller is better) that a run is selected by.

        It is the evaluation of the weights that the run kept: the best one, of equal ones the first, with
        `train.keep: best`, else the last one. None where there is none, and where the last one is no number.

        found: step and value of every evaluation, by `by` on the whole of `split`.
        keep: `train.keep` of the run.
        """
        sign = -1.0 if smaller_is_better(self.by) else 1.0
        if keep == "best":
            there = [(step, sign * value) for step, value in found if value is not None]
            return max(there, key=lambda pair: (pair[1], -pair[0]), default=None)
        step, last = max(found, key=lambda pair: pair[0], default=(0, None))
        return None if last is None else (step, sign * last)

    def score(self, found: Iterable[tuple[int, float | None]], keep: str | None) -> float | None:
        """The number that a run is selected by, larger is better; None where it has none. Arguments: `evaluation`."""
        chosen = self.evaluation(found, keep)
        return None if chosen is None else chosen[1]

    def suffices(self, score: float | None) -> bool:
        """Whether a run with this score is good enough."""
        sign = -1.0 if smaller_is_better(self.by) else 1.0
        return self.enough is not None and score is not None and score >= sign * self.enough


Split = Literal["train", "valid", "test", "test-last", "generated", ""]
"""The rows of a run by what they were measured on; empty for what was measured on no split, such as a time."""


class Measurement(Config):
    """Keys of a column of a table that select no run: they name a measurement, or say how it is compared."""

    slice: str = ""
    metric: str = "accuracy"
    split: Split = "test"
    at: Literal["best"] = "best"
    chance: Score | None = None
    tolerance: NonNegative = 1.0
    speedup_over: str = ""
    take: Literal["max", "mean"] = "max"


class TableSpec(Config):
    """Layout of the paper's table. A selector maps dotted keys of a run to the values that they must have."""

    rows: dict[str, dict[str, Any]]
    """Row label, as in expected.csv, to the selector of its runs. A row with `against: LIBRARY` shows that library's
    model (`speed.against`) in place of ours."""
    columns: dict[str, dict[str, Any]]
    """Column label to a selector, which may also name `slice`, `metric` and `split`, and a `chance` and a `tolerance`
    of its own. With `at: best` the column shows the best evaluation of a run instead of its last one. A column with
    `speedup_over: ROW` selects no runs: it has the ratio of each row to that one, on one device, `take: max` or
    `mean` of those in the columns that select runs."""
    mean_over: tuple[str, ...] = ()
    """Dotted keys of a run. A cell is the mean over all settings of these that the grid has for it, as the score of a
    benchmark is; `select` chooses the best run in every setting. A seed counts once all its settings have ended."""
    transpose: bool = False
    """Print rows side by side and columns below each other, for few rows and many columns with long titles."""
    metric: str = "accuracy"
    split: Split = "test"
    percent: bool = True
    """Show fractions as percentages, as the papers do."""
    decimals: int | None = Field(default=None, ge=0, le=15)
    """Decimals that are shown; None: as many as the paper prints, at least one."""
    tolerance: NonNegative = 1.0
    """A cell agrees with the paper if it differs by no more than this, in the shown unit."""
    chance: Score | None = None
    """The number of a guess, in the shown unit. A published number that is no better than this by more than the
    tolerance is at chance: that ours agrees with it says nothing."""
    protocol: str = ""
    """The difference in protocol because of which no cell is compared with the paper's number; empty without one."""
    reference: str = "paper"
    """Source of the numbers in expected.csv, in one word for the header of their column: `paper`, `peer` for times of
    another project that were measured, `goal` for times that were set. Only a paper's numbers count as published."""

    @field_validator("columns")
    @classmethod
    def _measurements(cls, columns: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        def checked(label: str) -> dict[str, Any]:
            given = {key: value for key, value in columns[label].items() if key in Measurement.model_fields}
            return columns[label] | parse(Measurement, given, label).model_dump(exclude_unset=True)

        return {label: checked(label) for label in columns}

    def check_options(self) -> None:
        for label, choice in self.columns.items():
            over, take = choice.get("speedup_over"), choice.get("take")
            if (over is None) != (take is None) or (over is not None and over not in self.rows):
                raise ValueError(f"columns.{label}: speedup_over names a row of the table, and take is max or mean")
            if "at" in choice:
                check_direction(choice.get("metric", self.metric))

    def part(self, row: str, column: str) -> str:
        """The slice name that a cell shows; empty for all of a run's rows."""
        peer = self.peer_of(row)
        parts = (self.columns[column].get("slice", ""), f"against={peer}" if peer else "")
        return ",".join(filter(None, parts))

    def peer_of(self, row: str) -> str | None:
        """The other library whose model a row shows."""
        return self.rows.get(row, {}).get("against")

    def of(self, column: str, key: str) -> Any:
        """The `metric`, `split`, `chance` or `tolerance` of a column: its own, or else that of the table."""
        return self.columns[column].get(key, getattr(self, key))


class CostSpec(Config):
    """A cost of the rows of a table, which a figure shows beside them."""

    label: str
    """In words, with the unit in which it is shown: `state (KiB)`."""
    metric: str = ""
    """A metric of the table's own runs: their median. States (`state_size`) are shown in KiB of fp32, parameters
    (`num_parameters`) in thousands, memory (`peak_memory`) in GiB, `train_throughput` in K tokens/s, `train_tokens`
    in millions, `train_flops` in 10^15 and `train_seconds` in minutes; every other metric as it is stored."""
    experiment: str = ""
    """Another experiment, whose rows have the same labels."""
    column: str = ""
    """The column of that experiment's table."""
    note: str = ""
    """The quantity that the column measures, in words, where its label does not say it."""

    def check_options(self) -> None:
        if bool(self.metric) == bool(self.experiment) or bool(self.experiment) != bool(self.column):
            raise ValueError(f"costs: give {self.label!r} a metric, or an experiment and its column")


FigureKind = Literal["lines", "seeds", "costs", "curves", "cells", "kernels", "successes"]


class FigureSpec(Config):
    """The figure of an experiment, drawn from the same rows as the table."""

    kind: FigureKind
    """`lines`: a line for each row of the table over `x`; where the paper has numbers, a panel for each row.
    `seeds`: every seed of every cell, a line for each row of the table, with `costs` as columns beside it.
    `costs`: each cell against each of the `costs`, with the frontier.
    `curves`: the evaluations on the way of every seed of every cell, against each of the `costs`, which are metrics
    that are counted on the way (`train_seconds`, `train_flops`, `train_tokens`).
    `cells`: the table itself, its cells coloured and the best rows first.
    `kernels`: what `train.record_kernels` recorded, a panel for every row of the table, without other options.
    `successes`: share of the seeds that reach `select.success` at every value of `select.best_of`, a line for every
    cell of the table; the only options are labels."""
    x: str = ""
    """A dotted key (`model.d_model`), or `slice.length` for a part of the slice name, or `step`, or `column`, or a cost
    of the runs (`metric.state_size`), of which a cell has one point, at the median, in the unit that `costs` have. Only
    `lines` need it."""
    x_label: str = ""
    x_log2: bool = False
    trained: str = "task.length"
    """A dotted key: the length of training among the lengths of `slice.length`, where a grey line is drawn."""
    y: str = "accuracy"
    y_label: str = ""
    y_log10: bool = False
    split: Split = "test"
    percent: bool = True
    panels: str | None = None
    """A dotted key; the figure has one panel for each of its values."""
    order: Literal["best", "table"] = "best"
    """Which rows of `seeds` stand first where no paper has numbers: the best, or the first of the table, whose rows may
    be steps of a setting."""
    costs: tuple[CostSpec, ...] = ()
    columns: tuple[str, ...] = ()
    """The columns of the table that `seeds` draws, each a panel; empty: all."""

    def check_options(self) -> None:
        if self.kind == "lines" and not self.x:
            raise ValueError("x: a figure of kind lines needs one, such as slice.length")
        if self.kind in ("kernels", "successes") and self.x:
            raise ValueError(f"x: a figure of kind {self.kind} has none, got {self.x!r}")
        if self.kind in ("seeds", "costs", "curves", "cells") and self.x.startswith("metric."):
            raise ValueError(f"x: a figure of kind {self.kind} shows what its rows cost in `costs`, got {self.x!r}")
        if self.kind != "seeds" and self.order != "best":
            raise ValueError(f"order: only a figure of kind seeds has one, got {self.order!r} for kind {self.kind}")
        if self.kind != "seeds" and self.columns:
            raise ValueError(f"columns: only a figure of kind seeds has them, got some for kind {self.kind}")
        if self.kind == "costs" and not self.costs:
            raise ValueError(
                "costs: a figure of kind costs needs one, such as {metric: state_size, label: state (KiB)}"
            )
        if self.kind == "curves" and not (self.costs and all(cost.metric in SPENT for cost in self.costs)):
            raise ValueError(
                f"costs: a figure of kind curves needs one or more with a metric of {', '.join(SPENT)}, such as "
                "{metric: train_seconds, label: minutes}"
            )


class Source(Config):
    """Publication from which the paper's values are taken."""

    paper: str
    table: str | int | None = None
    figure: str | int | None = None
    section: str | None = None
