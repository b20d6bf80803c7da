"""Units in which stored values are shown, their factors, and the number of digits."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = {"bytes": (2.0**-30, "GiB"), "tokens/s": (1e-3, "K tokens/s")}
"""Stored units that tables and figures show in larger ones: stored unit to (factor, shown unit)."""


def shown(value: float, unit: str, percent: bool) -> float:
    """A stored value in the unit it is shown in.

    percent: whether fractions are shown as percentages.
    """
    return value * (100 if percent and unit == "fraction" else SHOWN.get(unit, (1.0, unit))[0])


def shared_unit(units: Iterable[str]) -> str:
    """The shown unit that all stored units have in common; empty where there are several, or none, or fractions."""
    distinct = set(units)
    if len(distinct) != 1:
        return ""
    unit = distinct.pop()
    return "" if unit == "fraction" else SHOWN.get(unit, (1.0, unit))[1]


def fixed(value: float, decimals: int, sign: bool = False) -> str:
    """A number with a fixed count of decimals and no negative zero."""
    text = f"{value:+.{decimals}f}" if sign else f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.replace("-", "+") if sign else text.lstrip("-")
    return text


def amount(value: float, binary: bool = False) -> str:
    """Three significant digits and a prefix: `74.1K`, `1.25M`; `2.50Gi` where binary."""
    base = 1024 if binary else 1000
    prefixes = ("", "Ki", "Mi", "Gi", "Ti") if binary else ("", "K", "M", "G", "T")
    power = 0
    while abs(value) >= base * 0.9995 and power < len(prefixes) - 1:
        value /= base
        power += 1
    decimals = 0 if power == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f}{prefixes[power]}"
