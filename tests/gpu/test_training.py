"""The training step recorded as a CUDA graph: equal to the direct one, repeatable and resumable, for every model."""

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.executors.local import run_all
from subquad.suite.training.trainer import Trainer
from tests.runs import one_run
from tests.suite.test_workers import Recording
from tests.suite.toy import make_run, numbers


def losses(rows):
    return torch.tensor([row["value"] for row in rows if row["metric"] == "loss" and row["split"] == "train"])


@pytest.fixture
def gpu():
    return torch.device("cuda")


def model_run(name, seed=0, **train):
    values = {"steps": 12, "batch_size": 8, "lr": 1e-3, "eval_every": 3, **train}
    task = {"name": "mqar", "length": 64, "num_kv_pairs": 4, "vocab_size": 64, "num_train": 60, "num_test": 20}
    return one_run(task, {"name": name, "d_model": 32, "num_layers": 2}, values, seed)


@pytest.mark.parametrize("name", list(MODELS))
def test_recorded_training_equals_training_on_the_cpu(gpu, name):
    run = model_run(name)
    on_gpu, on_cpu = Trainer(run, gpu)().rows, Trainer(run, torch.device("cpu"))().rows
    assert torch.isfinite(losses(on_gpu)).all()
    assert torch.allclose(losses(on_gpu), losses(on_cpu), rtol=2e-3)


@pytest.mark.parametrize("name", list(MODELS))
def test_deterministic_training_is_bitwise_repeatable(gpu, name):
    run = model_run(name, deterministic=True)
    assert numbers(Trainer(run, gpu)().rows) == numbers(Trainer(run, gpu)().rows)


@pytest.mark.parametrize("name", list(MODELS))
def test_bf16_training_follows_fp32(gpu, name):
    exact, rounded = Trainer(model_run(name), gpu)().rows, Trainer(model_run(name, precision="bf16"), gpu)().rows
    assert torch.allclose(losses(exact), losses(rounded), rtol=2e-2)
    # equal losses would mean that nothing was rounded
    assert not torch.equal(losses(exact), losses(rounded))


@pytest.mark.parametrize("task", [{}, {"endless": True}])
@pytest.mark.parametrize("stop_at", [1, 7, 13])
def test_an_interrupted_run_ends_with_the_results_of_an_uninterrupted_one(gpu, tmp_path, task, stop_at):
    options = {"schedule": "cosine", "warmup_steps": 3, "keep": "best", "eval_every": 1, "clip": 0.5}
    options |= {"epoch_steps": 5} if task else {}
    run = make_run(task=task, train=options)
    whole = Trainer(run, gpu)()
    calls = iter(range(1000))
    path = tmp_path / "a.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        Trainer(run, gpu, checkpoint=path, stop=lambda: next(calls) >= stop_at)()
    torch.manual_seed(99)
    assert numbers(Trainer(run, gpu, checkpoint=path)().rows) == numbers(whole.rows)


def test_recording_leaves_no_trace(gpu):
    """A run that records every batch shape again still uses each row once and each random number once."""
    run = make_run(train={"batch_size": 64, "epochs": 2, "eval_every": 1})
    short = make_run(train={"batch_size": 64, "epochs": 2, "eval_every": 1, "eval_batch_size": 7})
    assert torch.allclose(losses(Trainer(run, gpu)().rows), losses(Trainer(short, gpu)().rows), rtol=0, atol=0)


def test_worker_processes_share_the_gpu(tmp_path):
    runs = [model_run("gla", seed=seed) for seed in range(3)]
    ended = run_all(runs, tmp_path, torch.device("cuda", 0), Recording(), jobs=2)
    assert [finished.error for finished in ended] == [""] * 3
