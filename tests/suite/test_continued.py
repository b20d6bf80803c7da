"""Rows of a run that is continued at another place say so, and no speed of one place passes for that of another."""

import pytest
import torch

from subquad.suite.training import trainer
from tests.suite.toy import interrupted, make_run

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["commit", "device_name"])
def test_a_run_that_is_continued_by_another_commit_or_device_says_so(tmp_path, monkeypatch, name):
    run, path = make_run(), tmp_path / "a.checkpoint"
    with interrupted(13) as stop:
        trainer.Trainer(run, CPU, checkpoint=path, stop=stop)()
    saved = torch.load(path, weights_only=True)
    assert (rates := saved["rates"][1])
    monkeypatch.setattr(trainer, name, lambda *device: ("another", False) if name == "commit" else "another")
    rows = trainer.Trainer(run, CPU, checkpoint=path)().rows
    (row,) = (row for row in rows if row["metric"] == "continued")
    key = name.removesuffix("_name")
    assert row["error"] == f"trained up to step 13 by {key} {saved[key]}"
    samples = next(row["samples"] for row in rows if row["metric"] == "train_steps")
    (seconds,) = (row for row in rows if row["metric"] == "train_seconds" and row["step"] == 20)
    if name == "commit":
        assert samples[: len(rates)] == rates
        assert seconds["value"] > 0
    else:
        assert not set(samples) & set(rates), "they are not of the device that the row names"
        assert (seconds["value"], seconds["error"]) == (None, row["error"])
