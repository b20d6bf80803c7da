"""Floors of stored timings, where products of float32 matrices may run on matrix units.

Until 2026-11-29 a benchmark took the rate of plain float32 products for the best that a device can do. Kernels that
split float32 into three TF32 parts are faster and as exact, so that rows had times below their floor. Stored rows are
never edited; these floors are computed again from the bytes, operations and rates that lie beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

TF32_PRODUCTS = 3
"""Products of TF32 parts that keep the digits of a float32 product."""
TF32_OF_BFLOAT16 = 0.5
"""Rate of TF32 products over that of bfloat16, on matrix units of NVIDIA GPUs since Ampere, for rows without it."""


def with_floors(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of benchmarks with floors of float32 products that no implementation passes.

    A floor is computed again where it is that of plain float32 products; all other rows stay as they are.
    """
    old = frame[(frame["metric"] == "floor_time") & (frame["precision"] == "float32") & frame["value"].notna()]
    if old.empty:
        return frame
    rates = _rates(frame[frame["run_id"].isin(set(old["run_id"]))])
    new = {index: _floor(row, rates.get(row["run_id"], {})) for index, row in old.to_dict("index").items()}
    values = frame["value"].copy()
    values.update(pd.Series({index: value for index, value in new.items() if value is not None}, dtype=float))
    return frame.assign(value=values)


def _rates(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Run id to the measured rates of its device: `copy`, and a dtype for products."""
    found: dict[str, dict[str, float]] = {}
    for row in frame[frame["metric"].isin(["copy_bandwidth", "matmul_rate"])].to_dict("records"):
        name = "copy" if row["metric"] == "copy_bandwidth" else json.loads(row["config"])["dtype"]
        found.setdefault(row["run_id"], {})[name] = row["value"]
    return found


def _floor(row: Mapping[Any, Any], rates: Mapping[str, float]) -> float | None:
    """The floor of a row in ms; None where it is not that of plain float32 products, or a rate is not known."""
    cost = json.loads(row["config"])
    if not {"copy", "bfloat16", "float32"} <= rates.keys() or "tf32" in rates or not cost.get("num_flops"):
        return None
    if not math.isclose(row["value"], 1e3 * cost["num_flops"] / rates["float32"], rel_tol=1e-6):
        return None
    exact = rates["bfloat16"] * TF32_OF_BFLOAT16 / TF32_PRODUCTS
    seconds = cost["num_flops"] / max(rates["float32"], exact)
    return 1e3 * max(seconds, cost["num_bytes"] / rates["copy"])
