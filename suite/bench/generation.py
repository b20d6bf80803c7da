"""Time of a generation: a prompt of random tokens is read in parallel, then new tokens are drawn one after the other.

A generation is timed on the host's clock from the prompt to the last token, with the device finished at both ends, as
somebody who waits for it would. The weights and the CUDA graphs of a step and of a short prompt are made before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from suite.contracts import Model
from suite.generate import Decoder, Sampling
from suite.measure import synchronize

MIN_SAMPLES, MAX_SAMPLES = 3, 20
"""Generations that are timed at each length; the paper of Mamba has 3."""


def lower_weights(model: Model) -> None:
    """Casts the weights of linear maps and embeddings to bf16.

    A step reads every weight once, so a cast within the step would cost more than the product.
    """
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.to(torch.bfloat16)


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
