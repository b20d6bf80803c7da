"""A classifier of short recordings. Its features and probabilities are used to judge generated ones.

    log mel spectrogram -> 3 x (convolution, batch norm, ReLU, pooling) -> mean and maximum over time -> linear

It is trained here by a fixed recipe on the training clips of the task, and kept in the cache. Metrics computed with it
can be compared with each other but not with those of the papers, whose classifier is a ResNeXt (98.08 % on the test set
of the digits, features [1024]).
"""

from __future__ import annotations

import hashlib
import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.suite.store.weights import read
from subquad.tasks.base import Array
from subquad.tasks.data import DataError, cache
from subquad.tasks.speech_commands import mel_filters

VERSION = 1
"""Raised whenever the network or its training changes."""
WINDOW, HOP, BANDS = 512, 256, 40
WIDTHS = (16, 32, 64)
POOLS = ((2, 2), (2, 2), (2, 1))
"""Pooling of (bands, frames) behind each convolution."""
BATCH = 64
SHIFT = 1600
"""Training shifts clips by up to this number of samples."""


class Judge(nn.Module):
    """Waves [R, T] in [-1, 1] to features [R, F] and logits [R, K]."""

    mel: Tensor
    window: Tensor

    def __init__(self, num_classes: int, rate: int) -> None:
        super().__init__()
        mel = mel_filters(BANDS, WINDOW // 2 + 1, rate)
        self.register_buffer("mel", torch.from_numpy(mel).float(), persistent=False)
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)
        blocks: list[nn.Module] = []
        for before, after, pool in zip((1, *WIDTHS), WIDTHS, POOLS, strict=False):
            blocks += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(pool)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(2 * WIDTHS[-1], num_classes)

    def forward(self, waves: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.stft(waves, WINDOW, HOP, window=self.window, return_complex=True).abs().square()
        x = torch.log(self.mel @ spectrum + 1e-5)
        x = self.blocks(((x + 4) / 4).unsqueeze(1)).mean(dim=2)
        features = torch.cat([x.mean(dim=2), x.amax(dim=2)], dim=1)
        return features, self.head(features)


def train(waves: Tensor, targets: Tensor, num_classes: int, rate: int, steps: int) -> Judge:
    """Trains a judge with AdamW at 3e-3, a cosine schedule to 0 and random shifts in time; the seed is fixed."""
    with torch.random.fork_rng(devices=[waves.device] if waves.is_cuda else []):
        torch.manual_seed(0)
        judge = Judge(num_classes, rate).to(waves.device).train()
        optimizer = torch.optim.AdamW(judge.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        shuffle = torch.Generator().manual_seed(0)
        for _ in range(steps):
            rows = torch.randint(len(waves), (BATCH,), generator=shuffle)
            shift = int(torch.randint(-SHIFT, SHIFT + 1, (), generator=shuffle))
            rows = rows.to(waves.device)
            loss = F.cross_entropy(judge(waves[rows].roll(shift, dims=1))[1], targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return judge.eval()


@torch.no_grad()
def judged(judge: Judge, waves: Tensor) -> tuple[Array, Array]:
    """Features [R, F] and log p(y | x) [R, K], float64."""
    parts = [judge(waves[start : start + 256]) for start in range(0, len(waves), 256)]
    features = torch.cat([features for features, _ in parts]).double()
    log_p = torch.cat([logits for _, logits in parts]).double().log_softmax(-1)
    return features.cpu().numpy(), log_p.cpu().numpy()


def trained(content: str, waves: Tensor, targets: Tensor, num_classes: int, rate: int, steps: int) -> Judge:
    """The judge trained on this content: read from the cache, or else trained now and kept there.

    content: identifies the clips. waves [R, T] and targets [R]: the training clips and their classes.
    """
    facts = {"version": VERSION, "content": content, "rate": rate, "classes": num_classes, "steps": steps}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    target = cache.place("prepared", f"judge-{key}")
    if not target.is_dir():
        with cache.lock(f"prepared-judge-{key}"):
            if not target.is_dir():
                made = train(waves, targets, num_classes, rate, steps)
                with cache.new_folder(target) as temporary:
                    torch.save(made.state_dict(), temporary / "judge.pt")
                    cache.write_json(temporary / "facts.json", facts)
    # initial weights are drawn and then overwritten, which must not move the global generator
    with torch.random.fork_rng(devices=[]):
        judge = Judge(num_classes, rate).to(waves.device)
    try:
        judge.load_state_dict(read(target / "judge.pt", waves.device))
    except Exception as error:
        raise DataError(f"{target}: damaged ({type(error).__name__}); remove this folder.") from None
    return judge.eval()
