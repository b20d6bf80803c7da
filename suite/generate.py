"""Continues sequences with a model: reads the prompts in parallel, then draws one token after the other.

    state = prefill(prompt);   x_t ~ p_t = softmax(logits_t / temperature);   logits_{t+1}, state = step(x_t, state)

A token is drawn as argmax(p / e) with e ~ Exp(1), all on the device. On a GPU a step is recorded once as a CUDA graph;
states have a fixed capacity, so that no shape changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.suite.model import Model
from subquad.suite.state import copy_into
from subquad.suite.training.capture import WARMUPS, record

EVERY = 32
"""Steps after which the host looks whether all rows have stopped."""
MOST_RECORDED_TOKENS = 8192
"""With more tokens in its prompts, a device takes longer to read them than the host to launch that.

Mamba 1.4B on an H200 reads 2048 tokens in 57 ms, launched by the host, in 16 ms recorded, and 16 times as many in
188 ms."""


@dataclass(frozen=True)
class Sampling:
    """Rule by which a token follows from logits."""

    temperature: float = 1.0
    """Divisor of the logits; 0: the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens whose probabilities add up to at least p."""

    def __post_init__(self) -> None:
        # logits over a smaller one are infinite, and the probabilities NaN
        if not (self.temperature == 0 or self.temperature >= 1e-6):
            raise ValueError(f"generate: temperature must be 0 or at least 1e-06, got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"generate: top_k must be at least 1, got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p must lie in (0, 1], got {self.top_p}.")

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] of logits [B, num_classes], and a number for each, which is NaN where one of its logits is.

        Random numbers are from torch's default generator.
        """
        if self.temperature == 0:
            # argmax takes a NaN for the largest number
            token = logits.argmax(-1)
            return token, logits.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        p = torch.softmax(logits.float() / self.temperature, dim=-1)
        # all probabilities of a row are NaN where one of its logits is, and comparisons below lose that
        number = p[:, 0]
        if self.top_k is not None and self.top_k < p.shape[-1]:
            p = p.where(p >= p.topk(self.top_k, dim=-1).values[:, -1:], 0.0)
        if self.top_p is not None:
            descending = p.sort(dim=-1, descending=True).values
            # the sum of p before a token counts, so that the token with which it reaches top_p is kept
            before = descending.cumsum(dim=-1) - descending
            wanted = before < self.top_p * descending.sum(dim=-1, keepdim=True)
            p = p.where(p >= descending.where(wanted, torch.inf).amin(dim=-1, keepdim=True), 0.0)
        return (p / torch.empty_like(p).exponential_()).argmax(-1), number


class Decoder:
    """A model with the memory to continue a batch of sequences, again and again.

    capacity: number of positions that a sequence may have. It does not count the last token that is drawn, which the
    model never reads.
    stop: tokens after which a row repeats the token that stopped it.
    prompt_length: where prompts of one length are read many times, reading short ones is recorded too.
    """

    def __init__(
        self,
        model: Model,
        batch_size: int,
        capacity: int,
        device: torch.device,
        *,
        sampling: Sampling = Sampling(),
        stop: Collection[int] = (),
        prompt_length: int | None = None,
    ) -> None:
        self.model, self.sampling = model, sampling
        self.token = torch.zeros(batch_size, dtype=torch.long, device=device)
        """[B]: the last token of every row."""
        self.stopped = torch.zeros(batch_size, dtype=torch.bool, device=device)
        """[B]: whether a row has stopped."""
        self._lost = torch.zeros(batch_size, device=device)
        """[B]: NaN in a row that has met logits that are not numbers."""
        self._stop = torch.tensor(sorted(stop), device=device) if stop else None
        self.state = model.init_state(batch_size, capacity)
        self.advance: Callable[[], None] = self._step
        """Reads `token` and draws the next one into it."""
        self._prompts: Tensor | None = None
        # the warm-up before a recording fills positions, and must find room for them
        if device.type == "cuda" and capacity >= WARMUPS:
            # the state is not put back afterwards: `start` does so without a copy of a large cache
            self.advance = record(self._step, self._recorded, device, None)
            if prompt_length is not None and 1 < prompt_length <= MOST_RECORDED_TOKENS // batch_size:
                self._prompts = torch.zeros(batch_size, prompt_length, dtype=torch.long, device=device)
                self._replay = record(self._read_recorded, self._recorded, device, None)

    def _recorded(self) -> tuple[Tensor, ...]:
        """A recorded step writes these tensors beside the state."""
        return self.token, self.stopped, self._lost

    def check(self) -> None:
        """Waits for the device. ValueError where logits were NaN since `start`, from which no token follows."""
        if lost := self._lost.isnan().nonzero().flatten().tolist():
            raise ValueError(
                f"generate: the model gave logits that are NaN in row {lost[0]} of its prompts, so no token follows; "
                "are its weights what it was trained to?"
            )

    @torch.no_grad()
    def start(self, prompts: Tensor, lengths: Tensor | None = None) -> bool:
        """Reads prompts [B, P], and draws the first token unless P is 1. Gives whether there is a token already.

        lengths: [B]: tokens of each row; what stands in front of shorter ones is not read.
        """
        if prompts.shape[1] == 1:
            self._restart()
            self.token.copy_(prompts[:, 0])
            return False
        if self._prompts is not None and lengths is None and prompts.shape == self._prompts.shape:
            self._prompts.copy_(prompts)
            self._replay()
        else:
            self._read(prompts, lengths)
        return True

    def _restart(self) -> None:
        self.model.restart(self.state)
        self.stopped.zero_()
        self._lost.zero_()

    @torch.no_grad()
    def _read_recorded(self) -> None:
        assert self._prompts is not None
        self._read(self._prompts, None)

    def _read(self, prompts: Tensor, lengths: Tensor | None) -> None:
        self._restart()
        logits, after = self.model.prefill(prompts, lengths, state=self.state)
        copy_into(self.state, after)
        self._draw(logits)

    @torch.no_grad()
    def _step(self) -> None:
        logits, after = self.model.step(self.token, self.state)
        copy_into(self.state, after)
        self._draw(logits)

    def _draw(self, logits: Tensor) -> None:
        token, number = self.sampling(logits)
        torch.maximum(self._lost, number, out=self._lost)
        if self._stop is None:
            self.token.copy_(token)
        else:
            self.token.copy_(torch.where(self.stopped, self.token, token))
            self.stopped.copy_(torch.isin(self.token, self._stop) | self.stopped)


