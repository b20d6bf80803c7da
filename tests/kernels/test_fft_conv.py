"""Claims about the long convolution; the accuracy rule is that of `suite.laws.accuracy`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from subquad.kernels.fft_conv import _kernels_are_faster, fft_conv
from subquad.kernels.fft_conv.chunked import fast_length, fft_conv_chunked
from subquad.kernels.fft_conv.reference import fft_conv_reference
from subquad.kernels.fft_conv.triton import fft_conv_triton
from subquad.kernels.fft_conv.triton.autograd import fft_conv_fwd
from subquad.kernels.fft_conv.triton.chunks_gradient import chunks_gradient
from subquad.kernels.fft_conv.triton.gates import Gated, gated
from subquad.kernels.fft_conv.triton.half_size import half_size_conv
from subquad.kernels.fft_conv.triton.plan import TUNING, Operands, takes_long, takes_spectra
from subquad.kernels.fft_conv.triton.taps_gradient import taps_gradient
from subquad.kernels.layout import slices_of_one
from subquad.kernels.transpose import time_last
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = partial(fft_conv, backend="triton")
BF16 = torch.bfloat16
slow = partial(pytest.param, marks=pytest.mark.slow)


def make_inputs(length, filter_length, *, width=6, gates=True, skip=True):
    g = torch.Generator().manual_seed(length)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {"u": randn(2, length, width), "filter": randn(width, filter_length) / min(length, filter_length) ** 0.5}
    if skip:
        inputs["D"] = randn(width)
    if gates:
        inputs |= {"gate_in": randn(2, length, width), "gate_out": randn(2, length, width)}
    return inputs


@pytest.mark.parametrize("filter_length", [1, 7, 100])
def test_any_filter_length_without_options_equals_the_loop(filter_length):
    inputs = make_inputs(40, filter_length, gates=False, skip=False)
    assert_matches_reference(fft_conv, fft_conv_reference, inputs)


def test_fast_lengths_are_the_smallest_even_smooth_ones_or_a_power_of_two_close_by():
    def smooth(n):
        for p in (2, 3, 5):
            while n % p == 0:
                n //= p
        return n == 1

    for minimum in [*range(1, 700), 3855, 3856, 3999, 4095, 16385, 2**20 + 1]:
        candidates = [n for n in range(minimum + minimum % 2, 2 * minimum + 3) if n % 2 == 0 and n and smooth(n)]
        close = [n for n in candidates if n.bit_count() == 1 and 16 * n <= 17 * minimum]
        assert fast_length(minimum) == (close or candidates)[0]


@pytest.mark.parametrize(
    ("shape", "filter_length", "size"),
    # odd and even halves, one sequence and several to a program, taps up to the end of the circle
    [((2, 5, 3), 5, 10), ((3, 50, 4), 20, 72), ((1, 7, 1), 7, 14), ((3, 9, 40), 30, 40), slow((5, 300, 33), 300, 600)],
)
def test_transforms_of_half_the_size_convolve_real_sequences(shape, filter_length, size):
    g = torch.Generator().manual_seed(size)
    inputs = {"u": torch.randn(shape, generator=g, dtype=torch.float64)}
    inputs["filter"] = torch.randn(shape[2], filter_length, generator=g, dtype=torch.float64)
    assert_matches_reference(
        lambda u, filter: half_size_conv(u, filter, size), fft_conv_reference, inputs, device=DEVICE
    )


@pytest.mark.parametrize("filter_length", [1, 65, *(slow(n) for n in (63, 64, 130, 400))])
def test_the_kernel_takes_any_filter_length(filter_length):
    inputs = make_inputs(300, filter_length, width=3, gates=False, skip=False)
    assert_matches_reference(TRITON, fft_conv_reference, inputs, device=DEVICE)


@pytest.mark.parametrize("gates", [("gate_in",), ("gate_out",), ("gate_in", "gate_out")])
@pytest.mark.parametrize(("length", "filter_length"), [(20, 20), slow(70, 3), slow(200, 200)])
def test_few_taps_meet_any_gates_in_half_precision(length, filter_length, gates):
    inputs = make_inputs(length, filter_length, width=37)
    inputs = {name: x for name, x in inputs.items() if not name.startswith("gate") or name in gates}
    assert_matches_reference(TRITON, fft_conv_reference, inputs, dtype=BF16, device=DEVICE)


@pytest.mark.parametrize("gates", [("gate_in",), ("gate_out",), ("gate_in", "gate_out")])
@pytest.mark.parametrize("length", [20, slow(200)])
def test_few_taps_lose_no_bits_of_a_gated_input(length, gates):
    """Float32 results show it: with gated inputs rounded to bfloat16 they would be 2^-9 off.

    With two numbers a factor the error stays below 2^-16: that of the taps, and the product of the two rests.
    """
    drawn = make_inputs(length, length, width=3)
    streams = {name: drawn[name].bfloat16().to(DEVICE) for name in ("u", *gates)}
    taps = {name: drawn[name].float().to(DEVICE) for name in ("filter", "D")}
    dy = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)

    def gradients(function, convert):
        leaves = {name: convert(x).requires_grad_() for name, x in taps.items()}
        y = function(**{name: convert(x) for name, x in streams.items()}, **leaves)
        return torch.autograd.grad(y, list(leaves.values()), convert(dy))

    exact = gradients(fft_conv_reference, torch.Tensor.double)
    actual = gradients(TRITON, torch.Tensor.clone)
    u, gate = (time_last(streams[name]) for name in ("u", gates[0]))
    outputs, *_ = fft_conv_fwd(u, taps["filter"], taps["D"], gate, None, TUNING, with_plain=True)
    convolved = fft_conv_reference(u.double(), taps["filter"].double(), D=taps["D"].double(), gate_in=gate.double())
    for found, wanted in zip([outputs.plain, *actual], [convolved, *exact], strict=True):
        assert (found - wanted).norm() < 2**-16 * wanted.norm()


@pytest.mark.parametrize("length", [5, 20, 600, 3000])
def test_two_bfloat16_numbers_hold_a_gated_sequence_exactly(length):
    inputs = make_inputs(length, 1, width=3)
    x, gate = (time_last(inputs[name].bfloat16().to(DEVICE)) for name in ("u", "gate_in"))
    split, _, _ = gated(x, gate, Operands.TERMS)
    assert split.rest.any()
    assert torch.equal((split.product.double() + split.rest.double())[:, :length], x.double() * gate.double())
    # the kernels add up what lies beyond the sequence, so both numbers must be zero there
    assert not split.product[:, length:].any()
    assert not split.rest[:, length:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_streams_of_one_tensor_have_their_gradients_in_one_tensor(dtype, order):
    g = torch.Generator().manual_seed(0)
    batch, length, width = 2, 48, 5
    streams = torch.randn(batch, 3 * width, length, generator=g).to(DEVICE, dtype).transpose(1, 2).requires_grad_()
    parts = streams.unflatten(-1, (3, width)).unbind(2)
    dy = torch.randn(batch, width, length, generator=g).to(DEVICE, dtype).transpose(1, 2)
    filter, skip = torch.randn(width, length, generator=g).to(DEVICE), torch.randn(width, generator=g).to(DEVICE)

    def gradients(parts):
        gate_out, gate_in, u = (parts[i] for i in order)
        return torch.autograd.grad(fft_conv_triton(u, filter, D=skip, gate_in=gate_in, gate_out=gate_out), parts, dy)

    found = gradients(parts)
    whole = slices_of_one(found, 2)
    assert whole is not None
    assert torch.equal(whole, torch.stack(found, 2))
    separate = gradients([time_last(part.detach().contiguous()).requires_grad_() for part in parts])
    for gradient, expected in zip(found, separate, strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("options", ["gate_in", "gate_out", "D"])
def test_the_kernel_takes_each_option_alone(options):
    inputs = make_inputs(70, 70, width=3)
    inputs = {name: x for name, x in inputs.items() if name in ("u", "filter", options)}
    assert_matches_reference(TRITON, fft_conv_reference, inputs, device=DEVICE)


def results(op, inputs):
    """y and the gradient of every input, for a cotangent that is the same in every dtype."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y = op(**leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).bfloat16().to(y)
    return [y, *torch.autograd.grad(y, list(leaves.values()), dy)]


