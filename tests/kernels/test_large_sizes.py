"""Claims about sizes that no test can run: grids within CUDA's limits, offsets in 64 bits, and sizes of one."""

import ast
import functools
import mmap

import pytest
import torch

pytest.importorskip("triton")
import subquad.kernels.fft_conv.triton.half_size as half_size
import subquad.kernels.forget_gate.triton as forget_gate
import subquad.kernels.h3_inner.triton as h3_inner
import subquad.kernels.lti_ssm.triton.step as lti_ssm_kernel
import subquad.kernels.mamba_inner.triton as mamba_inner
from subquad.kernels.float32_matmul import MAX_COLUMNS, takes_parts
from subquad.kernels.lti_ssm import MAX_ROWS_OF_STEP, DiagonalSystem, lti_ssm_step
from subquad.suite.environment import REPOSITORY

MAX_AXIS = 65535
META = "meta"
FAR = 2**30
"""A stride, in elements. Twice as much exceeds int32."""


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.fixture
def grids(monkeypatch):
    """Records, instead of launching, the grid of every launch of these modules, with three axes, and its arguments."""
    launched = []

    def launch(kernel, grid, *args, **named):
        axes = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        launched.append((axes, named))

    for module in (forget_gate, h3_inner, half_size, lti_ssm_kernel, mamba_inner):
        monkeypatch.setattr(module, "launch", launch)
    return launched


def system(width, states):
    vector, matrix = empty(width), empty(width, states)
    parts = empty(width, states, 2)
    return DiagonalSystem(vector, matrix, matrix, parts, parts, vector)


def assert_fits(axes):
    assert axes[0] < 2**31
    assert max(axes[1:]) <= MAX_AXIS


@pytest.mark.parametrize(
    ("rows", "width"), [(2**20, 1024), (2**22, 64), (16 * MAX_AXIS, 128), (16 * MAX_AXIS + 1, 128)]
)
def test_the_grid_of_a_forget_gate_has_room_for_a_million_positions(grids, rows, width):
    forget_gate.forget_gate_triton(empty(rows, width), None, None, None, 0, 1.0, True)
    ((axes, named),) = grids
    assert_fits(axes)
    assert axes[0] * named["BLOCK"] >= width
    # every row has a program, and fewer than a program for each slab has none
    assert axes[1] * axes[2] * named["ROWS"] >= rows
    assert (axes[1] * axes[2] - axes[2]) * named["ROWS"] < rows


def test_forget_gates_of_many_rows_are_those_of_few(monkeypatch):
    """With a low limit, rows are spread over the second and the third axis."""
    from subquad.kernels.forget_gate import forget_gate as op

    x = torch.randn(5 * 2048 - 300, 3, generator=torch.Generator().manual_seed(0))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = op(x.to(device), backend="triton")
    monkeypatch.setattr(forget_gate, "ELEMENTS", 4096)
    monkeypatch.setattr(forget_gate, "MAX_AXIS", 4)
    for found, whole in zip(op(x.to(device), backend="triton"), expected, strict=True):
        assert torch.equal(found, whole)


def test_the_grids_of_steps_have_room_for_two_million_rows(grids, monkeypatch):
    rows, width, states = 2**21, 16, 16
    q, window = empty(rows, width), empty(rows, width, 3)
    state = empty(rows, width, states, dtype=torch.complex64)
    h3_inner.h3_inner_step_triton(
        q, q, q, window, state, taps=empty(width, 4), shift_skip=empty(width), system=system(width, states),
        dt_scale=1.0, discretization="zoh",
    )  # fmt: skip
    monkeypatch.setattr(mamba_inner, "causal_conv1d_step_triton", lambda x, *args: x)
    mamba_inner.mamba_inner_step_triton(
        q, None, window, empty(rows, width, states), conv_weight=empty(width, 4), conv_bias=empty(width),
        x_proj=empty(4 + 2 * states, width), dt_proj=empty(width, 4), dt_bias=empty(width),
        log_A=empty(width, states), D=empty(width),
    )  # fmt: skip
    assert len(grids) == 2
    for axes, named in grids:
        assert_fits(axes)
        assert axes[0] * named.get("ROWS", named.get("BLOCK_B")) >= rows


