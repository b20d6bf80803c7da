"""Claims about the long convolution by spectra of blocks; the accuracy rule is that of `suite.laws.accuracy`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

pytest.importorskip("triton")
from subquad.kernels.fft_conv.triton.epilogue import Epilogue
from subquad.kernels.fft_conv.triton.gates import Gated
from subquad.kernels.fft_conv.triton.inner_stage import conv_long, long_taps
from subquad.kernels.fft_conv.triton.plan import fits_spectra
from subquad.kernels.fft_conv.triton.spectra import conv_spectra, taps_spectra
from subquad.kernels.fft_conv.triton.tables import TableCache, make_tables
from subquad.suite.laws.accuracy import assert_close, relative_error

slow = partial(pytest.param, marks=pytest.mark.slow)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WITHOUT_ROUNDING = {"spectra": 1.3e-3, "whole": 1.4e-3}
"""Relative error, root mean square, that transforms in float16 may make; rounding y to bfloat16 adds 1.7e-3."""

by_both = pytest.mark.parametrize("by", ["spectra", slow("whole")])


def draw(batch, length, width, lags):
    """x [B, T, D] in bfloat16 with time contiguous, taps [D, L]."""
    g = torch.Generator().manual_seed(length + lags)
    x = torch.randn(batch, width, length, generator=g).bfloat16().transpose(1, 2)
    return x, torch.randn(width, lags, generator=g) / lags**0.5


def exact_conv(x, taps, reverse):
    size = 2 * x.shape[1]
    x_hat, taps_hat = torch.fft.rfft(x.transpose(1, 2).double(), n=size), torch.fft.rfft(taps.double(), n=size)
    y = torch.fft.irfft(x_hat * (taps_hat.conj() if reverse else taps_hat), n=size)
    return y[..., : x.shape[1]].transpose(1, 2)


def conv(x, taps, reverse=False, direct_gate=None, by="spectra", **factors):
    """y, its value before it is scaled or rounded, and the product; by spectra of blocks or of whole sequences."""
    lags = min(x.shape[1], taps.shape[1])
    x, taps = x.to(DEVICE), taps.to(DEVICE)
    transform, convolve = (taps_spectra, conv_spectra) if by == "spectra" else (long_taps, conv_long)
    spectra, epilogue = transform(taps, x.shape[1], lags), Epilogue(**factors, with_plain=True)
    results = convolve(Gated(x, x, direct_gate), spectra, epilogue, reverse)
    return [None if result is None else result.cpu() for result in results]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("by", "batch", "length", "lags"),
    [
        ("spectra", 1, 16, 1),
        ("spectra", 2, 1024, 1024),
        slow("spectra", 3, 1040, 1040),
        slow("spectra", 2, 2512, 100),
        ("spectra", 3, 2512, 2100),
        ("spectra", 1, 4096, 4096),
        slow("spectra", 5, 6160, 6160),
        slow("spectra", 1, 8192, 2048),
        slow("spectra", 1, 16384, 16384),
        ("whole", 2, 16, 1),
        ("whole", 1, 2512, 2100),
        slow("whole", 3, 4096, 4096),
        slow("whole", 1, 34000, 34000),
        slow("whole", 1, 70000, 3000),
    ],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_spectra_lose_a_tenth_of_a_percent(by, batch, length, lags, reverse):
    """In one block or row and in several, with as many lags as steps and with fewer."""
    x, taps = draw(batch, length, 3 if by == "spectra" else 2, lags)
    y, plain, _ = conv(x, taps, reverse, by=by)
    exact = exact_conv(x, taps, reverse)
    assert_close(plain, exact, torch.bfloat16, floor=WITHOUT_ROUNDING[by])
    assert torch.equal(y, plain.bfloat16())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("by", "places"),
    [
        ("spectra", [17, 2048, 4095]),
        slow("spectra", [0, 17, 1023, 1024, 2047, 2048, 3000, 4095, 4096, 6159]),
        slow("whole", [17, 2048, 4095, 5000]),
    ],
    ids=["three places", "ten places", "whole"],
)
def test_an_impulse_reaches_its_lags_and_no_other(by, places, reverse):
    """Nothing wraps around between blocks or from the future."""
    x, taps = torch.zeros(len(places), len(places), 6160), torch.zeros(len(places), 6160)
    expected = torch.zeros(len(places), 6160, len(places))
    for i, place in enumerate(places):
        x[i, :, place] = taps[i, place] = 1.0
        for j, lag in enumerate(places):
            to = place - lag if reverse else place + lag
            if 0 <= to < 6160:
                expected[i, to, j] = 1.0
    _, plain, _ = conv(x.bfloat16().transpose(1, 2), taps, reverse, by=by)
    torch.testing.assert_close(plain, expected, rtol=0, atol=2e-3 if by == "spectra" else 3e-3)


@pytest.mark.parametrize("options", ["skip", "direct_gate", "scale", "other"])
@pytest.mark.parametrize("reverse", [False, True])
def test_options_follow_the_sum(options, reverse):
    x, taps = draw(2, 1040, 3, 1040)
    other, exact = draw(2, 1040, 3, 1)[0].to(DEVICE), exact_conv(x, taps, reverse)
    skip = torch.randn(3, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    arguments = {"skip": {"skip": skip}, "direct_gate": {"skip": skip, "direct_gate": other}}
    y, plain, product = conv(x, taps, reverse, **arguments.get(options, {options: other}))
    other, skip = other.cpu().double(), skip.cpu().double()
    if options in ("skip", "direct_gate"):
        exact = exact + skip * (x * other if options == "direct_gate" else x).double()
    assert_close(plain, exact, torch.bfloat16, floor=WITHOUT_ROUNDING["spectra"])
    # a product of normal numbers is at times so large that its rounding alone misses the floor
    scaled = exact * other if options == "scale" else exact
    assert_close(y, scaled, torch.bfloat16, plain=scaled.bfloat16())
    assert (product is not None) == (options == "other")
    if options == "other":
        assert_close(product, exact * other, torch.bfloat16, plain=(exact * other).bfloat16())


@by_both
def test_sequences_and_channels_do_not_meet(by):
    """Bitwise, also where several sequences share a program."""
    x, taps = draw(6, 2512, 4, 2512)
    _, whole, _ = conv(x, taps, by=by)
    changed = x.clone()
    changed[2, :, 3] *= 1e6
    _, plain, _ = conv(changed, taps, by=by)
    same = torch.ones(6, 4, dtype=torch.bool)
    same[2, 3] = False
    assert torch.equal(plain.transpose(1, 2)[same], whole.transpose(1, 2)[same])
    assert_close(plain[2, :, 3], exact_conv(changed, taps, False)[2, :, 3], torch.bfloat16, floor=WITHOUT_ROUNDING[by])


@by_both
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("scale", [1e-18, 1e6, slow(1e-7)])
def test_the_size_of_neither_matters(scale, reverse, by):
    """Beyond the range of float16 (6e-8 to 7e4), and for sequences and channels that differ in size."""
    x, taps = draw(2, 2512, 4, 2512)
    x, taps = (x.float() * scale).bfloat16(), taps.clone()
    x[1] *= 1e-6
    taps[2] *= 1e8
    _, plain, _ = conv(x, taps, reverse, by=by)
    exact = exact_conv(x, taps, reverse)
    for i in range(2):
        for j in range(4):
            assert_close(plain[i, :, j], exact[i, :, j], torch.bfloat16, floor=WITHOUT_ROUNDING[by])


@pytest.mark.parametrize("by", WITHOUT_ROUNDING)
def test_taps_with_one_strong_frequency_leave_the_rest(by):
    """The spectrum is 500 times its median at zero, where float16 needs its range."""
    x, _ = draw(1, 4096, 2, 1)
    taps = 0.02 * torch.ones(2, 4096) + draw(1, 4096, 2, 4096)[1]
    _, plain, _ = conv(x, taps, by=by)
    assert_close(plain, exact_conv(x, taps, False), torch.bfloat16, floor=WITHOUT_ROUNDING[by])


@pytest.mark.parametrize("lags", [8192, slow(600)])
def test_what_was_a_thousand_times_larger_does_not_drown_what_follows(lags):
    """Each sixteenth of a sequence that decays by 1e3 keeps two digits; a single block would lose all of the last."""
    x, taps = draw(2, 8192, 2, lags)
    decay = torch.exp(-6.9 * torch.arange(8192) / 8192)
    x, taps = (x.float() * decay[:, None]).bfloat16(), taps * decay[:: 8192 // lags][:lags]
    _, plain, _ = conv(x, taps)
    for part, exact in zip(plain.chunk(16, 1), exact_conv(x, taps, False).chunk(16, 1), strict=True):
        assert relative_error(part, exact)[0] < 1e-2


@pytest.mark.parametrize("by", WITHOUT_ROUNDING)
def test_zeros_give_zeros(by):
    x, taps = draw(1, 2512, 1, 2512)
    assert not conv(0 * x, taps, by=by)[1].any()
    assert not conv(x, 0 * taps, by=by)[1].any()


@by_both
def test_strided_taps_and_inputs_are_read_in_place(by):
    x, taps = draw(2, 2512, 3, 2512)
    wide = torch.zeros(2, 5, 2 * 2512, dtype=torch.bfloat16)
    wide[:, 1:4, 16 : 16 + 2512] = x.transpose(1, 2)
    view = wide[:, 1:4, 16 : 16 + 2512].transpose(1, 2)
    assert torch.equal(conv(view, taps.t().contiguous().t(), by=by)[1], conv(x, taps, by=by)[1])


@pytest.mark.parametrize(
    ("length", "dtype", "expected"),
    [
        (1024, torch.bfloat16, True),
        (16384, torch.bfloat16, True),
        (16400, torch.bfloat16, False),
        (1024, torch.float32, False),
    ],
)
def test_what_spectra_take(length, dtype, expected):
    assert fits_spectra(length, dtype, 100) is expected


def test_tables_are_made_once_and_not_kept_from_the_memory_of_a_graph(monkeypatch):
    made = []
    tables = TableCache(make=lambda n, device: made.append(n) or (n,))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    gpu, recording = torch.device("cuda", 0), True
    tables.get(16, gpu)
    tables.get(16, gpu)
    assert made == [16, 16]
    recording = False
    tables.get(16, gpu)
    recording = True
    tables.get(16, gpu)
    tables.get(32, gpu)
    assert made == [16, 16, 16, 32]


def test_tables_of_fake_tensors_are_not_kept():
    """Their address is 0, from which a later call with real tensors would read."""
    tables = TableCache(make_tables)
    with FakeTensorMode():
        assert isinstance(tables.get(16, torch.device("cpu")).inner, FakeTensor)
    assert not isinstance(tables.get(16, torch.device("cpu")).inner, FakeTensor)
