"""The record of what every operator, model and task computes, beside the version it says it has.

`versions.json` holds one entry a component. An entry is a version and what the component computed when that version
was recorded:

- `digests`: SHA-256 of integer results (the rows of a task). They must agree exactly.
- `values`: a signature [r, p_1, p_2] of every floating result x, flattened to n elements: r is its root mean square,
  and p_j = sum_i s_j[i] x[i] / sqrt(n) with fixed random signs s_j. Two signatures agree where each of their numbers
  differs by at most `TOLERANCE` times r. Rounding in float64 is far below that, and a change in what is computed is
  far above it. Parameters and gradients are `balanced` first, so that a small tensor counts as much as a large one.
  A metric is its (sum, count), compared in the same way.

A result that differs under an unchanged version is an error: rows with the old results would silently be taken for
rows with the new ones. Raise the version, then run

    python -m tests.laws.versions --update

which rewrites the entries whose version was raised, adds new components and new cases, and refuses everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from subquad.kernels import OPERATORS
from subquad.kernels.versions import VERSIONS
from subquad.models import MODELS
from subquad.models.backbone import BackboneConfig
from subquad.models.linear_attention import LinearAttentionConfig
from subquad.suite.contracts import IGNORE
from subquad.suite.laws.tasks import digest, everything
from subquad.tasks import TASKS
from tests.laws.calls import OPERATOR_CALLS, run
from tests.laws.draw import Draw, wide
from tests.laws.instances import instances
from tests.laws.networks import BACKBONE, Network, build, logits_and_gradients, networks

PATH = Path(__file__).with_name("versions.json")
TOLERANCE = 1e-6
"""Largest difference of two signatures, relative to the root mean square of the result."""

KEYS = (
    *(f"operator/{name}" for name in OPERATORS),
    "model/backbone",
    *(f"model/{name}" for name in MODELS),
    *(f"task/{name}" for name in TASKS),
)


@dataclass(frozen=True)
class Entry:
    """Results of a component, and its version."""

    version: int
    digests: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)


def signature(parts: Sequence[Tensor]) -> list[float]:
    """[r, p_1, p_2] of tensors laid end to end (see the top of this file), with twelve digits."""
    x = np.concatenate([wide(part.detach()).reshape(-1).numpy() for part in parts])
    signs = [1.0 - 2.0 * (np.random.PCG64(seed).random_raw(len(x)) & np.uint64(1)) for seed in (1, 2)]
    numbers = [np.sqrt(np.mean(x**2)), *(s @ x / np.sqrt(len(x)) for s in signs)]
    assert np.isfinite(numbers).all(), "a result is NaN or infinite"
    return [float(f"{number:.12g}") for number in numbers]


def balanced(parts: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of very different sizes made comparable: each over its root mean square, then the logarithms of those.

    A tensor that is zero up to rounding beside the largest one is divided by what the largest one is divided by.
    """
    sizes = torch.stack([wide(part.detach()).square().mean().sqrt() for part in parts])
    sizes = torch.where(sizes > 1e-9 * sizes.max(), sizes, sizes.max())
    return [*(wide(part.detach()) / size for part, size in zip(parts, sizes, strict=True)), sizes.log()]


def agree(first: list[float], second: list[float]) -> bool:
    """Whether two signatures belong to the same result, up to rounding."""
    return len(first) == len(second) and all(
        abs(a - b) <= TOLERANCE * abs(first[0]) for a, b in zip(first, second, strict=True)
    )


def of_operator(name: str) -> Entry:
    """Outputs and gradients of the PyTorch backend and of the reference, in float64."""
    values = {}
    for call in OPERATOR_CALLS[name](Draw(zlib.crc32(name.encode()))):
        for kind, implementation in call.implementations.items():
            outputs, gradients = run(call, implementation)
            values[f"{call.case}: {kind}, outputs"] = signature(outputs)
            if gradients:
                values[f"{call.case}: {kind}, gradients"] = signature(balanced(gradients))
    # a step is part of its operator
    return Entry(VERSIONS[name.removesuffix("_step")], values=values)


def of_networks(config: type[BackboneConfig], cases: Sequence[Network], **options: Any) -> Entry:
    """Weights at the start, and logits and gradients of weights with a wider spread, which every path then counts in.

    options: of the configuration, in place of its defaults.
    """
    values = {}
    for network in cases:
        model = build(config, network, **options)
        values[f"{network.case}: start"] = signature(balanced(list(model.parameters())))
        model = build(config, network, **{"init_std": 0.2, **options})
        logits, gradients = logits_and_gradients(model, network)
        values[f"{network.case}: logits"] = signature([logits])
        values[f"{network.case}: gradients"] = signature(balanced(gradients))
    return Entry(config.version, values=values)


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """A folder for the files of a task; the cache of data lies beside it meanwhile."""
    with tempfile.TemporaryDirectory() as place, mock.patch.dict(os.environ, {"SUBQUAD_DATA": f"{place}/cache"}):
        folder = Path(place) / "files"
        folder.mkdir()
        yield folder


