"""Counts on a CPU what a layer keeps for its backward pass on a GPU, with kernels that are not started."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")
from subquad.kernels import backend
from subquad.kernels.launch import Launcher
from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec

WIDTH = 256
SIZES = {
    "deltanet": {"num_heads": 2},
    "gated-deltanet": {"num_heads": 2, "expand_k": 1.0, "expand_v": 1.5},
    "kda": {"num_heads": 2},
    "rwkv7": {"head_dim": 64},
    "gla": {"num_heads": 1},
    "gsa": {"num_heads": 1},
}
KEPT = {"deltanet": 11264, "gated-deltanet": 13345, "kda": 14345, "rwkv7": 13641, "gla": 10868, "gsa": 12112}
"""Bytes for each token and layer of width WIDTH under autocast to bfloat16."""


class Memories(TorchDispatchMode):
    """The memories of all results that operations of torch give in this context, and their sizes in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            # tensors on the device "meta" have no memory
            if isinstance(x, torch.Tensor) and not x.is_meta:
                memory = x.untyped_storage()
                self.found.append((StorageWeakRef(memory), memory.nbytes()))
        return results

    def alive(self) -> int:
        """Bytes of the memories that are still in use, each counted once."""
        return sum({ref.cdata: size for ref, size in self.found if not ref.expired()}.values())


def kept(name: str, layers: int, length: int) -> int:
    """Bytes that a forward pass of a network leaves in use."""
    spec = TaskSpec("tokens", num_classes=64, readout="token", max_length=length, vocab_size=64)
    model = MODELS.load(name)(d_model=WIDTH, num_layers=layers, **SIZES[name]).build(spec)
    tokens = torch.zeros(1, length, dtype=torch.long)
    with Memories() as memories, torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(model.hidden(tokens), tokens)
    assert loss.requires_grad
    return memories.alive()


@pytest.mark.parametrize("name", KEPT)
def test_a_layer_keeps_no_more_than_it_needs(name, monkeypatch):
    monkeypatch.setattr(Launcher, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(backend, "chooses_triton", lambda op, wanted, *_, obstacle=None, is_faster=True: not obstacle)
    for module in ("deltanet", "rwkv7"):
        monkeypatch.setattr(import_module(f"subquad.models.{module}"), "spares", lambda *_: True)
    counts = {(layers, length): kept(name, layers, length) for layers in (1, 2) for length in (128, 256)}
    of_layer = {length: counts[2, length] - counts[1, length] for length in (128, 256)}
    assert (of_layer[256] - of_layer[128]) / 128 <= KEPT[name]
