"""Gated linear attention on a GPU: the laws of `tests/kernels/test_gated_linear_attention.py` at sizes of real use.

Kernels are compiled anew for every kind of decay, dtype and size, and for lengths of 1 and of a multiple of 16 steps or
chunks, so a test takes several inputs of one such kind and shares it with others.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_reference
from tests.gpu.real_sizes import assert_equals_plain_pytorch

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TRITON = partial(gated_linear_attention, backend="triton")
TORCH = partial(gated_linear_attention, backend="torch")
DECAYS = ["none", "head", "head-step", "key", "value", "shared"]
"""`shared`: for each head and step, where half of the heads share one head of queries and keys."""
SIZES = {
    "none": (2, 128, 128),
    # the gradient of such a decay is one number a head, and the root mean square of few numbers is a matter of luck
    "head": (32, 128, 256),
    "head-step": (4, 128, 64),
    "shared": (24, 128, 64),
    "key": (2, 256, 512),
    "value": (2, 512, 64),
}


def make_inputs(batch, length, heads, key_dim, value_dim, decay, dtype=torch.bfloat16, kept="mild"):
    """kept: how much of the state a step keeps. `mixed`: a fifth of the steps keep exp(-50), the others most of it."""
    g = torch.Generator("cuda").manual_seed(length)

    def randn(*size):
        return torch.randn(*size, generator=g, device="cuda", dtype=torch.float64)

    channels = {"head": None, "head-step": (), "shared": (), "key": (key_dim,), "value": (value_dim,)}
    log_decay = None
    if decay != "none":
        size = (heads,) if decay == "head" else (batch, length, heads, *channels[decay])
        log_decay = F.logsigmoid(randn(*size)).div({"mild": 16, "medium": 1, "mixed": 16}[kept])
        if kept == "mixed":
            log_decay[torch.rand(size, generator=g, device="cuda") < 0.2] = -50.0
        log_decay = log_decay.float()
    groups = 2 if decay == "shared" else heads
    # keys that never decay must be small, so that sums stay of order one
    k = randn(batch, length, groups, key_dim) * (length**-0.5 if decay == "none" else 1.0)
    return {
        "q": randn(batch, length, groups, key_dim).to(dtype),
        "k": k.to(dtype),
        "v": randn(batch, length, heads, value_dim).to(dtype),
        "log_decay": log_decay,
        "decay_on": "value" if decay == "value" else "key",
        "initial_state": randn(batch, heads, key_dim, value_dim).float(),
        "return_final_state": True,
    }


def assert_right(inputs, plain=gated_linear_attention_reference):
    """Without gradients most keep their states inside."""
    assert_equals_plain_pytorch(TRITON, plain, inputs, inputs["q"].dtype, exact=TORCH)


@pytest.mark.parametrize(
    ("decay", "dtype"),
    [
        *((decay, torch.bfloat16) for decay in DECAYS),
        *((decay, torch.float16) for decay in ("key", "value")),
        *((decay, torch.float32) for decay in ("head-step", "key", "shared")),
    ],
)
def test_real_sizes_equal_plain_pytorch_in_double_precision(decay, dtype):
    for kept in ("mild", "medium", "mixed") if decay not in ("none", "head") else ("mild",):
        assert_right(make_inputs(1, 450, *SIZES[decay], decay, dtype, kept))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("key_dim", "value_dim", "lengths"), [(40, 24, (1, 65)), (32, 64, (65, 200))])
def test_small_sizes_equal_plain_pytorch_in_double_precision(decay, key_dim, value_dim, lengths):
    for length in lengths:
        assert_right(make_inputs(2, length, 40, key_dim, value_dim, decay))


@pytest.mark.parametrize("decay", ["none", "key"])
def test_a_hundred_thousand_steps(decay):
    assert_right(make_inputs(1, 100_001, 1, 64, 64, decay), plain=None)


@pytest.mark.large
def test_offsets_beyond_two_to_the_31():
    """A view whose last step is more than 2^31 elements behind its first."""
    inputs = make_inputs(1, 70, 1, 64, 64, "key")
    storage = torch.zeros(69 * 2**25 + 64, dtype=torch.bfloat16, device="cuda")
    inputs["v"] = storage.as_strided((1, 70, 1, 64), (0, 2**25, 64, 1)).copy_(inputs["v"])
    assert_right(inputs, plain=None)