@pytest.mark.parametrize("processors", [1, 132, 2**20])
def test_the_grid_of_half_size_transforms_has_room_for_a_million_channels(grids, monkeypatch, processors):
    monkeypatch.setattr(half_size, "num_processors", lambda device: processors)
    batch, width, half = 3, 2**20, 600
    z, taps = (empty(*size, width, half + i, dtype=torch.complex64) for i, size in enumerate([(batch,), ()]))
    half_size._product(z, taps, True, z, z)
    ((axes, named),) = grids
    assert_fits(axes)
    assert axes[0] * named["BLOCK"] >= width * (half // 2 + 1)
    assert 1 <= axes[1] <= batch


@functools.cache
def jit_functions():
    """The definition of every function that Triton compiles, with the name of its file and its decorators."""
    found = []
    for path in sorted((REPOSITORY / "kernels").rglob("*.py")):
        text = path.read_text()
        # all of them are at the top of their files
        for function in ast.parse(text).body if "triton.jit" in text else ():
            if isinstance(function, ast.FunctionDef):
                options = " ".join(map(ast.unparse, function.decorator_list))
                if "triton.jit" in options:
                    found.append((f"{path.name}: {function.name}", function, options))
    return found


def test_no_kernel_calls_a_method_of_a_size_that_triton_may_take_for_a_constant():
    """For an argument of one Triton compiles a constant, which has no methods; in the interpreter it is a tensor."""
    found = []
    for place, function, options in jit_functions():
        numbers = {x.arg for x in function.args.args if x.arg.isupper() and f"'{x.arg}'" not in options}
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and numbers and ast.unparse(call.func).split(".")[0] in numbers:
                found.append(f"{place}: {ast.unparse(call)}")
    assert not found, "\n".join(found)


def test_no_constant_of_a_kernel_is_the_result_of_a_function_of_triton():
    """Triton 3.6 makes a tensor of such a result, which no range takes that is unrolled; later ones make a number."""
    found = []
    for place, function, _ in jit_functions():
        for constant in ast.walk(function):
            if isinstance(constant, ast.AnnAssign) and ast.unparse(constant.annotation) == "tl.constexpr":
                calls = [x for x in ast.walk(constant) if isinstance(x, ast.Call)]
                names = {ast.unparse(call.func) for call in calls} - {"tl.constexpr"}
                if any(name.startswith("tl.") for name in names):
                    found.append(f"{place}: {ast.unparse(constant)}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("states", [1, 64, 512])
def test_a_step_refuses_more_rows_than_its_grid_has_room_for(grids, states):
    def step(rows):
        u, state = empty(rows, 2), empty(rows, 2, states, dtype=torch.complex64)
        lti_ssm_step(u, system(2, states), state, discretization="zoh", backend="triton")

    step(MAX_ROWS_OF_STEP)
    assert_fits(grids[0][0])
    with pytest.raises(ValueError, match=f"takes B <= {MAX_ROWS_OF_STEP}, got B={MAX_ROWS_OF_STEP + 1}"):
        step(MAX_ROWS_OF_STEP + 1)


def test_parts_whose_offsets_would_exceed_int32_are_not_made(monkeypatch):
    monkeypatch.setattr("subquad.kernels.float32_matmul._is_faster", lambda x, count: True)
    monkeypatch.setattr("subquad.kernels.float32_matmul.use_triton", lambda *args: True)
    assert takes_parts(empty(2, MAX_COLUMNS - 1), empty(2**10, MAX_COLUMNS - 1))
    assert not takes_parts(empty(2, MAX_COLUMNS), empty(2**10, MAX_COLUMNS))
    assert not takes_parts(empty(MAX_COLUMNS, 2**10), empty(2**10, 2**10))


@pytest.fixture
def sparse():
    """Gives memory of more than 2^31 elements, of which the system makes only the pages that a test touches."""
    if torch.cuda.is_available():
        pytest.skip("kernels run on a device here, whose memory has no pages that are made when they are touched")
    # Python has a name for MAP_NORESERVE from 3.13 on; this is its value on Linux
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        pages = mmap.mmap(-1, 4 * (3 * FAR + 4096), flags=flags)
    except OSError as error:
        pytest.skip(f"this machine gives no 12 GiB of addresses ({error})")
    return torch.frombuffer(pages, dtype=torch.float16)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_slstm_reads_inputs_that_lie_2_to_the_31_elements_apart(sparse, axis):
    from subquad.kernels.slstm import slstm

    size = [1, 1, 4, 1, 4]
    size[axis] = max(size[axis], 3)
    strides = [0, 64, 16, 4, 1]
    strides[axis] = FAR
    g = torch.Generator().manual_seed(axis)
    near = torch.randn(size, generator=g).half()
    far = sparse.as_strided(size, strides)
    far.copy_(near)
    recurrent = torch.randn(4, size[3], 4, 4, generator=g).half()
    results = []
    for x in (near, far):
        x.requires_grad_()
        y = slstm(x, recurrent, backend="triton")
        results.append((y, *torch.autograd.grad(y.float().square().sum(), x)))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_gradients_of_attention_lie_2_to_the_31_elements_apart(sparse, monkeypatch):
    from subquad.kernels.attention.triton.autograd import attention_triton

    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 3, 2, 8, generator=g).requires_grad_() for _ in "qkv"]

    def gradients():
        return torch.autograd.grad(attention_triton(*leaves, scale=1.0).square().sum(), leaves)

    expected, empty_near = gradients(), torch.empty

    def empty_far(*shape, **options):
        size = shape[0] if isinstance(shape[0], tuple) else shape
        if len(size) != 5:
            return empty_near(*shape, **options)
        return sparse.view(torch.float32).as_strided(size, (0, FAR, 16, 8, 1))

    monkeypatch.setattr(torch, "empty", empty_far)
    far = gradients()
    assert far[0].stride(1) == FAR
    for found, near in zip(far, expected, strict=True):
        assert torch.equal(found, near)


@pytest.mark.parametrize(("lags", "stride"), [(3, FAR), (1024, 3 * 2**20)])
def test_taps_of_a_filter_lie_2_to_the_31_elements_apart(sparse, lags, stride):
    """A filter may have its time first in memory, so that all channels lie between two taps. Many taps have spectra."""
    from subquad.kernels.fft_conv import fft_conv

    g = torch.Generator().manual_seed(0)
    x, near = torch.randn(8, lags, 1, generator=g).bfloat16(), torch.randn(1, lags, generator=g)
    far = sparse.view(torch.float32).as_strided((1, lags), (1, stride))
    far.copy_(near)
    expected, found = (fft_conv(x, taps, backend="triton") for taps in (near, far))
    assert torch.equal(found, expected)
