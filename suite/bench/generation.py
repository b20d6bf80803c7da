"""Time of a generation: a prompt of random tokens is read in parallel, then new tokens are drawn one after the other.

A generation is timed on the host's clock from the prompt to the last token, with the device finished at both ends, as
somebody who waits for it would. The weights and the CUDA graphs of a step and of a short prompt are made before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from subquad.suite.contracts import ModelConfig, TaskSpec
from subquad.suite.generate import Decoder, Sampling
from subquad.suite.model import Model
from subquad.suite.training.measure import reset_peak_memory, synchronize
from subquad.suite.training.numerics import default_dtype

MIN_SAMPLES, MAX_SAMPLES = 3, 20
"""Generations that are timed at each length; the paper of Mamba has 3."""


def build_for_inference(config: ModelConfig, spec: TaskSpec, device: torch.device) -> Model:
    """A model with random weights, those of linear maps and embeddings in bf16, state space parameters and others in
    float32.

    A step reads every weight once, so a cast within the step would cost more than the product. Large weights never
    exist in float32, which would take twice the memory of the model.
    """
    with default_dtype(torch.bfloat16), device:
        model: Model = config.build(spec).to(device)
    # the networks that compute filters run in float32
    precise = {id(p) for group in model.param_groups() if group.name in ("ssm", "dt") for p in group.parameters}
    for module in model.modules():
        matrix = isinstance(module, (nn.Linear, nn.Embedding))
        for parameter in module.parameters(recurse=False):
            if not matrix or id(parameter) in precise:
                parameter.data = parameter.data.float()
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.float())
    return model


@dataclass
class Generations:
    """Times in ms of the same generation, repeated."""

    total: list[float] = field(default_factory=list)
    """From the prompt to the last token."""
    prefill: list[float] = field(default_factory=list)
    """Until the first token is drawn."""


def time_generations(model: Model, prompts: Tensor, new_tokens: int, budget_ms: float) -> Generations:
    """Times the likeliest `new_tokens` behind prompts [B, P], P > 1, three times or for about `budget_ms`."""
    device = prompts.device
    batch, steps = prompts.shape
    capacity, greedy = steps + new_tokens - 1, Sampling(temperature=0)
    decoder = Decoder(model, batch, capacity, device, sampling=greedy, prompt_length=steps)
    found = Generations()

    def generate() -> None:
        synchronize(device)
        start = time.perf_counter()
        decoder.start(prompts)
        synchronize(device)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            decoder.advance()
        synchronize(device)
        found.total.append(1e3 * (time.perf_counter() - start))
        found.prefill.append(1e3 * (first - start))

    # compiles the kernels of the prompt
    decoder.start(prompts)
    decoder.advance()
    while len(found.total) < MIN_SAMPLES or (len(found.total) < MAX_SAMPLES and sum(found.total) < budget_ms):
        generate()
    return found


@torch.inference_mode()
def time_peer(generate: Callable[[], object], device: torch.device, budget_ms: float) -> list[float]:
    """Times in ms of a generation of another library, repeated as `time_generations` repeats ours.

    The peak of memory is that of these generations.
    """
    # compiles and tunes its kernels, and records a step where the library does so
    generate()
    reset_peak_memory(device)
    found: list[float] = []
    while len(found) < MIN_SAMPLES or (len(found) < MAX_SAMPLES and sum(found) < budget_ms):
        synchronize(device)
        start = time.perf_counter()
        generate()
        synchronize(device)
        found.append(1e3 * (time.perf_counter() - start))
    return found
