"""Device hours that runs will take, from the stored durations of runs like them."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.runs import Run
from suite.store import storage

Key = tuple[str, ...]


def _keys(scale: str, resolved: Mapping[str, Any]) -> Iterator[Key]:
    """From the nearest to the farthest: same settings but the seed, then same scale, task and model."""
    settings = {name: value for name, value in resolved.items() if name not in ("seed", "data")}
    yield "settings", json.dumps(settings, sort_keys=True)
    names = (resolved.get(section, {}).get("name", "") for section in ("task", "model"))
    yield "names", scale, *names


def estimate(runs: Sequence[Run], files: Sequence[Path]) -> list[str]:
    """Lines that say how long the runs will take, one for each kind of device among the stored rows of `files`.

    The estimate of a run is the median duration of stored runs with its settings and another seed, or else of stored
    runs of its scale, task and model. The duration of a run that shared its device with others counts by its share.
    """
    if not runs:
        return []
    stored: dict[str, dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in files:
        columns = ["metric", "status", "scale", "config", "device", "duration_s"]
        for row in storage.load(path, columns).to_pylist():
            if (row["metric"], row["status"]) != ("run", "ok"):
                continue
            device, _, shared = row["device"].partition(", ")
            sharing = re.match(r"(\d+) runs", shared)
            share_s = row["duration_s"] / (int(sharing[1]) if sharing else 1)
            for key in _keys(row["scale"], json.loads(row["config"])):
                stored[device][key].append(share_s)
    lines = []
    for device, durations in sorted(stored.items()):
        found = []
        for run in runs:
            known = next((durations[key] for key in _keys(run.scale, run.resolved) if key in durations), None)
            if known:
                found.append(statistics.median(known))
        if found:
            rest = f"; {len(runs) - len(found)} without a like run" if len(found) < len(runs) else ""
            lines.append(f"about {sum(found) / 3600:.2g} hours of {device} for {len(found)} runs to do{rest}")
    return lines
