"""The launcher that keeps compiled kernels, with a kernel and tensors that only say what they are asked."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton

from kernels.autograd import save, saved
from kernels.causal_conv1d import causal_conv1d
from kernels.fft_conv import fft_conv
from kernels.gated_linear_attention import gated_linear_attention
from kernels.launch import CompileOptions, KeptLaunch, KeptLaunches, Launcher, cdiv, overlap_options, power_of_2
from kernels.layout import spec
from kernels.lti_ssm import lti_ssm
from kernels.selective_scan import selective_scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

STREAM = 17


class Kernel:
    """Keeps what Triton's public `kernel[grid](...)` was asked for, and with what its answers were relaunched."""

    arg_names = ("x", "y", "T", "scale", "BLOCK", "PRECISE")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name.isupper() and name != "T") for name in arg_names)

    def __init__(self):
        self.asked, self.started = [], []

    def __getitem__(self, grid):
        def ask(*args, **named):
            self.asked.append((grid, args, named))
            return Compiled(self)

        return ask


class Compiled:
    function, packed_metadata = "handle", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, x, y, z, *given):
        # no metadata of the launch and no hooks
        assert given[:6] == (STREAM, "handle", "metadata", None, None, None)
        self.kernel.started.append(((x, y, z), given[6:]))


def tensor(address=0, dtype=torch.float32, index=0):
    return SimpleNamespace(
        is_cuda=True, dtype=dtype, data_ptr=lambda: address, device=SimpleNamespace(index=index, type="cuda")
    )


def launcher(version="3.9.0"):
    return Launcher(version, current_stream=lambda device: STREAM)


