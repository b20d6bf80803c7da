"""One step of attention against a cache: kernels and plain PyTorch against the step as written."""

from functools import partial

import pytest
import torch

from subquad.kernels.attention import attention_step
from subquad.kernels.attention.reference import attention_step_reference
from subquad.kernels.attention.triton.step import Tuning, attention_step_triton
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(counts, heads, size, capacity, *, rotated=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    batch = len(counts)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    made = {name: normal(batch, heads, size) for name in "qkv"}
    made |= {name: normal(batch, capacity, heads, size) for name in ("keys", "values")}
    if rotated:
        angle = torch.arange(capacity)[:, None] * 10.0 ** -torch.arange(size // 2)
        made |= {"cos": angle.cos().double(), "sin": angle.sin().double()}
    return made


def with_caches(step, counts):
    """A step that also returns the caches; it checks that the count has grown by one."""

    def run(keys, values, **rest):
        count = torch.tensor(counts, device=keys.device)
        o = step(keys=keys, values=values, count=count, **rest)
        assert count.tolist() == [n + 1 for n in counts]
        return o, keys, values

    return run


SIZES = [([0, 5, 40], 2, 12, 41, True), ([63, 64], 1, 16, 70, False), ([200], 2, 32, 300, True)]


@pytest.mark.parametrize(("counts", "heads", "size", "capacity", "rotated"), SIZES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_the_step_as_written(counts, heads, size, capacity, rotated, backend, dtype):
    assert_matches_reference(
        with_caches(partial(attention_step, backend=backend), counts),
        partial(attention_step_reference, count=torch.tensor(counts)),
        inputs(counts, heads, size, capacity, rotated=rotated),
        dtype=dtype,
        keep=("cos", "sin"),
        device=DEVICE,
        grad=False,
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("windows", [[1, 2, 2**40], [15, 17, 40], [200, 201, 202]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_with_windows_equal_the_step_as_written(windows, backend, dtype):
    counts = [0, 16, 200]
    assert_matches_reference(
        with_caches(partial(attention_step, backend=backend), counts),
        partial(attention_step_reference, count=torch.tensor(counts)),
        inputs(counts, 3, 16, 220) | {"window": torch.tensor(windows)},
        dtype=dtype,
        keep=("cos", "sin"),
        device=DEVICE,
        grad=False,
    )


@pytest.mark.parametrize("window", [None, torch.tensor([50])])
@pytest.mark.parametrize("programs", [1, 8, 64])
def test_any_number_of_parts_gives_the_same(programs, window):
    counts = [0, 3, 70]
    tuning = Tuning(tile=256, programs=programs)
    step = with_caches(lambda **given: attention_step_triton(**given, scale=0.3, tuning=tuning), counts)
    assert_matches_reference(
        step,
        partial(attention_step_reference, count=torch.tensor(counts), scale=0.3),
        inputs(counts, 1, 16, 80) | {"window": window},
        keep=("cos", "sin"),
        device=DEVICE,
        grad=False,
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_full_cache_keeps_its_size(backend):
    memory = torch.zeros(2, 1, 4, 1, 8, device=DEVICE)
    count = torch.tensor([4], device=DEVICE)
    new = torch.ones(1, 1, 8, device=DEVICE)
    # the positions behind the first sequence are those of the next one
    attention_step(new, new, new, memory[0], memory[1], count, backend=backend)
    assert memory[:, 0, 3].eq(1).all()
    assert memory.sum() == 16
