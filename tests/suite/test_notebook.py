"""The functions for Python: the rows of the commands, and their sentences for faults."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from subquad import load, results, run
from subquad.suite.store import storage
from tests.stored import store

HOME = Path(__file__).resolve().parents[2]
FEW = {"train.steps": 2, "train.eval_every": 2, "train.batch_size": 4, "task.num_train": 8, "task.num_test": 8}
SMALL = {"model.name": "linear-attention", "model.d_model": 8}


def test_run_gives_the_rows_that_are_stored_and_repeats_nothing(tmp_path):
    first = run("quickstart", only=SMALL, set=FEW, seeds=[3, 7], results=tmp_path, quiet=True)
    assert sorted(set(first["seed"])) == [3, 7]
    assert set(first["train.steps"]) == {2}
    again = run("quickstart", only=SMALL, set=FEW, seeds=[3, 7], results=tmp_path, quiet=True)
    pd.testing.assert_frame_equal(first, again)
    path = storage.result_path(tmp_path, "quickstart", "paper", first["run_id"][0])
    stored = storage.load(path).to_pylist()
    frame = first[first["run_id"] == first["run_id"][0]]
    assert [row["value"] for row in stored] == [None if pd.isna(value) else value for value in frame["value"]]
    config = json.loads(stored[0]["config"])
    assert frame["model.d_model"].iloc[0] == config["model"]["d_model"] == 8


def test_results_are_filtered_by_columns_and_settings(tmp_path):
    for name, lr in (("gla", 0.5), ("gsa", 0.25)):
        rows = [{"metric": metric, "value": 1 / 3} for metric in ("loss", "accuracy")]
        store(tmp_path, rows, {"model": {"name": name}, "train": {"lr": lr}, "seed": 0}, experiment="quickstart")
    found = results("quickstart", results=tmp_path, only={"metric": "accuracy", "model.name": "gl*"})
    assert found[["model", "metric", "train.lr", "value"]].to_dict("records") == [
        {"model": "gla", "metric": "accuracy", "train.lr": 0.5, "value": 1 / 3}
    ]
    assert len(results(tmp_path / "quickstart", only={"train.lr": [0.5, 0.25]})) == 4
    for only, words in (
        ({"metrik": "loss"}, "did you mean 'metric'"),
        ({"metric": "acuracy"}, "did you mean 'accuracy'"),
        ({"model.nam": "gla"}, "did you mean 'model.name'"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            results("quickstart", results=tmp_path, only=only)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"only": "model.name=gla"}, "expected a dictionary"),
        ({"only": {"model.nam": "gla"}}, "did you mean 'model.name'"),
        ({"only": {"model.name": "glaa"}}, "did you mean 'gla'"),
        ({"set": {"train.stepz": 3}}, "did you mean 'steps'"),
        ({"set": {"train.lr": object()}}, "expected a number"),
        ({"set": {"lr": 0.1}}, "set={'lr': 0.1}: 'lr': a dotted key starts with task, model, train"),
        ({"set": {"model.name": "x*"}}, "set={'model.name': 'x*'}: no model fits"),
        ({"set": {"train.lr": float("nan")}}, "set={'train.lr': nan}: train: lr: expected a finite number"),
        ({"set": {"train.lr": "x", "task.length": "y"}}, "set={'train.lr': 'x'} set={'task.length': 'y'}: task mqar:"),
        (
            {"set": {"train.lr": [0.1, 0.2]}},
            "set={'train.lr': [0.1, 0.2]}: train: lr: Input should be a valid number, got [0.1, 0.2]; for a run with "
            "each value call `run` once for each",
        ),
        ({"scale": "huge"}, "unknown scale 'huge'"),
        ({"seeds": "many"}, "expected a number of seeds"),
        ({"device": "tpu"}, "--device"),
        ({"jobs": True}, "--jobs True: expected a whole number"),
        ({"threads": True}, "--threads True: expected a whole number"),
        ({"jobs": 0}, "--jobs 0: expected a whole number"),
        ({"jobs": "many"}, "--jobs 'many': expected a whole number"),
        ({"log": ["tensorbord"]}, "did you mean 'tensorboard'"),
        ({"log": "tensorbord"}, "did you mean 'tensorboard'"),
        ({"plugins": "none.py"}, "none.py: no such file"),
        ({"results": None}, "results=None: name a folder"),
        ({"results": ""}, "the name of a folder is empty"),
        ({"only": {"model.name": []}}, "only={'model.name': []}: the list is empty"),
        ({"scale": 3}, "scale=3: expected a word"),
        ({"device": 3}, "device=3: expected a word"),
        ({"data": ""}, "data='': expected a path"),
        ({"data": 3}, "data=3: expected a path"),
        ({"data": "."}, "no task of quickstart reads data"),
        ({"results": 3}, "results=3: expected the name of a folder"),
        ({"plugins": 3}, "plugins=3: expected a text, or a list of texts"),
        ({"log": 3}, "log=3: expected a text, or a list of texts"),
        ({"keep_weights": "no"}, "keep_weights='no': expected True or False"),
    ],
)
def test_a_fault_is_an_exception_with_the_sentence_of_the_command(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        run("quickstart", **{"results": tmp_path, "quiet": True} | arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: run(["quickstart"]), "experiment ['quickstart']: expected a text; give each by itself"),
        (lambda: run(3), "experiment 3: expected a text"),
        (lambda: results(["quickstart"]), "name ['quickstart']: expected a text; give each by itself"),
        (lambda: results("quickstart", results=3), "results=3: expected the name of a folder"),
        (lambda: results("quickstart", results="/no/such"), "results='/no/such': there is no such folder"),
        (lambda: load("abc", results="/no/such"), "results='/no/such': there is no such folder"),
        (lambda: load(pd.Series(["ab"])), "expected a text"),
        (lambda: load("ab", device=3), "device=3: expected a word"),
    ],
)
def test_an_argument_of_another_type_is_named(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_load_of_a_run_without_weights_says_what_to_do(tmp_path):
    path = store(tmp_path, [{"metric": "run"}], experiment="quickstart")
    with pytest.raises(ValueError, match="kept no weights"):
        load(path.stem[:4], results=tmp_path)


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "reference").symlink_to(HOME / "results" / "reference")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", (HOME / "docs" / "notebook.md").read_text(), re.DOTALL):
        exec(code, names)
    assert names["table"]["count"].tolist() == [2, 2]
    assert names["curves"]["model.name"].unique().tolist() == ["gla"]
    assert set(names["published"]["experiment"]) == {"h3/table2"}
    assert names["logits"].shape[0] == 4
