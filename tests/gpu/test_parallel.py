"""Two processes on a GPU each, which talk through NCCL, give the values of one process.

In float64 they are held to one process on a CPU. A single process on a GPU records its steps, and a recorded AdamW
reads its rate as float32, which moves a loss by up to 2e-9.
"""

import pytest
import torch

from subquad.suite.store import storage
from subquad.suite.training.trainer import Trainer
from tests.gpu.test_training import losses, model_run
from tests.suite.test_parallel import DOUBLE, TASK, TRAIN, assert_same_but_for_rounding, together, two_processes
from tests.suite.test_trainer import train
from tests.suite.toy import make_run, numbers

FIRST = torch.device("cuda", 0)
ROUNDED_RATE = 1e-7
"""Relative: float32 has 6e-8."""
HOW = pytest.mark.parametrize("sharded", [pytest.param(False, id="DDP"), pytest.param(True, id="FSDP")])

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    # every test takes both GPUs, and its processes wait for each other
    pytest.mark.xdist_group("two GPUs"),
]


@HOW
def test_a_whole_run_in_float64_gives_the_values_of_one_process(tmp_path, sharded):
    whole = make_run(TASK, DOUBLE, TRAIN)
    expected = train(whole).rows
    with two_processes(tmp_path, FIRST, sharded=sharded):
        for micro_batch_size in (None, 3):
            run = make_run(TASK, DOUBLE, {**TRAIN, "micro_batch_size": micro_batch_size})
            assert_same_but_for_rounding(together(run, tmp_path, FIRST).rows, expected)


@HOW
def test_an_interrupted_run_continues_in_two_processes_and_in_one(tmp_path, sharded):
    run = make_run(TASK, DOUBLE, TRAIN)
    expected = train(run).rows
    path = storage.checkpoint_path(tmp_path, run.experiment, run.scale, run.run_id)
    with two_processes(tmp_path, FIRST, sharded=sharded):
        calls = iter(range(1000))
        with pytest.raises(KeyboardInterrupt):
            together(run, tmp_path, FIRST, stop=lambda: next(calls) >= 13)
        kept = path.read_bytes()
        assert_same_but_for_rounding(together(run, tmp_path, FIRST).rows, expected)
        path.write_bytes(kept)
    assert_same_but_for_rounding(Trainer(run, FIRST, checkpoint=path)().rows, expected, least=ROUNDED_RATE)


@HOW
@pytest.mark.parametrize("name", ["mamba", "gla", "h3", "attention"])
def test_models_on_triton_kernels_follow_one_process(tmp_path, name, sharded):
    run = model_run(name, steps=20)
    expected = Trainer(run, FIRST)().rows
    with two_processes(tmp_path, FIRST, sharded=sharded):
        rows = together(run, tmp_path, FIRST).rows
    assert len(numbers(rows)) == len(numbers(expected))
    assert torch.allclose(losses(rows), losses(expected), rtol=1e-5)
