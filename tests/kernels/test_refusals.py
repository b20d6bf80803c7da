"""Tests what every operator refuses: the rows of two tables, and sweeps over the inputs of workloads."""

from __future__ import annotations

import pytest
from torch import Tensor

pytest.importorskip("triton")
from tests.kernels.refused import ALL, BACKENDS, CALLS, DEVICE, REFUSED, REFUSED_BY_KERNELS


def rows(table):
    return [
        pytest.param(name, words, change, id=f"{name}: {words[:40]}")
        for name, entries in table.items()
        for words, change in entries
    ]


def changed(inputs, change):
    """The inputs with what the change says; a function changes the value that is there."""
    every = {name: change[ALL] for name, x in inputs.items() if isinstance(x, Tensor)} if ALL in change else {}
    change = {name: new for name, new in (every | change).items() if name != ALL}
    return inputs | {name: new(inputs[name]) if callable(new) else new for name, new in change.items()}


@pytest.mark.parametrize(("name", "words", "change"), rows(REFUSED))
def test_what_does_not_fit_is_refused_by_every_backend(name, words, change):
    call, inputs = CALLS[name]()
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=rf"^{name.split()[0]}: ") as refusal:
            call(**{"backend": backend, **changed(inputs, change)})
        assert words in str(refusal.value)


@pytest.mark.parametrize(("name", "words", "change"), rows(REFUSED_BY_KERNELS))
def test_what_the_kernels_cannot_take_is_left_to_pytorch(name, words, change):
    make = CALLS[name]
    call, inputs = make()
    with pytest.raises(ValueError, match=rf"^{name.split()[0]}: backend='triton' ") as refusal:
        call(**changed(inputs, change), backend="triton")
    assert words in str(refusal.value)
    assert "use backend='auto' or 'torch'" in str(refusal.value)
    for backend in ("torch", "auto") if DEVICE == "cpu" else ():
        call, inputs = make()
        call(**changed(inputs, change), backend=backend)
