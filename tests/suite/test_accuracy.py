"""The comparison itself must fail on what kernels get wrong."""

import pytest
import torch

from subquad.suite.laws.accuracy import assert_close, assert_matches_reference, relative_error


def product(x, w):
    return torch.sin(x) * w, (x * w).sum(0)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(40, 5, generator=generator, dtype=torch.float64) for name in ("x", "w")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_matches_itself(inputs, dtype):
    assert_matches_reference(product, product, inputs, dtype=dtype)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (lambda x, w: (product(x, w)[0] * 0, product(x, w)[1]), "output 0"),
        (lambda x, w: (product(x, w)[0], product(x, w)[1] * 0), "output 1"),
        (lambda x, w: product(x, w.detach()), "gradient of w is missing"),
        (lambda x, w: (product(x, w)[0] * 1.001, product(x, w)[1]), "output 0"),
        (lambda x, w: (product(x, w)[0] * float("nan"), product(x, w)[1]), "not finite"),
        (lambda x, w: (product(x, w)[0], product(x.detach(), w)[1]), "gradient of x"),
    ],
    ids=["zero output", "zero state", "missing gradient", "slightly off", "nan", "partial gradient"],
)
def test_a_mutant_fails(inputs, mutant, message):
    with pytest.raises(AssertionError, match=message):
        assert_matches_reference(mutant, product, inputs)


@pytest.mark.parametrize(("name", "wrong"), [("rms", 100), ("max", 1)])
def test_an_error_may_be_twice_that_of_plain_pytorch_and_no_more(name, wrong):
    """Plain PyTorch errs in all elements; where one alone is wrong, only the rule of the largest element can fail."""
    exact = torch.ones(100, dtype=torch.float64)

    def off_by(error):
        return torch.cat([exact[:wrong] + error, exact[wrong:]])

    assert_close(off_by(0.019), exact, torch.float64, plain=exact + 0.01)
    with pytest.raises(AssertionError, match=f"{name} error"):
        assert_close(off_by(0.021), exact, torch.float64, plain=exact + 0.01)


def test_one_wrong_element_in_bfloat16_fails(inputs):
    def mutant(x, w):
        y, s = product(x, w)
        offset = torch.zeros_like(y)
        offset[3, 2] = 0.3
        return y + offset, s

    with pytest.raises(AssertionError, match=r"output 0: (max|rms)"):
        assert_matches_reference(mutant, product, inputs, dtype=torch.bfloat16)


def test_tiny_test_data_are_refused(inputs):
    with pytest.raises(AssertionError, match="order one"):
        assert_matches_reference(product, product, {"x": inputs["x"] * 1e-4, "w": inputs["w"]})


def test_an_element_is_judged_by_its_own_size_only_where_that_is_above_the_mean():
    exact = torch.tensor([30.0, *[1.0] * 99], dtype=torch.float64)
    scale = exact.square().mean().sqrt().item()
    off = exact.clone()
    off[0] += 3.0
    assert relative_error(off, exact)[1] == pytest.approx(0.1)
    off = exact.clone()
    off[5] += 0.1
    assert relative_error(off, exact)[1] == pytest.approx(0.1 / scale)
