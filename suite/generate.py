"""Draws sequences from a model, one token after the other, with its recurrent step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from suite.capture import record
from suite.contracts import Stepwise
from suite.state import copy_into, tensors


@torch.no_grad()
def generate(
    model: Stepwise,
    num_rows: int,
    length: int,
    first: int,
    device: torch.device,
    seed: int,
    *,
    temperature: float = 1.0,
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """Tokens [num_rows, length], int64, on the device; before the first of them the model sees `first`.

        x_0 = first;   x_t ~ softmax(logits_t / temperature)

    drawn as argmax(p / e) with e ~ Exp(1). On a GPU a step is a recorded graph.
    between: called every 256 steps; it may raise to interrupt.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        token = torch.full((num_rows,), first, dtype=torch.long, device=device)
        out = torch.empty(num_rows, length, dtype=torch.long, device=device)
        state = model.init_state(num_rows, length)
        held = list(tensors(state))

        def step() -> None:
            logits, after = model.step(token, state)
            p = torch.softmax(logits.float() / temperature, dim=-1)
            token.copy_((p / torch.empty_like(p).exponential_()).argmax(-1))
            copy_into(state, after)

        advance: Callable[[], None] = step
        if device.type == "cuda":
            advance = record(step, lambda: (*held, token), device, None)
        for t in range(length):
            advance()
            out[:, t] = token
            if t % 256 == 0:
                between()
    return out
