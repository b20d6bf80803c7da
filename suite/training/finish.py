"""Rows about a network that has been trained and tested: what it generates, its size, its memory and its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from subquad.suite.generate import generate
from subquad.suite.metrics import unit_of
from subquad.suite.model import Model
from subquad.suite.rng import torch_seed
from subquad.suite.training import measure
from subquad.suite.training.capture import record
from subquad.suite.training.data import chunks
from subquad.suite.training.numerics import autocast
from subquad.suite.training.run import TrainingRun

Row = dict[str, Any]


def generated_rows(
    model: Model, run: TrainingRun, device: torch.device, heed_stop: Callable[[], None]
) -> Iterator[Row]:
    """The verdict of the judge of a task on sequences that the model makes, where the task asks for them.

    heed_stop: called now and then.
    """
    wanted = run.task.generation()
    if wanted is None:
        return
    parts = []
    try:
        with autocast(run.train.precision, device):
            for start, stop in chunks(wanted.num_rows, run.train.eval_batch_size or run.train.batch_size):
                made = generate(
                    model,
                    torch.full((stop - start, 1), wanted.first_token, device=device),
                    run.task.spec.max_length,
                    temperature=wanted.temperature,
                    seed=torch_seed(run.seed, "generate", start),
                    callback=lambda _: heed_stop(),
                    every=256,
                )
                parts.append(made)
    except ValueError as error:
        # a model that reads the future has no step
        why = {"status": "n/a", "error": str(error)}
        yield {"metric": "generation", "unit": "", "value": None, "split": "generated", **why}
        return
    for split, metric, value in run.task.judge(torch.cat(parts), device):
        yield {"metric": metric, "unit": unit_of(metric), "value": value, "split": split}


def measured_rows(
    model: Model,
    num_parameters: int,
    watch: measure.Stopwatch,
    length: int,
    forward: Callable[[], None] | None,
    tokens: int,
) -> Iterator[Row]:
    """The size of the network and of its state behind `length` tokens, its memory, and its speed in both directions.

    forward: a pass over a number of tokens. None: several processes train, whose speed no single pass tells.
    """
    device = watch.device
    yield {"metric": "num_parameters", "unit": "count", "value": num_parameters}
    metric, peak = measure.peak_memory(device)
    yield {"metric": metric, "unit": "bytes", "value": peak}
    for metric, unit, rates in (
        ("train_throughput", "tokens/s", watch.tokens_per_s),
        ("train_steps", "steps/s", watch.steps_per_s),
    ):
        if rates:
            yield {"metric": metric, "unit": unit, "value": measure.median(rates), "samples": rates}
    size = model.state_size(length)
    yield {"metric": "state_size", "unit": "numbers", "value": size, "slice": f"length={length}"}
    row = {"metric": "inference_throughput", "unit": "tokens/s"}
    if forward is None:
        yield {**row, "value": None, "status": "n/a", "error": "a run of one process measures it"}
        return
    call = record(forward, lambda: (), device, None) if device.type == "cuda" else forward
    samples = measure.rate(call, tokens, device)
    yield {**row, "value": measure.median(samples), "samples": samples}