def loses_no_more_than_the_transform(op, inputs, memory="BTD"):
    """In bfloat16, for u in memory of this order: a stricter judge than a loop of bfloat16 sums."""
    exact = results(partial(fft_conv, backend="torch"), {n: x.double() for n, x in inputs.items()})
    plain = results(partial(fft_conv, backend="torch"), inputs)

    def laid_out(u, **rest):
        return op(u.transpose(1, 2).contiguous().transpose(1, 2) if memory == "BDT" else u, **rest)

    actual = results(laid_out, {name: x.to(DEVICE) for name, x in inputs.items()})
    for name, a, e, p in zip(["y", *inputs], actual, exact, plain, strict=True):
        assert_close(a, e, torch.bfloat16, plain=p, what=name)


@pytest.mark.parametrize("gates", [False, slow(True)])
def test_float32_sequences_of_unlike_sizes_keep_their_digits(gates):
    """Each sequence of a channel has a scale of its own, and one of zeros has none."""
    inputs = {name: x.float() for name, x in make_inputs(100, 70, width=4, gates=gates).items()}
    inputs["u"] *= torch.tensor([[1e-18, 1.0, 0.0, 1e12], [1e3, 1e-20, 0.0, 1.0]]).unsqueeze(1)
    inputs["filter"] *= torch.tensor([[1e-9], [1.0], [1.0], [1e6]])
    inputs["D"] *= torch.tensor([1e-9, 1.0, 1.0, 1e6])
    actual = results(TRITON, {name: x.to(DEVICE) for name, x in inputs.items()})
    exact = results(partial(fft_conv, backend="torch"), {name: x.double() for name, x in inputs.items()})
    for name, a, e in zip(["y", *inputs], actual, exact, strict=True):
        if e.ndim == 3:
            for row, channel in torch.cartesian_prod(torch.arange(2), torch.arange(4)):
                assert_close(a[row, :, channel].cpu(), e[row, :, channel], torch.float32, what=name)
        else:
            for channel in range(4):
                assert_close(a[channel].cpu(), e[channel], torch.float32, what=name)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_result_may_be_changed_in_place(backend):
    u, filter = (
        x.to(DEVICE, torch.float32).requires_grad_() for x in make_inputs(20, 20, gates=False, skip=False).values()
    )
    conv = partial(fft_conv, u, filter, backend=backend)
    changed, kept = (torch.autograd.grad(op(conv()).sum(), u) for op in (torch.sin_, torch.sin))
    assert torch.equal(changed[0], kept[0])