@pytest.fixture
def kernel(monkeypatch):
    """A kernel with a launcher of its own, as on an NVIDIA GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    kernel = Kernel()
    kernel.launch = launcher()
    return kernel


def start(kernel, x=None, y=None, length=48, scale=0.5, grid=7, **constants):
    kernel.launch(
        kernel,
        grid,
        tensor() if x is None else x,
        y,
        length,
        scale,
        **({"PRECISE": False, "BLOCK": 64, "num_warps": 4} | constants),
    )


def test_the_second_launch_does_not_ask_triton(kernel):
    x = tensor()
    start(kernel, x)
    start(kernel, x, length=96, scale=0.25, grid=9)
    assert len(kernel.asked) == 1
    # constexprs in the order of the parameters, options left out
    assert kernel.started == [((9, 1, 1), (x, None, 96, 0.25, 64, False))]


@pytest.mark.parametrize("num_given", range(5))
def test_arguments_may_be_named(kernel, num_given):
    arguments = {"x": tensor(), "y": None, "T": 48, "scale": 0.5, "BLOCK": 64, "PRECISE": False, "num_warps": 4}
    given, named = list(arguments.values())[:num_given], dict(list(arguments.items())[num_given:])
    for grid in (7, 9):
        kernel.launch(kernel, grid, *given, **named)
    assert kernel.asked == [((7,), tuple(given), named)]
    assert kernel.started == [((9, 1, 1), (arguments["x"], None, 48, 0.5, 64, False))]


def test_named_arguments_in_another_order_are_refused(kernel):
    with pytest.raises(TypeError, match="in the order"):
        kernel.launch(kernel, 7, tensor(), T=48, y=None, scale=0.5, BLOCK=64, PRECISE=False)


@pytest.mark.parametrize("version", ["3.6.0", "3.9.1"])
def test_kernels_are_relaunched_on_the_versions_of_triton_that_this_was_tested_on(kernel, version):
    kernel.launch = launcher(version)
    start(kernel)
    start(kernel)
    assert (len(kernel.asked), len(kernel.started)) == (1, 1)


@pytest.mark.parametrize("version", ["3.5.1", "3.7.0", "3.60.0", "4.0"])
def test_other_versions_of_triton_launch_themselves(kernel, version):
    kernel.launch = launcher(version)
    x, constants = tensor(16), {"PRECISE": False, "BLOCK": 64, "num_warps": 4}
    start(kernel, x)
    start(kernel, x)
    ready = kept(kernel)
    ready(x, None)
    ready(x=x, y=None)
    assert kernel.asked == [((7,), (x, None, 48, 0.5), constants)] * 4
    assert not kernel.started


def test_the_public_launch_gives_what_the_kernel_computes():
    """The public path and that of this version of Triton, with a real kernel; on a GPU the second one relaunches."""
    from kernels.transpose import TILE, _transpose_kernel

    x, out = torch.randn(1, 3, 2, device=DEVICE), torch.zeros(1, 2, 3, device=DEVICE)
    names = {"T": 3, "D": 2, "stride_b": 6, "stride_t": 2, "stride_d": 1, "BLOCK_T": TILE.steps}
    names["BLOCK_D"] = TILE.channels
    for version in ("3.5.0", triton.__version__):
        out.zero_()
        for _ in range(2):
            Launcher(version)(_transpose_kernel, 1, x=x, out=out, **names)
        assert torch.equal(out, x.mT)


def test_a_grid_of_two_axes_stays_one(kernel):
    start(kernel, grid=(3, 5))
    start(kernel, grid=(3, 5))
    assert kernel.asked[0][0] == (3, 5)
    assert kernel.started[0][0] == (3, 5, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"x": tensor(address=8)},
        {"x": tensor(dtype=torch.bfloat16)},
        {"x": tensor(index=1)},
        {"y": tensor()},
        {"length": 49},
        {"length": 1},
        {"length": -(2**31) - 1},
        {"length": 2**31},
        {"scale": 1},
        {"BLOCK": 128},
        {"num_warps": 8},
    ],
    ids=[
        "another address",
        "dtype",
        "device",
        "tensor",
        "no multiple of 16",
        "one",
        "64 bits, negative",
        "64 bits",
        "kind of number",
        "constexpr",
        "option",
    ],
)
def test_whatever_triton_may_compile_for_is_asked_for(kernel, change):
    start(kernel)
    start(kernel, **change)
    assert len(kernel.asked) == 2
    assert not kernel.started
    start(kernel, **change)
    assert len(kernel.asked) == 2
    assert len(kernel.started) == 1


def test_tensors_that_are_not_on_an_nvidia_gpu_always_ask(kernel, monkeypatch):
    for _ in range(2):
        start(kernel, torch.zeros(1))
    monkeypatch.setattr(torch.version, "cuda", None)
    start(kernel)
    assert len(kernel.asked) == 3


def test_a_profiler_gets_what_triton_tells_it(kernel, monkeypatch):
    start(kernel)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    start(kernel)
    assert len(kernel.asked) == 2
    assert not kernel.started


def kept(kernel, grid=7):
    return KeptLaunch(kernel, grid, 48, 0.5, PRECISE=False, BLOCK=64, num_warps=4, launcher=kernel.launch)


def test_a_kept_launch_starts_with_addresses_once_triton_has_compiled(kernel):
    ready = kept(kernel)
    for address in (16, 32, 48):
        ready(tensor(address), None)
    assert len(kernel.asked) == 1
    assert kernel.started[1:] == [((7, 1, 1), (48, None, 48, 0.5, 64, False))]


def test_a_kept_launch_may_name_everything(kernel):
    named = {"T": 48, "scale": 0.5, "BLOCK": 64, "PRECISE": False, "num_warps": 4}
    ready = KeptLaunch(kernel, 7, **named, launcher=kernel.launch)
    for address in (16, 32, 48):
        ready(x=tensor(address), y=None)
    assert [given[2] for given in kernel.asked] == [named]
    assert kernel.started[1:] == [((7, 1, 1), (48, None, 48, 0.5, 64, False))]
    with pytest.raises(TypeError, match="in the order"):
        ready(y=None, x=tensor())


def test_kept_launches_are_made_once_a_key():
    made = []
    launches = KeptLaunches()
    for key in "aba":
        launches.get(key, lambda key=key: made.append(key) or key)
    assert made == ["a", "b"]
    assert KeptLaunches(keep=False).get("a", list) is not None
    once = KeptLaunches(keep=False)
    assert once.get("a", list) is not once.get("a", list)


def test_a_kept_launch_looks_again_at_an_address_that_is_no_multiple_of_16(kernel):
    ready = kept(kernel)
    for _ in range(3):
        ready(tensor(16), tensor(32))
    ready(tensor(16), tensor(8))
    # compiled for that one, and the one before is not forgotten
    assert len(kernel.asked) == 2
    ready(tensor(64), tensor(32))
    assert len(kernel.asked) == 2
    assert kernel.started[-1][1][:2] == (64, 32)


def test_a_kept_launch_of_addresses_that_are_no_multiples_of_16_keeps_nothing(kernel):
    ready = kept(kernel)
    x = tensor(8)
    for _ in range(3):
        ready(x, None)
    assert len(kernel.asked) == 1
    assert [given[0] for _, given in kernel.started] == [x, x]


def test_a_profiler_gets_what_triton_tells_it_of_a_kept_launch(kernel, monkeypatch):
    ready = kept(kernel, grid=(3, 5))
    for _ in range(3):
        ready(tensor(), None)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    ready(tensor(), None)
    assert len(kernel.asked) == 2
    assert kernel.asked[1][0] == (3, 5)


def test_sizes_round_up():
    assert [cdiv(n, 4) for n in (1, 4, 5)] == [1, 1, 2]
    assert [power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_a_kernel_gets_complex_numbers_as_pairs(kernel, monkeypatch):
    pairs = tensor(32)
    monkeypatch.setattr(torch, "view_as_real", lambda x: pairs)
    ready = kept(kernel)
    for _ in range(2):
        ready(tensor(32, torch.complex64), None)
    assert kernel.asked == [((7,), (pairs, None, 48, 0.5), {"PRECISE": False, "BLOCK": 64, "num_warps": 4})]
    assert kernel.started == [((7, 1, 1), (pairs, None, 48, 0.5, 64, False))]
    ready(tensor(48, torch.complex64), None)
    assert kernel.started[1:] == [((7, 1, 1), (48, None, 48, 0.5, 64, False))]


def test_specs_tell_apart_what_kernels_are_compiled_for():
    x = torch.empty(2, 3)
    others = torch.empty(3, 2), torch.empty(3, 2).T, x.half(), torch.empty(2, 3, device="meta"), None
    assert spec(x) == spec(torch.zeros(2, 3))
    assert spec(x) not in [spec(other) for other in others]


def test_options_that_are_not_chosen_are_left_to_triton():
    assert CompileOptions(4).keywords() == {"num_warps": 4}
    assert CompileOptions(4, num_stages=2).keywords() == {"num_warps": 4, "num_stages": 2}


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter has no registers")
def test_registers_are_limited_on_gpus_of_nvidia_only():
    assert CompileOptions(4, max_registers=128).keywords() == {"num_warps": 4}


def test_saved_tensors_keep_their_strides():
    """A hook may give back a contiguous copy; a kernel relies on the strides that the tensor had."""
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(3, 4, 5, generator=g)
    tensors = [wide, wide.transpose(0, 2), wide[:, 1:3, ::2], wide[:, :1].expand(3, 4, 5), None]
    for give_back in (lambda x: x, torch.clone, torch.Tensor.contiguous):
        ctx = SimpleNamespace()
        ctx.save_for_backward = lambda *given, ctx=ctx: setattr(ctx, "saved_tensors", given)
        save(ctx, *tensors)
        ctx.saved_tensors = [None if x is None else give_back(x) for x in ctx.saved_tensors]
        for x, before in zip(saved(ctx), tensors, strict=True):
            assert (x is None) == (before is None)
            if x is not None:
                assert x.stride() == before.stride()
                assert torch.equal(x, before)


@pytest.mark.parametrize(
    "op",
    [
        "causal_conv1d",
        "gated_linear_attention",
        "fft_conv",
        pytest.param("selective_scan", marks=pytest.mark.slow),
        pytest.param("lti_ssm", marks=pytest.mark.slow),
    ],
)
def test_a_hook_may_change_the_strides_of_what_is_saved_for_backward(op):
    """Inputs are halves of wider tensors, as those of a projection are."""
    g = torch.Generator().manual_seed(0)

    def half(*shape, time_last=False):
        wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=g).to(DEVICE).requires_grad_()
        x = wide[..., : shape[-1]]
        return x.transpose(1, 2) if time_last else x

    if op == "causal_conv1d":
        leaves = [half(2, 9, 3), half(3, 4)]
        call = partial(causal_conv1d, *leaves)
    elif op == "selective_scan":
        A = -torch.rand(2, 4, generator=g).to(DEVICE)
        x, dt, B, C = half(2, 5, 2), half(2, 5, 2), half(2, 5, 4), half(2, 5, 4)
        leaves, call = [x, dt, B, C], partial(selective_scan, x, dt, A, B, C, dt_softplus=True)
    elif op == "gated_linear_attention":
        # a constant decay of each head, which is expanded
        leaves = [half(1, 20, 2, 16) for _ in "qkv"]
        decay = torch.tensor([-0.1, -0.2], device=DEVICE)
        call = partial(gated_linear_attention, *leaves, decay)
    elif op == "lti_ssm":
        A = torch.complex(-torch.rand(2, 4, generator=g), torch.randn(2, 4, generator=g)).to(DEVICE)
        leaves = [half(2, 2, 20, time_last=True), half(2, 2, 20, time_last=True)]
        u, gate = leaves
        call = partial(lti_ssm, u, A, None, A, A.abs()[:, 0] / 10, gate_in=gate)
    else:
        leaves = [half(2, 3, 20, time_last=True), half(2, 3, 20, time_last=True), half(3, 20)]
        u, gate, filter = leaves
        call = partial(fft_conv, u, filter, gate_out=gate)
    expected = torch.autograd.grad(call(backend="triton").square().sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, torch.Tensor.contiguous):
        y = call(backend="triton")
    actual = torch.autograd.grad(y.square().sum(), leaves)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.skipif(DEVICE == "cuda", reason="the answer depends on the GPU")
def test_kernels_overlap_on_hopper_only():
    assert overlap_options(1) == overlap_options(16) == {"OVERLAP": False}
