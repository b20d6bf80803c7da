"""The launcher that keeps compiled kernels, with a kernel and tensors that only say what they are asked."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
import triton

from subquad.kernels.autograd import save, saved
from subquad.kernels.launch import CompileOptions, Launcher, LaunchPlan, cdiv, overlap_options, power_of_2
from subquad.kernels.layout import spec
from tests.kernels.driver import environment
from tests.kernels.launches import STREAM, Kernel, OnDevice, on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = "x", "y", "T", "scale", "BLOCK", "PRECISE"
GIVEN = {"T": 48, "scale": 0.5, "PRECISE": False, "BLOCK": 64, "num_warps": 4}


@pytest.fixture(autouse=True)
def nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def make_launcher(version="3.9.0"):
    return Launcher(version, current_stream=lambda device: STREAM)


class Started:
    """A kernel with a launcher of its own."""

    def __init__(self, version="3.9.0"):
        self.kernel, self.launch = Kernel(*NAMES), make_launcher(version)

    def __call__(self, x=None, y=None, grid=7, planned=False, **changes):
        """Launches with a plan (`planned`) or with everything named; returns the first tensor."""
        x, named = on_device() if x is None else x, GIVEN | changes
        if planned:
            self.launch(self.kernel, LaunchPlan(grid, **named), x=x, y=y)
        else:
            self.launch(self.kernel, grid, x=x, y=y, **named)
        return x

    @property
    def counts(self):
        """Counts the launches that Triton made, and the compiled kernels that were relaunched."""
        return len(self.kernel.asked), len(self.kernel.started)


either_way = pytest.mark.parametrize("planned", [False, True], ids=["named", "planned"])


@either_way
def test_the_second_launch_does_not_ask_triton(planned):
    start = Started()
    start(planned=planned)
    x = start(planned=planned)
    assert start.counts == (1, 1)
    # addresses, then constexprs in the order of the parameters, options left out
    assert start.kernel.started == [((7, 1, 1), (1, x.data_ptr(), None, 48, 0.5, 64, False))]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="other tests ask a real driver")
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_launcher_of_this_triton_tells_a_driver_the_same_at_every_call(tmp_path):
    """Public, relaunched and replayed launches differ in nothing but the memory of each call, and stay loaded."""
    command = [sys.executable, "-m", "tests.kernels.driver", str(tmp_path)]
    ran = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_kernels_of_the_interpreter_take_tensors_of_a_gpu(monkeypatch):
    start = Started()
    monkeypatch.setattr(Kernel, "__getitem__", lambda kernel, grid: lambda **named: kernel.asked.append(named))
    # they have no parameters either
    del start.kernel.params
    for _ in range(2):
        start()
    assert start.counts == (2, 0)


def test_triton_is_asked_with_everything_by_name():
    start = Started()
    x = start(grid=(3, 5))
    ((grid, named),) = start.kernel.asked
    assert grid == (3, 5, 1)
    assert named.pop("x") is x
    assert named == {"y": None, "enable_fp_fusion": True} | GIVEN


@pytest.mark.parametrize(
    "named",
    [
        {"y": None, "x": on_device(), **GIVEN},
        {"x": on_device(), "T": 48, "y": None, "scale": 0.5, "BLOCK": 64, "PRECISE": False},
    ],
    ids=["tensors", "numbers"],
)
def test_arguments_in_another_order_are_refused(named):
    with pytest.raises(TypeError, match="in the order"):
        make_launcher()(Kernel(*NAMES), 7, **named)


def test_a_tensor_behind_numbers_is_refused():
    with pytest.raises(TypeError, match="tensors come before its numbers"):
        make_launcher()(Kernel("T", "x"), 7, T=48, x=on_device(), BLOCK=64)


@pytest.mark.parametrize("version", ["3.6.0", "3.9.1"])
def test_kernels_are_relaunched_on_the_versions_of_triton_that_this_was_tested_on(version):
    start = Started(version)
    start()
    start()
    assert start.counts == (1, 1)


@either_way
@pytest.mark.parametrize("version", ["3.5.1", "3.7.0", "3.60.0", "4.0"])
def test_other_versions_of_triton_launch_themselves(version, planned):
    start = Started(version)
    start(planned=planned)
    start(planned=planned)
    assert start.counts == (2, 0)


def test_the_public_launch_gives_what_the_kernel_computes(monkeypatch):
    """The public path and that of this version of Triton, with a real kernel; on a GPU the second one relaunches."""
    from subquad.kernels.transpose import TILE, _transpose_kernel

    monkeypatch.undo()
    x, out = torch.randn(1, 3, 2, device=DEVICE), torch.zeros(1, 2, 3, device=DEVICE)
    numbers = {"T": 3, "D": 2, "size": 3, "stride_b": 6, "stride_t": 2, "stride_d": 1, "BLOCK_T": TILE.steps}
    numbers["BLOCK_D"] = TILE.channels
    for version in ("3.5.0", triton.__version__):
        for grid, named in ((1, numbers), (LaunchPlan(1, **numbers), {})):
            out.zero_()
            for _ in range(2):
                Launcher(version)(_transpose_kernel, grid, x=x, out=out, **named)
            assert torch.equal(out, x.mT)


@either_way
@pytest.mark.parametrize(
    "change",
    [
        {"x": on_device(8)},
        {"x": on_device(dtype=torch.bfloat16)},
        {"x": on_device(index=1)},
        {"y": on_device()},
        {"T": 49},
        {"T": 1},
        {"T": -(2**31) - 1},
        {"T": 2**31},
        {"T": None},
        {"scale": 1},
        {"BLOCK": 128},
        {"PRECISE": 0},
        {"num_warps": 8},
        {"num_stages": 4},
    ],
    ids="-".join,
)
def test_whatever_triton_may_compile_for_is_asked_for(change, planned):
    start = Started()
    start(planned=planned)
    start(planned=planned, **change)
    assert start.counts == (2, 0)
    start(planned=planned, **change)
    assert start.counts == (2, 1)
    assert start.kernel.started[0][1][0] == 2


def compiled_for(launch):
    """The properties of a launch for which Triton compiles separately, as keyword arguments of `Started`."""
    parts = [(launch["x"].dtype, launch["x"].data_ptr() % 16 == 0, launch["x"].get_device())]
    y = launch["y"]
    parts.append(None if y is None else (y.dtype, y.data_ptr() % 16 == 0))
    for number in (launch["T"], launch["scale"]):
        if isinstance(number, int):
            wide = not -(2**31) <= number < 2**31
            parts.append(("int", number == 1, number % 16 == 0, wide, number >= 2**63))
        else:
            parts.append(type(number))
    names = "BLOCK", "PRECISE", "num_warps", "num_stages"
    return (*parts, *((name, type(launch.get(name)), launch.get(name)) for name in names))


tensors = st.builds(
    on_device,
    st.sampled_from([0, 4, 16, 24]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0, 1]),
)
launches = st.fixed_dictionaries(
    {
        "x": tensors,
        "y": st.none() | tensors,
        "T": st.sampled_from([None, 0, 1, 2, 16, 17, 48, -1, 2**31 - 1, 2**31, -(2**31), 2**63, True]),
        "scale": st.sampled_from([0.5, 1.0, 1, 16, None]),
        "BLOCK": st.sampled_from([1, 64, True]),
        "PRECISE": st.sampled_from([False, True, 0, 1]),
        "num_warps": st.sampled_from([1, 4]),
        "grid": st.sampled_from([1, 7, (7,), (7, 2), (1, 2, 3)]),
        "planned": st.booleans(),
    },
    optional={"num_stages": st.sampled_from([1, 4])},
)


@given(st.lists(launches, min_size=2, max_size=12))
def test_launches_share_a_compiled_kernel_only_if_triton_would_compile_the_same(calls):
    """A launch passes its own numbers and grid, and addresses in place of tensors, also behind other launches."""
    start, asked_for = Started(), []
    for call in calls:
        asked, started = start.counts
        start(**call)
        if start.counts == (asked + 1, started):
            asked_for.append(compiled_for(call))
            continue
        assert start.counts == (asked, started + 1)
        grid, (which, x, y, *numbers) = start.kernel.started[-1]
        assert asked_for[which - 1] == compiled_for(call)
        assert grid == (*([call["grid"]] if isinstance(call["grid"], int) else call["grid"]), 1, 1)[:3]
        assert x == call["x"].data_ptr()
        assert y == (None if call["y"] is None else call["y"].data_ptr())
        expected = [call[name] for name in NAMES[2:]]
        assert numbers == expected
        assert [*map(type, numbers)] == [*map(type, expected)]


@given(launches)
def test_an_equal_launch_is_never_compiled_for_again(call):
    start = Started()
    start(**call)
    start(**call)
    assert start.counts == (1, 1)


@either_way
def test_another_option_of_the_same_value_is_asked_for(planned):
    start = Started()
    start(planned=planned, num_stages=2)
    start(planned=planned, maxnreg=2)
    assert start.counts == (2, 0)


def test_plans_are_equal_where_all_they_hold_is():
    plan = LaunchPlan(7, T=1, BLOCK=64)
    assert plan == LaunchPlan((7, 1), T=1, BLOCK=64)
    assert hash(plan) == hash(LaunchPlan(7, T=1, BLOCK=64))
    others = LaunchPlan(8, T=1, BLOCK=64), LaunchPlan(7, T=1.0, BLOCK=64), LaunchPlan(7, T=1, BLOCK_T=64), 7
    assert plan not in others


def test_a_kernel_of_the_same_arguments_is_another_one():
    launch, kernels = make_launcher(), [Kernel(*NAMES) for _ in range(2)]
    for kernel in kernels * 2:
        launch(kernel, 7, x=on_device(), y=None, **GIVEN)
    assert [(len(kernel.asked), len(kernel.started)) for kernel in kernels] == [(1, 1)] * 2


def test_tensors_that_are_not_on_an_nvidia_gpu_always_ask(monkeypatch):
    start = Started()
    for x in (torch.zeros(1), torch.empty(1, device="meta")):
        start(x)
        start(x)
    assert start.counts == (4, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    start = Started()
    start()
    start()
    assert start.counts == (2, 0)


@either_way
def test_fake_tensors_of_a_gpu_start_nothing(planned):
    """A kernel would read at address 0, an illegal access that ends every later use of the GPU in this process."""
    start = Started()
    with FakeTensorMode():
        for _ in range(2):
            start(torch.empty(4, device="cuda"), planned=planned)
    assert start.counts == (0, 0)


@either_way
def test_a_profiler_gets_what_triton_tells_it(monkeypatch, planned):
    start = Started()
    for _ in range(2):
        start(planned=planned)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        start(planned=planned)
    assert start.counts == (2, 1)
    start(planned=planned)
    assert start.counts == (2, 2)


def test_a_kernel_gets_complex_numbers_as_pairs():
    """Triton is asked with a view of pairs; a relaunch passes the address, which is the same."""
    start, pairs = Started(), torch.complex64
    x = on_device(dtype=pairs)
    for _ in range(2):
        start(x)
    (asked,) = (named["x"] for _, named in start.kernel.asked)
    assert (asked.dtype, asked.shape, asked.data_ptr()) == (torch.float32, (*x.shape, 2), x.data_ptr())
    assert start.kernel.started[0][1][1] == x.data_ptr()
    start(on_device())
    assert start.counts == (2, 1)


def test_lazy_conjugates_and_negatives_are_not_taken_for_their_memory():
    start = Started()
    x = on_device(dtype=torch.complex64)
    start(x)
    start(x.imag.as_subclass(OnDevice))
    for lazy, words in ((x.conj(), r"memory of x .* resolve_conj\(\)"), (x.conj().imag, r"resolve_neg\(\)")):
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                start(lazy.as_subclass(OnDevice))
    assert start.counts == (2, 0)


def test_sizes_round_up():
    assert [cdiv(n, 4) for n in (1, 4, 5)] == [1, 1, 2]
    assert [power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


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


@pytest.mark.skipif(DEVICE == "cuda", reason="the answer depends on the GPU")
def test_kernels_overlap_on_hopper_only():
    assert overlap_options(1) == overlap_options(16) == {"OVERLAP": False}
