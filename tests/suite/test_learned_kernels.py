"""Recording what the layers convolve with: it belongs to the run, changes none of its numbers and survives a stop."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from subquad.suite.runner import execute
from subquad.suite.store import storage
from subquad.suite.training.trainer import Trainer
from tests.runs import one_run
from tests.suite.toy import TASKS, interrupted

CPU = torch.device("cpu")
CURVES = {"kernel", "eigenvalue_real", "eigenvalue_imag"}
PROBE = {"lags": 4, "points": 2, "channels": 3, "near": 2}


def make(probe=PROBE, model="dss-softmax", **train):
    return one_run(
        {"name": "parity"},
        {"name": model, "d_model": 8, "num_layers": 2, "d_state": 4}
        if model != "attention"
        else {"name": model, "d_model": 8, "num_layers": 2, "num_heads": 1},
        {"epochs": 2, "batch_size": 16, "lr": 0.01, "record_kernels": probe, **train},
        tasks=TASKS,
    )


@functools.cache
def trained(probe=True, model="dss-softmax"):
    """The rows of a run that nothing interrupts."""
    return Trainer(make(PROBE if probe else None, model), CPU)().rows


def recorded(rows):
    """The recorded rows of kernels and eigenvalues, as tuples."""
    keys = ("metric", "slice", "step", "value", "samples", "status")
    found = [row for row in rows if row["metric"].startswith(("kernel", "eigenvalue"))]
    return [tuple(row.get(key) for key in keys) for row in found]


def learning(rows):
    """The losses and accuracies of the training."""
    return [(r["metric"], r["split"], r["step"], r["value"]) for r in rows if r["metric"] in ("loss", "accuracy")]


def test_a_run_that_records_nothing_keeps_the_id_it_had_before_there_was_any_recording():
    assert "record_kernels" not in make(None).resolved["train"]
    assert make().resolved["train"]["record_kernels"] == PROBE
    assert len({make(probe).run_id for probe in (None, PROBE, {}, {**PROBE, "near": 3})}) == 4


def test_recording_changes_nothing_that_is_learnt():
    without = trained(probe=False)
    assert learning(trained()) == learning(without)
    assert recorded(without) == []


def test_step_sizes_are_recorded_before_and_after_training_where_there_are_any():
    found = {(r["metric"], r["slice"]): r["value"] for r in trained() if r["metric"].startswith("log_dt")}
    assert set(found) == {(metric, at) for metric in ("log_dt_median", "log_dt_max") for at in ("", "at=start")}
    # they start log-uniform between 0.001 and 0.1, and are learnt
    assert -6.91 < found["log_dt_median", "at=start"] < found["log_dt_max", "at=start"] < -2.30
    assert found["log_dt_max", ""] != found["log_dt_max", "at=start"]
    assert not [r for r in trained(model="attention") if r["metric"].startswith("log_dt")]


def test_there_are_rows_from_before_the_first_step_and_from_after_the_last():
    rows = recorded(trained())
    before = {metric for metric, part, step, *_ in rows if part.startswith("at=start") and step == 0}
    after = [(metric, part) for metric, part, step, *_ in rows if not part.startswith("at=start") and step == 10]
    assert len(rows) == sum(row[2] in (0, 10) for row in rows)
    assert before == {
        "eigenvalue_real",
        "eigenvalue_imag",
        "kernel_peak_p95",
        "kernels_near",
        "kernels_far",
        "eigenvalue_max",
    }
    assert [part for metric, part in after if metric == "kernel"] == [
        f"layer={i},filter=ssm,channel={c},span=2" for i in (0, 1) for c in (0, 2, 5)
    ]
    changed = {part: samples for metric, part, _, _, samples, _ in rows if metric == "eigenvalue_real"}
    assert changed["layer=0,filter=ssm"] != changed["at=start,layer=0,filter=ssm"]


def test_what_is_recorded_is_of_the_weights_that_the_test_split_saw():
    trainer = Trainer(make(keep="best", keep_metric="loss", eval_every=1), CPU)
    rows = recorded(trainer().rows)
    kept = {part: samples for metric, part, _, _, samples, _ in rows if metric == "eigenvalue_real"}
    weights = trainer.selection.weights
    assert weights is not None
    for layer in (0, 1):
        assert kept[f"layer={layer},filter=ssm"] == weights[f"layers.{layer}.mixer.ssm.Lambda_re"].tolist()


@pytest.mark.parametrize("stop_at", [1, 7])
def test_an_interrupted_run_records_what_an_uninterrupted_one_does(tmp_path, stop_at):
    path = tmp_path / "a.checkpoint"
    with interrupted(stop_at) as stop:
        Trainer(make(), CPU, checkpoint=path, stop=stop)()
    assert recorded(Trainer(make(), CPU, checkpoint=path)().rows) == recorded(trained())


def test_a_model_without_fixed_filters_trains_and_says_that_it_has_none(tmp_path):
    assert execute(make(model="attention"), tmp_path, CPU).status == "ok"
    frame = storage.read(storage.files([tmp_path], "toy/test"))
    (row,) = frame[frame["metric"] == "kernel"].to_dict("records")
    assert (row["status"], row["error"]) == ("n/a", "no layer of this model convolves with a fixed filter")
    assert json.loads(row["config"])["train"]["record_kernels"] == PROBE