def generate(
    model: Model,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    lengths: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
    callback: Callable[[Tensor], bool | None] | None = None,
    every: int = EVERY,
) -> Tensor:
    """Tokens [B, N], int64, that follow the prompts [B, P] on their device, where N is at most `max_new_tokens`.

    The model must be in evaluation mode. torch's generators are left as they were.

    lengths:  [B]: tokens of each prompt, which are its last ones; None: all P.
    temperature, top_k, top_p: as in `Sampling`; 0 is greedy.
    stop:     a row ends with the first of these tokens and repeats it to the length of the longest row.
    callback: called with the new tokens [B, n] every `every` steps; with True it ends all rows, and it may raise.

    ValueError for logits that are NaN: before tokens of these steps are given to the callback, or at the end.
    """
    _check(prompts, max_new_tokens, lengths)
    device = prompts.device
    parts: list[Tensor] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        sampling = Sampling(temperature, top_k, top_p)
        # the last token is drawn and not read
        capacity = prompts.shape[1] + max_new_tokens - 1
        decoder = Decoder(model, len(prompts), capacity, device, sampling=sampling, stop=stop)
        drawn = decoder.start(prompts, lengths)
        for begin in range(0, max_new_tokens, every):
            size = min(every, max_new_tokens - begin)
            part = torch.empty(len(prompts), size, dtype=torch.long, device=device)
            for t in range(size):
                if not drawn:
                    decoder.advance()
                drawn = False
                part[:, t] = decoder.token
            parts.append(part)
            if callback is not None:
                decoder.check()
                if callback(part):
                    break
            if stop and decoder.stopped.all():
                break
    decoder.check()
    made = torch.cat(parts, dim=1)
    return made[:, : lengths_until(made, stop).max()] if stop else made


def end_of_stop(text: str, stops: Collection[str]) -> int | None:
    """Returns the end of the stop text that ends first in a text; None without one.

    A text is found wherever it stands: its tokens may be cut in another way than those of the same text alone.
    """
    ends = [text.find(word) + len(word) for word in stops if word and word in text]
    return min(ends, default=None)


def lengths_until(tokens: Tensor, stop: Collection[int]) -> Tensor:
    """[B]: tokens of each row of [B, N] up to its first stop token, which counts; N where there is none."""
    hits = torch.isin(tokens, torch.tensor(sorted(stop), device=tokens.device))
    first = hits.int().argmax(dim=1) + 1
    return torch.where(hits.any(dim=1), first, tokens.shape[1])


def _check(prompts: Tensor, max_new_tokens: int, lengths: Tensor | None) -> None:
    if prompts.ndim != 2 or prompts.shape[1] < 1 or prompts.is_floating_point():
        raise ValueError(f"generate: prompts must be tokens [B, P] with P >= 1, got {list(prompts.shape)}.")
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be at least 1, got {max_new_tokens}.")
    if lengths is None:
        return
    if lengths.shape != prompts.shape[:1] or lengths.min() < 1 or lengths.max() > prompts.shape[1]:
        raise ValueError(
            f"generate: lengths must be [{len(prompts)}] with values from 1 to {prompts.shape[1]}, got "
            f"{lengths.tolist()}."
        )
