"""Slices of one tensor are recognised, and nothing else is taken for them; lazy conjugates are resolved."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from subquad.kernels.layout import address, dense, places_in_one, slices_of_one

WHOLE = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_slices_in_their_order_give_the_tensor(axis):
    found = slices_of_one(WHOLE.unbind(axis), axis)
    assert found is not None
    assert found.data_ptr() == WHOLE.data_ptr()
    assert torch.equal(found, WHOLE)


@pytest.mark.parametrize(
    "parts",
    [
        (WHOLE[:, 1], WHOLE[:, 0], WHOLE[:, 2]),
        (WHOLE[:, 0], WHOLE[:, 0], WHOLE[:, 0]),
        (WHOLE[:, 0], WHOLE[:, 1], WHOLE[:, 1]),
        (WHOLE[:, 0], WHOLE[:, 1], WHOLE[:, 2].clone()),
        (WHOLE[:, 0], WHOLE[:, 1], WHOLE[:, 2, :, :4]),
        (WHOLE[:, 0, :4, :4], WHOLE[:, 1, :4, :4].transpose(1, 2), WHOLE[:, 2, :4, :4]),
        (WHOLE[:, 0], WHOLE[:, 1], WHOLE.view(torch.int32)[:, 2]),
    ],
    ids=["other order", "one slice", "one slice twice", "other memory", "other shape", "other strides", "other dtype"],
)
def test_other_tensors_do_not(parts):
    assert slices_of_one(parts, 1) is None


def test_places_are_offsets_in_elements():
    assert places_in_one([WHOLE[1, 2], WHOLE[0, 1]]) == [100, 20]
    assert places_in_one([WHOLE[1, 2], WHOLE[1, 2].clone()]) is None


def test_a_lazy_conjugate_becomes_memory_that_holds_its_values():
    x = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert not dense(x).is_conj()
    assert torch.equal(dense(x), x)


@pytest.mark.filterwarnings("error")
def test_a_tensor_without_memory_has_the_address_0():
    """torch warns where the address of a fake tensor is asked for, which it announces to be an error one day."""
    assert address(None) == 0
    assert address(WHOLE[1]) == WHOLE[1].data_ptr()
    with FakeTensorMode():
        assert address(torch.empty(4)) == 0
