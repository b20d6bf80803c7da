"""How fast a model is at a length: its sequence layer, a step of training, or one more token, on random inputs.

On a GPU each is recorded as a CUDA graph and replayed, as the trainer does, so that the host which launches kernels
does not count. Memory is that of the recording, which runs the same step without the graph first.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.bench.measure import SEED, Unavailable, sample
from suite.bench.series import Series
from suite.capture import record
from suite.config import SpeedConfig, TrainConfig
from suite.measure import reset_peak_memory
from suite.trainer import numerics

BUDGET_MS = {"layer": 200.0, "train": 2000.0, "decode": 500.0}
"""Time given to the samples of one length."""


class ModelTimer(Series):
    """Of a model (`suite.config.SpeedRun`)."""

    def _lengths(self) -> Sequence[int]:
        return self.run.speed.lengths

    def _measure(self, length: int, part: str) -> None:
        try:
            with contextlib.ExitStack() as stack:
                for context in self._numerics():
                    stack.enter_context(context)
                self._rows(length, part)
        except Exception as error:
            # the host has no error of its own for it
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise Unavailable("oom", f"{self.run.title} at {part}: out of memory") from None
            raise Unavailable("failed", f"{type(error).__name__}: {error}") from None

    def _numerics(self) -> Sequence[contextlib.AbstractContextManager[Any]]:
        speed: SpeedConfig = self.run.speed
        contexts: list[contextlib.AbstractContextManager[Any]] = [
            numerics(TrainConfig(steps=1, precision=speed.precision))
        ]
        if speed.attention == "unfused":
            contexts.append(unfused_attention())
        return contexts

    def _rows(self, length: int, part: str) -> None:
        speed: SpeedConfig = self.run.speed
        batch = speed.batch(length)
        torch.manual_seed(SEED)
        # a billion parameters take a host half a minute to draw
        with self.device:
            model = self.run.model.build(speed.spec(length)).to(self.device)
        add = self.outcome.add
        if length == speed.lengths[0]:
            add("num_parameters", "count", sum(parameter.numel() for parameter in model.parameters()))
            if speed.measure == "decode":
                add("state_size", "numbers", model.state_size(length), slice=part)
        step = {"layer": layer, "train": train_step, "decode": decode_step}[speed.measure](
            model, speed, length, self.device
        )
        call, peak = self._recorded(step)
        samples = sample(call, self.device, BUDGET_MS[speed.measure])
        add("time", "ms", statistics.median(samples), slice=part, samples=samples)
        if speed.measure != "layer":
            tokens = batch * (length if speed.measure == "train" else 1)
            rates = [1e3 * tokens / ms for ms in samples]
            metric = "train_throughput" if speed.measure == "train" else "decode_throughput"
            add(metric, "tokens/s", statistics.median(rates), slice=part, samples=rates)
        if peak is not None:
            add("peak_memory", "bytes", float(peak), slice=part)

    def _recorded(self, step: Callable[[], None]) -> tuple[Callable[[], None], int | None]:
        """What is timed, and the bytes allocated at its peak, parameters and optimizer included."""
        if self.device.type != "cuda":
            return step, None
        reset_peak_memory(self.device)
        # what it leaves in the parameters is of no account
        replay = record(step, lambda: (), self.device, None)
        return replay, torch.cuda.max_memory_allocated(self.device)


@contextlib.contextmanager
def unfused_attention() -> Iterator[None]:
    """torch's attention as plain products and a softmax, in the precision of its inputs."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    # by default half precision would be widened first, which nobody did before there were fused kernels
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def autocast(speed: SpeedConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """As in training."""
    if speed.precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def random_inputs(speed: SpeedConfig, device: torch.device, *size: int) -> Tensor:
    """Tokens of that size, or a signal with channels last."""
    if speed.input == "tokens":
        return torch.randint(speed.vocab_size, size, device=device)
    return torch.randn(*size, speed.channels, device=device)


def layer(model: Any, speed: SpeedConfig, length: int, device: torch.device) -> Callable[[], None]:
    """Forward and backward of the first mixer, with the gradients of its inputs and parameters."""
    mixer = model.mixers[0]
    dtype = torch.bfloat16 if speed.precision == "bf16" else torch.float32
    size = (speed.batch(length), length, model.config.d_model)
    x = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
    wanted = [x, *(parameter for parameter in mixer.parameters() if parameter.requires_grad)]
    cotangent = torch.randn(size, device=device, dtype=dtype)

    def step() -> None:
        with autocast(speed, device):
            y = mixer(x)
        torch.autograd.grad(y, wanted, cotangent.to(y.dtype))

    return step


def train_step(model: Any, speed: SpeedConfig, length: int, device: torch.device) -> Callable[[], None]:
    """Forward, cross entropy of every position or sequence, backward and AdamW, as in the trainer."""
    batch = speed.batch(length)
    model.train()
    inputs = random_inputs(speed, device, batch, length)
    labels = (batch, length) if speed.readout == "token" else (batch,)
    targets = torch.randint(speed.num_classes or speed.vocab_size, labels, device=device)
    gpu = device.type == "cuda"
    groups = [{"params": group.parameters} for group in model.param_groups()]
    optimizer = torch.optim.AdamW(groups, lr=1e-6, fused=gpu or None, capturable=gpu)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(speed, device):
            logits = model(inputs).float()
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()

    return step


@torch.no_grad()
def decode_step(model: Any, speed: SpeedConfig, length: int, device: torch.device) -> Callable[[], None]:
    """One token behind a prefix, which is read token by token; the same one every time it is called."""
    model.eval()
    if speed.precision == "bf16":
        # a step reads every weight once, so that a cast in it would cost more than the product
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.to(torch.bfloat16)
    tokens = random_inputs(speed, device, speed.batch(length))
    state = model.init_state(len(tokens))
    for _ in range(length):
        with autocast(speed, device):
            _, state = model.step(tokens, state)

    def step() -> None:
        with torch.no_grad(), autocast(speed, device):
            model.step(tokens, state)

    return step