@pytest.mark.parametrize("by", ["products", "spectra", slow("whole sequences")])
@pytest.mark.parametrize(
    ("length", "filter_length", "gates", "memory"),
    [
        (513, 600, True, "BDT"),
        slow(513, 600, False, "BTD"),
        slow(1000, 1000, True, "BTD"),
        slow(1040, 520, False, "BDT"),
    ],
)
def test_bfloat16_loses_no_more_than_in_the_transform(length, filter_length, gates, memory, by):
    """Against the transform of the same rounded inputs, a stricter judge than a loop of bfloat16 sums."""
    never, lags = length + 1, min(length, filter_length)
    tuning = {
        "products": replace(TUNING, spectra_lags=never),
        "spectra": replace(TUNING, spectra_lags=1, spectra_rows=1),
        "whole sequences": replace(TUNING, spectra_lags=never, long_steps=1, long_lags=1),
    }[by]
    assert takes_spectra(2, length, BF16, lags, tuning) == (by == "spectra")
    assert takes_long(length, BF16, lags, tuning) == (by == "whole sequences")
    conv = partial(fft_conv_triton, tuning=tuning)
    inputs = make_inputs(length, filter_length, width=2, gates=gates)
    inputs = {n: x.float() if n in ("filter", "D") else x.bfloat16() for n, x in inputs.items()}
    loses_no_more_than_the_transform(conv, inputs, memory)


