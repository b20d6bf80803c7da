"""Counts on a CPU what a layer starts on a GPU, and what it keeps for its backward pass, with kernels that only count.

The budgets of operators (kernels/budgets.json) do not see a copy or a cast that a mixer makes between two of them.
"""

from __future__ import annotations

from collections import Counter
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
from subquad.suite.bench.calls import ALLOCATIONS
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

STARTED = {
    "mamba": (9, 22),
    "mamba2": (19, 19),
    "mamba3": (28, 18),
    "deltanet": (22, 21),
    "gated-deltanet": (25, 24),
    "kda": (31, 29),
    "rwkv7": (27, 51),
    "gla": (21, 19),
    "gsa": (32, 16),
    "transformer++": (10, 17),
}
"""Launches of kernels in a layer's forward and backward pass, and operations of torch that write or make a tensor."""


class Work(TorchDispatchMode):
    """What operations of torch do in this context.

    found:      memories of all results, and their sizes in bytes.
    operations: how often those ran that write or make a tensor, and so start something on a GPU, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[StorageWeakRef, int]] = []
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        # tensors on the device "meta" have no memory
        made = [x.untyped_storage() for x in tree_leaves(results) if isinstance(x, torch.Tensor) and not x.is_meta]
        self.found += [(StorageWeakRef(memory), memory.nbytes()) for memory in made]
        writes = function._schema.is_mutable and torch.Tag.inplace_view not in function.tags
        name = function.overloadpacket.__name__
        if made and name not in ALLOCATIONS and (writes or any(memory._cdata not in known for memory in made)):
            self.operations[name] += 1
        return results

    def alive(self) -> int:
        """Bytes of the memories that are still in use, each counted once."""
        return sum({ref.cdata: size for ref, size in self.found if not ref.expired()}.values())


@pytest.fixture
def launches(monkeypatch):
    """Every operator chooses its kernels, whose launches are counted here by name and not carried out."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(Launcher, "__call__", lambda self, kernel, *_, **__: found.update([kernel.fn.__name__]))
    monkeypatch.setattr(
        backend,
        "chooses_triton",
        lambda op, wanted, *_, obstacle=None, is_faster=True: wanted != "torch" and is_faster and not obstacle,
    )
    for module in ("deltanet", "rwkv7"):
        monkeypatch.setattr(import_module(f"subquad.models.{module}"), "spares", lambda *_: True)
    return found


def loss_of(name: str, layers: int, length: int) -> tuple[torch.Tensor, Work]:
    """The loss of a network under autocast to bfloat16, and what its forward pass did."""
    spec = TaskSpec("tokens", num_classes=64, readout="token", max_length=length, vocab_size=64)
    model = MODELS.load(name)(d_model=WIDTH, num_layers=layers, **SIZES.get(name, {})).build(spec)
    tokens = torch.zeros(1, length, dtype=torch.long)
    with Work() as work, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return model.loss(model.hidden(tokens), tokens), work


@pytest.mark.parametrize("name", KEPT)
def test_a_layer_keeps_no_more_than_it_needs(name, launches):
    def kept(layers: int, length: int) -> int:
        loss, work = loss_of(name, layers, length)
        assert loss.requires_grad
        return work.alive()

    counts = {(layers, length): kept(layers, length) for layers in (1, 2) for length in (128, 256)}
    of_layer = {length: counts[2, length] - counts[1, length] for length in (128, 256)}
    assert (of_layer[256] - of_layer[128]) / 128 <= KEPT[name]


@pytest.mark.parametrize("name", STARTED)
def test_a_layer_starts_no_more_than_it_needs(name, launches):
    counts = []
    for layers in (1, 2):
        launches.clear()
        loss, work = loss_of(name, layers, 128)
        with work:
            loss.backward()
        counts.append((Counter(launches), work.operations))
    kernels, operations = (later - earlier for earlier, later in zip(*counts, strict=True))
    assert (kernels.total(), operations.total()) <= STARTED[name], f"{dict(kernels)}, {dict(operations)}"
