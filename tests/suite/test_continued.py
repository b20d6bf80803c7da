"""Rows of a run that is continued at another place say so, and no speed of one place passes for that of another."""

import subprocess

import pytest
import torch

from subquad.suite import environment
from subquad.suite.training import trainer
from tests.suite.toy import interrupted, make_run

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["code", "device_name"])
def test_a_run_that_is_continued_by_another_commit_or_device_says_so(tmp_path, monkeypatch, name):
    run, path = make_run(), tmp_path / "a.checkpoint"
    with interrupted(13) as stop:
        trainer.Trainer(run, CPU, checkpoint=path, stop=stop)()
    saved = torch.load(path, weights_only=True)
    assert (rates := saved["rates"][1])
    monkeypatch.setattr(trainer, name, lambda *device: "another")
    rows = trainer.Trainer(run, CPU, checkpoint=path)().rows
    (row,) = (row for row in rows if row["metric"] == "continued")
    key = {"code": "commit", "device_name": "device"}[name]
    assert row["error"] == f"trained up to step 13 by {key} {saved[key]}"
    samples = next(row["samples"] for row in rows if row["metric"] == "train_steps")
    (seconds,) = (row for row in rows if row["metric"] == "train_seconds" and row["step"] == 20)
    if name == "code":
        assert samples[: len(rates)] == rates
        assert seconds["value"] > 0
    else:
        assert not set(samples) & set(rates), "they are not of the device that the row names"
        assert (seconds["value"], seconds["error"]) == (None, row["error"])


def test_the_code_of_a_run_is_known_by_uncommitted_changes_too(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments], check=True)

    monkeypatch.delenv("SUBQUAD_COMMIT", raising=False)
    monkeypatch.setattr(environment, "REPOSITORY", tmp_path)
    commit = environment.commit.__wrapped__
    monkeypatch.setattr(environment, "commit", lambda: commit(tmp_path))
    (tmp_path / "model.py").write_text("x = 1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a model")
    found = []
    for text in ("x = 1", "x = 2", "x = 3"):
        (tmp_path / "model.py").write_text(text)
        found.append(environment.code.__wrapped__())
    assert len(set(found)) == 3
    assert {one.split()[0] for one in found} == {found[0]}
