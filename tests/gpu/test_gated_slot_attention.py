"""Gated slot attention on a GPU: the laws of `tests/kernels/test_gated_slot_attention.py` at sizes of real use."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.gated_slot_attention import gated_slot_attention, gated_slot_attention_reference
from tests.gpu.real_sizes import assert_equals_plain_pytorch, results

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def with_state(op):
    """The operator with its pair of states as two arguments and its results as one flat tuple."""

    def flat(state_k, state_v, **inputs):
        o, final = op(**inputs, initial_state=(state_k, state_v), return_final_state=True)
        return o, *final

    return flat


TRITON = with_state(partial(gated_slot_attention, backend="triton"))
TORCH = with_state(partial(gated_slot_attention, backend="torch"))
REFERENCE = with_state(gated_slot_attention_reference)


def make_inputs(batch, length, heads, key_dim, value_dim, num_slots, dtype=torch.bfloat16, model="gsa"):
    g = torch.Generator("cuda").manual_seed(length)

    def randn(*size):
        return torch.randn(*size, generator=g, device="cuda", dtype=torch.float64)

    positions = (batch, length, heads)
    log_decay = F.logsigmoid(randn(*positions, num_slots)) / 8
    slots = -torch.expm1(log_decay)
    if model == "abc":
        slots, log_decay = torch.rand_like(slots) / length**0.5, None
    return {
        "q": randn(*positions, key_dim).to(dtype),
        "k": randn(*positions, key_dim).to(dtype),
        "v": 2 * randn(*positions, value_dim).to(dtype),
        "slots": slots.to(dtype),
        "log_decay": None if log_decay is None else log_decay.float(),
        # about as large as later ones, so that gradients are not those of the first positions alone
        "state_k": 0.25 * randn(batch, heads, key_dim, num_slots).float(),
        "state_v": 0.25 * randn(batch, heads, num_slots, value_dim).float(),
    }


@pytest.mark.parametrize(
    ("sizes", "dtype", "model"),
    [
        ((1, 450, 4, 512, 512, 64), torch.bfloat16, "gsa"),
        ((1, 450, 4, 512, 512, 64), torch.bfloat16, "abc"),
        ((1, 450, 2, 64, 64, 64), torch.float16, "gsa"),
        ((1, 450, 2, 64, 64, 64), torch.float32, "gsa"),
        ((2, 450, 2, 32, 64, 64), torch.bfloat16, "gsa"),
        ((1, 300, 2, 40, 24, 200), torch.bfloat16, "gsa"),
    ],
)
def test_real_sizes_equal_plain_pytorch_in_double_precision(sizes, dtype, model):
    inputs = make_inputs(*sizes, dtype, model)
    assert_equals_plain_pytorch(TRITON, REFERENCE, inputs, dtype, exact=TORCH)


def test_a_long_sequence_equals_plain_pytorch_in_double_precision():
    """Long enough for segments walked side by side."""
    inputs = make_inputs(1, 20_001, 2, 64, 64, 64)
    assert_equals_plain_pytorch(TRITON, REFERENCE, inputs, torch.bfloat16, exact=TORCH)
    found, again = results(TRITON, inputs), results(TRITON, inputs)
    assert all(torch.equal(x, again[name]) for name, x in found.items())