@pytest.mark.parametrize(
    ("batch", "length", "width", "filter_length"), [(2, 4500, 1, 4500), slow(2, 4500, 2, 4500), slow(70, 600, 2, 513)]
)
def test_tiles_of_two_parts_and_several_groups_of_sequences(batch, length, width, filter_length):
    g = torch.Generator().manual_seed(batch)
    u = torch.randn(batch, length, width, generator=g).bfloat16()
    filters = torch.randn(width, filter_length, generator=g) / filter_length**0.5
    inputs = {"u": u, "filter": filters, "D": torch.randn(width, generator=g)}
    loses_no_more_than_the_transform(TRITON, inputs)


@pytest.mark.parametrize(
    ("batch", "length", "lags", "gates", "memory"),
    [
        (2, 1, 1, False, "BTD"),
        (2, 1, 3, False, "BTD"),
        (2, 31, 1, False, "BTD"),
        (2, 31, 64, False, "BTD"),
        slow(70, 31, 3, False, "BTD"),
        slow(3, 1000, 3, False, "BTD"),
        slow(3, 1000, 64, False, "BTD"),
        slow(9, 1040, 64, False, "BDT"),
        slow(2, 1000, 64, True, "BTD"),
        (2, 300, 129, False, "BTD"),
    ],
)
def test_a_few_taps_lose_no_more_than_the_transform(batch, length, lags, gates, memory):
    """With the skip D, also in batches that do not fill a tile."""
    g = torch.Generator().manual_seed(length)
    shapes = {"u": (batch, length, 3), "filter": (3, lags), "D": (3,)}
    if gates:
        shapes |= dict.fromkeys(("gate_in", "gate_out"), (batch, length, 3))
    inputs = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    inputs["filter"] /= min(length, lags) ** 0.5
    inputs = {n: x if n in ("filter", "D") else x.bfloat16() for n, x in inputs.items()}
    loses_no_more_than_the_transform(TRITON, inputs, memory)


@pytest.mark.parametrize("skip", [None, 2.0**-9])
def test_what_rounding_leaves_of_a_tap_is_kept(skip):
    """The result is what only the second term of a tap holds: bfloat16 has no number between 1 and 1 + 2^-7."""
    u = torch.ones(1, 100, 1, dtype=torch.bfloat16, device=DEVICE)
    filter = torch.tensor([[1.0 if skip else 1.0 + 2.0**-9, -1.0]], device=DEVICE)
    D = None if skip is None else torch.tensor([skip], device=DEVICE)
    y = TRITON(u, filter, D=D)
    assert torch.equal(y[0, 1:, 0], torch.full_like(y[0, 1:, 0], 2.0**-9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 65, 130), (2, 200, 7)])
