"""Causal softmax attention against its loop: torch's kernels, and those of this repository in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from subquad.kernels.attention import attention, attention_reference
from subquad.kernels.attention.triton.autograd import Tile, Tuning, attention_triton
from subquad.suite.laws.accuracy import assert_matches_reference

B, H, K = 2, 3, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tuning(32, Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1))
"""Tiles so small that short sequences have several, of queries and of keys."""


def small_triton(q, k, v, scale=None, **options):
    return attention_triton(q, k, v, scale=q.shape[-1] ** -0.5 if scale is None else scale, tuning=SMALL, **options)


OPS = {"torch": attention, "triton": small_triton}


def make_inputs(length: int, size: int = K, queries: int | None = None) -> dict:
    generator = torch.Generator().manual_seed(length)
    lengths = {"q": queries or length, "k": length, "v": length}
    return {
        name: torch.randn(B, steps, H, size, generator=generator, dtype=torch.float64)
        for name, steps in lengths.items()
    }


def make_positions(length: int, queries: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(queries)
    return torch.stack([torch.randperm(length, generator=generator)[:queries].sort().values for _ in range(B)])


@pytest.mark.parametrize(("length", "size"), [(1, 8), (33, 24), pytest.param(70, 64, marks=pytest.mark.slow)])
def test_products_of_parts_equal_the_loop(length, size):
    inputs = make_inputs(length, size)
    assert_matches_reference(small_triton, attention_reference, inputs, device=DEVICE, grad=length > 1)


@pytest.mark.parametrize("window", [1, 7, 33, 34, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_equals_the_loop(window, dtype):
    inputs = make_inputs(34) | {"window": window}
    # with a window of one the gradients of q and k are zero
    assert_matches_reference(attention, attention_reference, inputs, dtype=dtype, grad=window > 1)


@pytest.mark.parametrize("backend", OPS)
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_positive_shows_no_later_key(backend, scale):
    """A fused kernel that multiplies the logits by the scale behind the mask would make plus infinity or NaN of it."""
    inputs = make_inputs(34) | {"scale": scale}
    assert_matches_reference(OPS[backend], attention_reference, inputs, device=DEVICE, grad=False)


@pytest.mark.parametrize("windows", [(1, 7, 34), (2, 1000, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
def test_a_window_for_each_head_equals_the_loop(windows, dtype, grad):
    inputs = make_inputs(34) | {"window": torch.tensor(windows)}
    assert_matches_reference(attention, attention_reference, inputs, dtype=dtype, grad=grad)


@pytest.mark.parametrize("queries", [20, 3])
@pytest.mark.parametrize("window", [6, torch.tensor([1, 6, 34])], ids=["of all heads", "of each head"])
def test_queries_at_positions_with_a_window_equal_the_loop(queries, window):
    inputs = make_inputs(34, queries=queries) | {"positions": make_positions(34, queries), "window": window}
    assert_matches_reference(attention, attention_reference, inputs)


@pytest.mark.parametrize("backend", OPS)
@pytest.mark.parametrize(("length", "queries"), [(34, 20), (40, 3)])
def test_queries_at_positions_equal_the_loop(backend, length, queries):
    inputs = make_inputs(length, queries=queries) | {"positions": make_positions(length, queries)}
    assert_matches_reference(OPS[backend], attention_reference, inputs, device=DEVICE)


def test_large_and_small_numbers_keep_their_digits():
    """Every tile is scaled by a power of two of its own, and zeros stay zeros."""
    inputs = {name: x.float().to(DEVICE) for name, x in make_inputs(50, 16).items()}
    inputs["q"] *= 1e-12
    inputs["k"] *= 1e12
    # values grow by 1e6 within a tile
    inputs["v"] *= torch.logspace(-6, 3, 50, device=DEVICE)[:, None, None]
    inputs["v"][:, :, 0] = 0
    o = small_triton(**inputs)
    exact = attention_reference(**{name: x.double() for name, x in inputs.items()})
    assert not o[:, :, 0].any()
    size = exact.abs().amax(3, keepdim=True)
    assert ((o - exact).abs()[:, :, 1:] <= 3e-6 * size[:, :, 1:]).all()


def weights_that_dropout_keeps(q, k, dropout, seed):
    """The matrix of weights [B, H, T, T] after dropout: with unit vectors as values, it is the output."""
    torch.manual_seed(seed)
    length = q.shape[1]
    units = torch.eye(length, device=q.device)[None, :, None].expand(len(q), length, H, length)
    q, k = (torch.nn.functional.pad(x, (0, length - x.shape[3])) for x in (q, k))
    return small_triton(q, k, units, scale=0.3, dropout=dropout).permute(0, 2, 1, 3)


def test_dropout_drops_a_weight_of_each_pair_and_scales_the_others():
    rate, length = 0.3, 48
    q, k = (make_inputs(length)[name].float().to(DEVICE) for name in "qk")
    weights = weights_that_dropout_keeps(q, k, 0.0, 1)
    dropped = weights_that_dropout_keeps(q, k, rate, 1)
    is_kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(is_kept, weights / (1 - rate), 0.0), rtol=1e-5, atol=1e-7)
    past = torch.ones(length, length, device=DEVICE).tril().bool()
    kept = is_kept[..., past]
    deviation = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs(kept.float().mean().item() - (1 - rate)) < 4 * deviation
    # heads, rows and neighbouring queries and keys draw their own
    assert abs((kept[0] == kept[1]).float().mean().item() - 0.58) < 0.02
    for one, other in ((is_kept[:, :, 40:, :39], is_kept[:, :, 40:, 1:40]), (is_kept[:, :, 40:47], is_kept[:, :, 41:])):
        same = (one == other)[..., :39].float().mean().item()
        assert abs(same - (rate**2 + (1 - rate) ** 2)) < 0.05
    assert not torch.equal(is_kept, weights_that_dropout_keeps(q, k, rate, 2) != 0)


def test_gradients_with_dropout_are_those_of_the_weights_that_were_kept():
    rate, length = 0.4, 20
    inputs = make_inputs(length)
    q, k = (inputs[name].float().to(DEVICE) for name in "qk")
    is_kept = (weights_that_dropout_keeps(q, k, rate, 3) != 0).cpu()

    def masked(q, k, v, scale):
        scores = torch.einsum("bihk,bjhk->bhij", q, k) * scale
        future = torch.ones(length, length).triu(1).bool()
        weights = scores.masked_fill(future, -torch.inf).softmax(-1) * is_kept / (1 - rate)
        return torch.einsum("bhij,bjhk->bihk", weights, v)

    def op(**inputs):
        torch.manual_seed(3)
        return small_triton(**inputs, dropout=rate)

    assert_matches_reference(op, masked, inputs | {"scale": 0.3}, device=DEVICE)
