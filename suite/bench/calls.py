"""Counts what one call of a launcher starts and allocates, on meta tensors, which need no GPU.

An equally fast kernel does not help where its launcher begins to fill a buffer, copy an input or start a second kernel.
The counts are those of a second call, as in training, when the tensors that a launcher keeps between calls are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
)
"""Operations of PyTorch that allocate memory and start nothing on a GPU."""


@dataclass
class Calls:
    """Counts of one call.

    kernels:    launches of Triton kernels by name; an autotuned kernel counts once.
    operations: operations of PyTorch that start something on a GPU, by name.
    num_bytes:  bytes of all tensors that the call allocated, results and temporaries.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0

    def __str__(self) -> str:
        """`2 _fwd_kernel, 1 _sum_kernel; 1 zeros; 4096`: kernels, operations and bytes, as in the file of budgets."""
        parts = (
            ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
            for found in (self.kernels, self.operations)
        )
        return f"{'; '.join(parts)}; {self.num_bytes}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The counts whose text that is."""

        def counts(part: str) -> Counter[str]:
            pairs = (item.split(" ") for item in part.split(", ") if item)
            return Counter({name: int(count) for count, name in pairs})

        kernels, operations, num_bytes = text.split("; ")
        return cls(counts(kernels), counts(operations), int(num_bytes))


class Counting(TorchDispatchMode):
    """Counts the operations of PyTorch and the bytes that they allocate within this context, on meta tensors."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(results)
        known = {_storage(x) for x in given}
        new = {_storage(x): x for x in made if _storage(x) not in known}
        self.calls.num_bytes += sum(x.untyped_storage().nbytes() for x in new.values())
        name = func.overloadpacket.__name__
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        # an operation that neither writes nor allocates returns a view; one on tensors without elements starts nothing
        if (writes or new or not made) and name not in ALLOCATIONS and any(x.numel() for x in made or given):
            self.calls.operations[name] += 1
        return results


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.device.type == "meta"]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def compared(found: Calls, budget: Calls) -> tuple[list[str], list[str]]:
    """Phrases for what a call does more than its budget allows, and for what it does less, with new and old numbers.

    Launches and operations are compared by their number, so that a kernel may have another name.
    """
    more, fewer = [], []
    for what, new, old in (
        ("launches", found.kernels, budget.kernels),
        ("other operations", found.operations, budget.operations),
    ):
        names = [name for name in sorted(new | old) if new[name] != old[name]]
        detail = ", ".join(f"{name} {old[name]} -> {new[name]}" for name in names)
        if new.total() > old.total():
            more.append(f"{what} {new.total()} > budget {old.total()} ({detail})")
        elif new.total() < old.total():
            fewer.append(f"{what} {new.total()} < budget {old.total()} ({detail})")
    if found.num_bytes > budget.num_bytes:
        more.append(f"allocated bytes {found.num_bytes} > budget {budget.num_bytes}")
    elif found.num_bytes < budget.num_bytes:
        fewer.append(f"allocated bytes {found.num_bytes} < budget {budget.num_bytes}")
    return more, fewer


def by_targets(lines: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Lines of (case, target, phrase), in which those that differ by the target alone are one."""
    targets: dict[tuple[str, str], list[str]] = {}
    for case, target, phrase in lines:
        targets.setdefault((case, phrase), []).append(target)
    for (case, phrase), names in targets.items():
        yield case, ", ".join(names), phrase