def test_time_comes_last_in_memory_whatever_came_last_before(shape, dtype):
    x = torch.randn(*shape[:2], 2 * shape[2], generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    for given in (x[..., : shape[2]], x[..., ::2], x[:, :, :1].expand(shape), x.sum().expand(shape)):
        transposed = time_last(given)
        assert torch.equal(transposed, given)
        assert transposed.stride(1) == 1 or shape[1] == 1
    assert time_last(transposed) is transposed


def test_the_future_changes_the_past_of_float32_by_its_scale_alone():
    """A future element a thousand times larger than the others sets another scale, which rounds halves elsewhere."""
    inputs = {name: x.float().to(DEVICE) for name, x in make_inputs(100, 100, width=2, gates=False).items()}
    whole = TRITON(**inputs)
    changed = inputs["u"].clone()
    changed[:, 40] += 1e3
    y = TRITON(**(inputs | {"u": changed}))
    torch.testing.assert_close(y[:, :40], whole[:, :40], rtol=0, atol=1e-6)
    assert (y[:, 40:] - whole[:, 40:]).abs().max() > 10


def test_filters_too_long_for_the_kernel_are_transformed():
    inputs = {name: x.float().to(DEVICE) for name, x in make_inputs(70, 70).items()}
    for most, is_transformed in ((69, True), (70, False)):
        y = fft_conv_triton(**inputs, tuning=replace(TUNING, max_lags_others=most, halves_steps=0))
        assert torch.equal(y, fft_conv_chunked(**inputs, backend="triton")) == is_transformed


def gradient_of_taps(x, g, lags):
    """The gradient of the taps from x and g [B, T, D] by spectra, and the exact one."""
    x, g = (v.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for v in (x, g))
    length = x.shape[1]
    size = 2 * length
    x_hat, g_hat = (torch.fft.rfft(v.double().transpose(1, 2), n=size) for v in (x, g))
    exact = torch.fft.irfft((x_hat.conj() * g_hat).sum(0), n=size)[:, :lags]
    return taps_gradient(x.to(DEVICE), g.to(DEVICE), length, lags).cpu(), exact


@pytest.mark.parametrize(
    ("batch", "length", "lags"), [(3, 16, 1), (2, 1024, 1024), (2, 2512, 100), slow(5, 1040, 600), slow(2, 6160, 6160)]
)
def test_spectra_lose_a_tenth_of_a_percent_of_the_gradient_of_taps(batch, length, lags):
    """In one block and in several, with as many lags as steps and with fewer."""
    g = torch.Generator().manual_seed(length)
    x, dy = torch.randn(2, batch, length, 3, generator=g)
    actual, exact = gradient_of_taps(x, dy, lags)
    assert_close(actual, exact, torch.bfloat16, floor=1e-3)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 4095), (17, 16), (1023, 1024), (2047, 4000), (3000, 100)])
def test_a_pair_of_impulses_reaches_its_lag_and_no_other(first, second):
    """Nothing wraps around between blocks or from the future."""
    x, dy = torch.zeros(2, 1, 4096, 1)
    x[0, first], dy[0, second] = 1.0, 1.0
    actual, _ = gradient_of_taps(x, dy, 4096)
    expected = torch.zeros(1, 4096)
    if second >= first:
        expected[0, second - first] = 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("scale", [1e-18, 1e6, slow(1e-7), slow(1.0)])
def test_the_size_of_gradients_does_not_matter(scale):
    """Beyond the range of float16 (6e-8 to 7e4), and for sequences of one channel that differ in size."""
    g = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 2, 1024, 2, generator=g)
    x[1] *= 1e-9
    dy[1] *= 1e9
    actual, exact = gradient_of_taps(x, scale * dy, 1024)
    assert_close(actual, exact, torch.bfloat16, floor=1e-3)


def test_the_gradient_of_taps_repeats_bitwise():
    x, dy = torch.randn(2, 3, 1024, 2)
    assert torch.equal(gradient_of_taps(x, dy, 1024)[0], gradient_of_taps(x, dy, 1024)[0])


def gradient_of_few_taps(x, g, lags):
    """The gradient of the taps from x and g [B, T, D] by products of chunks, and the exact one."""
    x, g = (v.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for v in (x, g))
    length = x.shape[1]
    exact = torch.zeros(x.shape[2], lags, dtype=torch.float64)
    for lag in range(min(lags, length)):
        exact[:, lag] = (x[:, : length - lag].double() * g[:, lag:].double()).sum((0, 1))
    source, gradient = (Gated(v.to(DEVICE), v.to(DEVICE), None) for v in (x, g))
    return chunks_gradient(source, gradient, length, lags).cpu(), exact