def of_task(name: str) -> Entry:
    """Rows of all splits of small instances, and their metrics for fixed logits."""
    digests, values = {}, {}
    with empty_folder() as folder:
        for case, task in instances(name, folder):
            segments = everything(task)
            digests[case] = digest(segments)
            signals = [segment.inputs for segment in segments if segment.inputs.is_floating_point()]
            if signals:
                values[f"{case}: signals"] = signature(signals)
            for metric, pair in metrics_of(task).items():
                values[f"{case}: {metric}"] = [float(f"{number:.12g}") for number in pair]
    return Entry(TASKS.load(name).version, digests, values)


def metrics_of(task: Any) -> dict[str, tuple[float, float]]:
    """The (sum, count) of every metric for fixed logits and targets, every fourth of which has no label."""
    draw, num_classes = Draw(13), task.spec.num_classes
    targets = draw.integers(num_classes, 4, 8)
    targets[:, ::4] = IGNORE
    logits = draw(4, 8, num_classes, low=-3.0, high=3.0)
    metrics = {
        **task.score(logits, targets),
        **task.score_batch(logits, targets),
    }
    return {name: (float(total), float(count)) for name, (total, count) in metrics.items()}


def compute(key: str) -> Entry:
    """The results that a component computes now."""
    kind, _, name = key.partition("/")
    if kind == "operator":
        return of_operator(name)
    if kind == "task":
        return of_task(name)
    if name == "backbone":
        return of_networks(LinearAttentionConfig, BACKBONE)
    return of_networks(MODELS.load(name), networks(name))


def results(entry: Entry) -> dict[str, str | list[float]]:
    """Digests and values together, by name."""
    return {**entry.digests, **entry.values}


def changes(recorded: Entry, found: Entry) -> list[str]:
    """The names of results that both entries have and that differ."""
    before, after = results(recorded), results(found)

    def same(name: str) -> bool:
        first, second = before[name], after[name]
        if isinstance(first, str) or isinstance(second, str):
            return first == second
        return agree(first, second)

    return sorted(name for name in before.keys() & after.keys() if not same(name))


def problem(key: str, recorded: Entry | None, found: Entry) -> str | None:
    """The reason why an entry of the record differs from the result now, and what to do; None if they agree."""
    update = "python -m tests.laws.versions --update"
    if recorded is None:
        return f"{key}: has no entry in {PATH.name}; run `{update}`."
    if found.version < recorded.version:
        return f"{key}: its version went from {recorded.version} down to {found.version}; a version is only raised."
    if found.version > recorded.version:
        return f"{key}: its version was raised from {recorded.version} to {found.version}; run `{update}`."
    changed = changes(recorded, found)
    if not changed:
        # cases that came or went are no change of what is computed
        other = sorted(results(recorded).keys() ^ results(found).keys())
        return f"{key}: the cases {'; '.join(other)} are new or gone; run `{update}`." if other else None
    return (
        f"{key}: computes other numbers than recorded for version {found.version}: {'; '.join(changed)}. If this is "
        f"meant, raise its version, say in CHANGELOG.md what moves and run `{update}`; if not, undo the change."
    )


def update(recorded: dict[str, Entry], found: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """The new record and the reasons why entries were not rewritten.

    An entry is rewritten where its version was raised. New components and new cases are added, and those that no
    longer exist go. A result that changed under an unchanged version is refused.
    """
    new, refused = {}, []
    for key, entry in found.items():
        before = recorded.get(key)
        if before is None or entry.version > before.version:
            new[key] = entry
        elif entry.version == before.version and not changes(before, entry):
            new[key] = merged(before, entry)
        else:
            new[key] = before
            refused.append(problem(key, before, entry) or key)
    return new, refused


def merged(recorded: Entry, found: Entry) -> Entry:
    """The cases of found, with the recorded digits of those that were recorded before."""
    return Entry(
        found.version,
        {name: recorded.digests.get(name, value) for name, value in found.digests.items()},
        {name: recorded.values.get(name, value) for name, value in found.values.items()},
    )


def read(path: Path = PATH) -> dict[str, Entry]:
    """The record in a file, by default the committed one; empty where there is no file."""
    if not path.exists():
        return {}
    return {key: Entry(**values) for key, values in json.loads(path.read_text()).items()}


def write(record: dict[str, Entry], path: Path = PATH) -> None:
    """Writes the record with one result a line, so that a difference names what has changed."""
    lines = []
    for key in sorted(record):
        parts = [f'"version": {record[key].version}']
        for kind in ("digests", "values"):
            named = asdict(record[key])[kind]
            if named:
                inner = ",\n".join(f"   {json.dumps(name)}: {json.dumps(named[name])}" for name in sorted(named))
                parts.append(f'"{kind}": {{\n{inner}\n  }}')
        lines.append(f' "{key}": {{\n  ' + ",\n  ".join(parts) + "\n }")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare what is computed with versions.json, or rewrite it.")
    parser.add_argument("--update", action="store_true", help="rewrite the entries whose version was raised")
    wanted = parser.parse_args(arguments)
    recorded, found = read(), {key: compute(key) for key in KEYS}
    if wanted.update:
        new, reasons = update(recorded, found)
        write(new)
    else:
        reasons = [reason for key in KEYS if (reason := problem(key, recorded.get(key), found[key]))]
    for reason in reasons:
        print(reason)
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
