"""The model card of pushed weights: what they are, how they were trained and tested, and how to load them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from subquad.suite.settings.grid import iter_keys

LIBRARY = "subquad"
COLUMNS = ("metric", "split", "slice", "step", "value", "unit", "device", "torch", "commit", "dirty", "stand_in")
"""Columns of the rows of a run that a card is made of."""


def model_card(name: str, resolved: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], file: str) -> str:
    """The text of a card in Markdown, with the head in YAML by which a hub finds a model.

    name: that of the repository. resolved: the settings of the run. rows: those that are stored of it, or none.
    file: name of the file of weights.
    """
    task, model = resolved["task"]["name"], resolved["model"]["name"]
    tested = [row for row in rows if row["split"] == "test" and not row["slice"] and row["value"] is not None]
    head: dict[str, Any] = {"library_name": LIBRARY, "tags": [LIBRARY, model, task]}
    if tested:
        metrics = [{"type": row["metric"], "value": row["value"]} for row in tested]
        measured = {"task": {"type": "other"}, "dataset": {"type": task, "name": task}, "metrics": metrics}
        head["model-index"] = [{"name": name.rpartition("/")[2], "results": [measured]}]
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---", f"# {model} on {task}", _origin(resolved, rows)]
    if tested:
        lines = [f"| {row['metric']} | {row['value']:.6g} | {row['unit']} | {row['step']} |" for row in tested]
        parts.append("\n".join(["| on the test rows | value | unit | steps |", "| --- | ---: | --- | ---: |", *lines]))
    parts.append(_use(name, resolved, file))
    settings = {key: json.dumps(value) for key, value in iter_keys(dict(resolved))}
    parts.append("## Settings\n\n" + "\n".join(f"- `{key}` = `{value}`" for key, value in settings.items()))
    return "\n\n".join(parts) + "\n"


def _origin(resolved: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    text = f"A `{resolved['model']['name']}` that Subquad, a benchmark suite for sequence models, has trained"
    if not rows:
        return f"{text}. No rows are stored of the run, so nothing is known of its origin and its tests."
    row = rows[0]
    commit = f"commit {row['commit'][:10]}" if row["commit"] else "an unknown commit"
    text += f" on {row['device']} with torch {row['torch']}, at {commit}"
    text += " with uncommitted changes" if row["dirty"] else ""
    return f"{text}." + (f" The data stand in for others: {row['stand_in']}." if row["stand_in"] else "")


def _use(name: str, resolved: Mapping[str, Any], file: str) -> str:
    plugins = resolved.get("plugins", {})
    words = {kind: identity.partition(" ")[0] for kind, identity in plugins.items()}
    given = "".join(f', plugins="{module}.py"' for module in dict.fromkeys(words.values()))
    needs = "".join(f"\n\nThe {kind} is in the plugin `{plugins[kind]}`, which is not part of it." for kind in words)
    return (
        "## Use\n\n```python\nfrom huggingface_hub import hf_hub_download\nfrom subquad import load\n\n"
        f'model, task = load(hf_hub_download("{name}", "{file}"){given})\n```{needs}'
    )