@pytest.mark.parametrize(
    ("batch", "length", "lags"),
    [(3, 16, 1), (2, 1000, 64), (1, 130, 100), slow(70, 31, 7), slow(6, 4200, 64), slow(5, 300, 128)],
)
def test_products_of_chunks_lose_a_hundred_thousandth_of_the_gradient_of_taps(batch, length, lags):
    """In several groups of chunks, sequences and lags, with tiles that are not full and sums over several programs."""
    g = torch.Generator().manual_seed(length)
    x, dy = torch.randn(2, batch, length, 2, generator=g)
    actual, exact = gradient_of_few_taps(x, dy, lags)
    assert_close(actual, exact, torch.bfloat16, floor=1e-5)
    assert torch.equal(actual, gradient_of_few_taps(x, dy, lags)[0])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 63), (63, 64), (17, 16), (70, 169), (70, 170), (299, 299)])
def test_a_pair_of_impulses_reaches_its_lag_alone_among_few(first, second):
    x, dy = torch.zeros(2, 1, 300, 1)
    x[0, first], dy[0, second] = 1.0, 1.0
    actual, _ = gradient_of_few_taps(x, dy, 100)
    expected = torch.zeros(1, 100)
    if 0 <= second - first < 100:
        expected[0, second - first] = 1.0
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("batch", "length", "width", "lags", "dtype", "expected"),
    [
        (8, 1024, 1024, 1024, torch.bfloat16, True),
        (8, 16384, 1024, 16384, torch.bfloat16, True),
        (8, 32768, 1024, 32768, torch.bfloat16, True),
        (1, 2**18, 8, 2**18, torch.bfloat16, True),
        (1, 2**18 + 1, 8, 2**18 + 1, torch.bfloat16, False),
        (1, 2**18 + 1, 8, 16384, torch.bfloat16, True),
        (8, 512, 64, 512, torch.bfloat16, False),
        (8, 2048, 1024, 64, torch.bfloat16, True),
        (64, 512, 64, 64, torch.bfloat16, True),
        (8, 512, 64, 64, torch.bfloat16, False),
        (8, 1024, 1024, 1024, torch.float32, False),
        (50, 1024, 512, 1024, torch.float32, False),
        (50, 512, 512, 512, torch.float32, True),
        (128, 512, 128, 512, torch.float32, True),
        (128, 512, 128, 4, torch.float32, True),
        (16, 512, 32, 512, torch.float32, False),
        (50, 2048, 128, 2048, torch.float32, False),
        (8, 1024, 1024, 1024, torch.float16, False),
    ],
)
def test_auto_takes_the_kernels_where_they_were_measured_to_be_faster(batch, length, width, lags, dtype, expected):
    u = torch.empty(batch, length, width, dtype=dtype, device="meta")
    filters = torch.empty(width, lags, device="meta")
    assert _kernels_are_faster(u, filters, False) is expected
    if lags > 64 or dtype == torch.float32:
        assert _kernels_are_faster(u, filters, True) is expected


@pytest.mark.parametrize(
    ("batch", "length", "width", "lags", "expected"),
    [
        (128, 32, 512, 32, True),
        (128, 256, 512, 256, True),
        (128, 511, 64, 8, True),
        (64, 32, 512, 32, False),
        (128, 512, 64, 8, False),
        (8, 2048, 1024, 64, False),
    ],
)
def test_auto_takes_the_kernels_for_short_sequences_with_gates(batch, length, width, lags, expected):
    u = torch.empty(batch, length, width, dtype=torch.bfloat16, device="meta")
    assert _kernels_are_faster(u, torch.empty(width, lags, device="meta"), True) is expected
