"""Types of options with the bounds between which they can work, shared by all configurations.

A bound is where a value stops having a meaning, or can no longer be held by the number types of torch and parquet. It
is not where a machine becomes too small, because the same grid may run on a larger one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LARGEST = 2**31 - 1
"""Positions, tokens and row numbers are 32-bit integers."""

Size = Annotated[int, Field(ge=1, le=LARGEST)]
"""A length, a number of rows, tokens or classes."""
Count = Annotated[int, Field(ge=0, le=LARGEST)]
"""A number of things of which there may be none."""
Total = Annotated[int, Field(ge=1, le=2**53)]
"""A number of tokens over many rows."""
Steps = Annotated[int, Field(ge=1, le=2**53)]
"""A number of steps or epochs."""
Layers = Annotated[int, Field(ge=1, le=4096)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""A width, a number of heads or of states: one row of the weights."""
Factor = Annotated[int, Field(ge=1, le=1024)]
"""A width divided by a smaller one."""
Ratio = Annotated[float, Field(gt=0, le=1024)]
"""A width divided by another one."""
Positive = Annotated[float, Field(gt=0, le=1e6)]
"""A learning rate, a step size, a standard deviation."""
NonNegative = Annotated[float, Field(ge=0, le=1e6)]
"""A penalty, or a rate that may be zero."""
Epsilon = Annotated[float, Field(gt=0, le=1)]
"""Constant added to a denominator, against a division by zero."""
Seconds = Annotated[float, Field(gt=0, le=366 * 86400)]
"""A time to train, up to a year."""
Operations = Annotated[float, Field(gt=0, le=1e36)]
"""A number of floating-point operations."""
Score = Annotated[float, Field(ge=-1e6, le=1e6)]
"""A value of a metric."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A dropout, or the memory of a moving average."""
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
