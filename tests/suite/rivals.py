"""Other libraries' models for tests, each with a habit, and runs that time them beside ours for a short time.

A peer is timed in a process of its own, which imports this module.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from subquad.models import MODELS
from subquad.suite.bench import models as timed
from subquad.suite.bench.config import SpeedRun
from subquad.suite.contracts import TaskSpec
from subquad.suite.model import Model
from subquad.suite.registry import Entry
from subquad.suite.runner import WORKERS

LOG = "RIVALS_LOG"
"""Environment variable with the file to which a peer adds a line when it is built and when it is trained."""


@dataclass(frozen=True)
class Brief(SpeedRun):
    """A run that is given a millisecond for its samples, and may be given other steps to time."""

    makers: Mapping[str, timed.MakeStep] = field(default_factory=lambda: timed.STEPS)


def brief_timer(run, *device, **options):
    budget = dict.fromkeys(timed.BUDGET_MS, 1.0)
    return timed.ModelTimer(run, *device, makers=run.makers, budget_ms=budget, **options)


WORKERS[Brief] = Entry("tests.suite.rivals:brief_timer", "times a model for a short time")


def brief(run, **more):
    return Brief(**{field.name: getattr(run, field.name) for field in fields(run)}, **more)


def log(line: str) -> None:
    with Path(os.environ[LOG]).open("a") as file:
        file.write(f"{line}\n")


def logged_step(model, *options):
    log(type(model).__name__)
    return timed.train_step(model, *options)


class Peer(Model):
    """Another library's model: ours under another name, with `more` parameters."""

    version = "3.1"

    def __init__(self, network, more=0):
        super().__init__()
        self.network, self.config = network, network.config
        self.more = torch.nn.Parameter(torch.zeros(more))

    def forward(self, inputs, positions=None):
        return self.network(inputs)

    def generate(self, prompts, new_tokens):
        assert not self.training
        assert torch.get_default_dtype() == torch.float32
        log(f"{tuple(prompts.shape)}, {new_tokens}, {next(self.network.parameters()).dtype}")
        return prompts


class Reads(Peer):
    """A model that reads a value back from the device, which no recording allows."""

    def forward(self, inputs, positions=None):
        logits = self.network(inputs)
        assert torch.isfinite(logits.sum()).item()
        return logits


class RivalConfig(MODELS.load("attention")):
    """Attention, and the habit of each library's model of it: a word of `build_peer`."""

    habits: dict[str, str]

    def build_peer(self, library: str, spec: TaskSpec) -> Any:
        habit = self.habits[library]
        shortest = spec.max_length in (16, 64)
        if habit == "missing":
            raise ModuleNotFoundError(f"No module named '{library}'")
        if habit == "exits":
            sys.exit("no license")
        if habit == "rounds":
            torch.set_float32_matmul_precision("medium")
        if habit == "dies":
            # as compiled code does, which knows nothing of sys.stdout
            os.write(1, b'{"value": []}\n')
            assert os.read(0, 1) == b""
        if habit == "dies" and shortest:
            print("tuning kernel 7", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if habit == "hangs":
            log(str(os.getpid()))
            time.sleep(600)
        if habit == "breaks" and shortest:
            # an index out of range, after which the process can use its GPU no more
            torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()
        network = self.build(spec)
        return Reads(network) if habit == "reads" else Peer(network, more=10**4 if habit == "grows" else 0)


class Here:
    """A stand-in for `Worker` that times a library in the process of the test, two seconds faster than in its own."""

    def __init__(self, targets, device, log=None):
        self.device = torch.device(device)

    def ask(self, what, target, timeout_s, waiting, **given):
        return timed.peer_rows(self.device, **given)

    def stop(self): ...

    def __enter__(self):
        return self

    def __exit__(self, *error): ...


RIVALS = MODELS.extended({"rival": Entry("tests.suite.rivals:RivalConfig", "attention against peers with habits")}, "")
