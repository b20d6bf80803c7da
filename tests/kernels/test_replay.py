"""Passes whose launches are made again, with kernels and tensors that only say what they are asked."""

import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
import triton

from subquad.kernels.backend import made_once, use_triton
from subquad.kernels.launch import Launcher, LaunchPlan
from subquad.kernels.replay import ALIGNMENT, Replayed
from tests.kernels.launches import STREAM, Kernel, OnDevice, on_a_gpu, on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTS = LaunchPlan((2, 3), T=5, BLOCK=64, num_warps=4)


@pytest.fixture(autouse=True)
def nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")


class Pass:
    """A pass of two launches through temporary memory, with what is done besides by `more(x, made)`."""

    form = (3, 4), (1, 3)

    def __init__(self, more=lambda x, made: None, version="3.9.0", kinds=(OnDevice,), result=lambda y: y):
        self.first, self.second = Kernel("x", "y", "part", "T"), Kernel("x", "part", "other", "z")
        self.launcher = Launcher(version, current_stream=lambda device: STREAM)
        self.more, self.result, self.count = more, result, 0
        self.replayed = Replayed(self.function, self.launcher, kinds)

    def function(self, tensors, *options):
        self.count += 1
        x, y = tensors
        # seven bytes, so that the next temporary tensor has to be moved
        parts, made = torch.empty(16, dtype=torch.uint8), torch.empty_strided(*self.form)
        self.more(x, made)
        self.launcher(self.first, PARTS, x=x, y=y, part=parts[7:])
        other = torch.empty(2)
        self.launcher(self.second, 7, x=x, part=parts, other=other, z=made, BLOCK=options[0])
        return self.result(made), None, "plan"

    def __call__(self, x=None, y=None, *options):
        return self.replayed((on_device() if x is None else x, y), *(options or (64,)))

    def is_replayed(self, *call):
        """Whether a call that is made for the first time, and then as often as is needed, is not the function's."""
        for _ in range(3):
            self(*call)
        before = self.count
        self(*call)
        return self.count == before


def test_the_third_call_starts_what_the_function_did_with_its_own_addresses():
    run = Pass()
    for _ in range(2):
        run(on_device())
    assert run.count == 2
    x, y = on_device(), None
    z, nothing, plan = run(x, y)
    again, *_ = run(x, y)
    assert (run.count, nothing, plan) == (2, None, "plan")
    assert (z.shape, z.stride(), z.dtype) == ((3, 4), (1, 3), torch.float32)
    assert z.data_ptr() != again.data_ptr()
    (grid, first), (_, second) = run.first.started[-2], run.second.started[-2]
    assert grid == (2, 3, 1)
    # which compiled kernel comes before its arguments
    assert first[1:3] == (x.data_ptr(), None)
    assert first[4:] == (5, 64)
    _, _, part, other, result, block = second
    assert (result, block) == (z.data_ptr(), 64)
    # a part of the first temporary tensor, and the second one behind all of it
    assert (first[3] - part, other - part) == (7, ALIGNMENT)


@pytest.mark.parametrize("form", [((), ()), ((2, 0), (1, 1)), ((1, 4), (7, 1)), ((2, 3), (4, 1))])
def test_results_keep_their_strides(form):
    """Also where a size is one, so that the tensor is contiguous with every stride."""
    run = Pass()
    run.form = form
    assert run.is_replayed()
    x, *_ = run()
    assert (x.shape, x.stride()) == form


def test_equal_launches_are_relaunched_and_not_asked_for_again():
    run = Pass()
    for _ in range(5):
        run()
    assert [(len(kernel.asked), len(kernel.started)) for kernel in (run.first, run.second)] == [(1, 4)] * 2


WIDE = torch.zeros(4, 4).as_subclass(OnDevice)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((WIDE,), (WIDE.t().as_subclass(OnDevice),)),
        ((WIDE,), (WIDE[:, :2].as_subclass(OnDevice),)),
        ((on_device(),), (on_device(8),)),
        ((on_device(4),), (on_device(8),)),
        ((on_device(),), (on_device(dtype=torch.bfloat16),)),
        ((on_device(),), (on_device(index=1),)),
        ((on_device(), None), (on_device(), on_device())),
        ((on_device(), None, 64), (on_device(), None, 128)),
        ((on_device(), None, 1), (on_device(), None, True)),
    ],
    ids=["strides", "shape", "alignment", "4-8-bytes", "dtype", "device", "given", "option", "type-of-an-option"],
)
def test_a_call_of_another_key_is_the_functions(before, after):
    run = Pass()
    assert run.is_replayed(*before)
    count = run.count
    run(*after)
    assert run.count == count + 1
    # and the first key is still known
    run(*before)
    assert run.count == count + 1


SAME = on_device()


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ({"more": lambda x, made: made.zero_()}, ()),
        ({"more": lambda x, made: x.clone()}, ()),
        ({"more": lambda x, made: made[0, 0].item()}, ()),
        # which input a kernel got is told by its address
        ({"more": lambda x, made: x[1:]}, ()),
        ({}, (SAME, SAME)),
        ({}, (on_device(dtype=torch.complex64),)),
        ({"result": lambda y: y[:2]}, ()),
        ({"result": lambda y: y.as_strided((3, 4), (0, 1))}, ()),
        ({"result": lambda y: SAME}, (SAME,)),
        ({"version": "3.7.0"}, ()),
        ({"kinds": (torch.Tensor,)}, ()),
    ],
    ids=[
        "fill", "copy", "value", "part-of-an-input", "twice", "complex", "part-of-a-result", "view-of-a-result",
        "input-as-result", "version-of-triton", "kind-of-tensor",
    ],
)  # fmt: skip
def test_what_cannot_be_made_again_is_the_functions_at_every_call(kind, call):
    assert not Pass(**kind).is_replayed(*call)


def test_an_argument_that_no_call_allocates_is_not_taken_for_an_address_of_this_call():
    constant = torch.ones(4)
    run = Pass()

    def function(tensors, *options):
        results = run.function(tensors, *options)
        run.launcher(run.second, 7, x=tensors[0], part=None, other=constant, z=constant, BLOCK=64)
        return results

    run.replayed.function = function
    assert not run.is_replayed()


class Observer(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_observers_see_every_operation_and_launch(monkeypatch):
    run = Pass()
    assert run.is_replayed()
    count = run.count
    with Observer() as observer:
        run(SAME)
    assert run.count == count + 1
    assert observer.count > 0
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        run()
    assert run.count == count + 2
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        run()
    assert run.count == count + 3
    run()
    assert run.count == count + 3


def test_a_lazy_negative_is_refused_also_where_launches_are_known():
    run, x = Pass(), on_device(dtype=torch.complex64)
    assert run.is_replayed(x.imag.as_subclass(OnDevice))
    with pytest.raises(ValueError, match=r"resolve_neg\(\)"):
        run(x.conj().imag.as_subclass(OnDevice))


def test_tensors_without_a_gpu_and_fake_ones_are_the_functions():
    run = Pass(kinds=(torch.Tensor, OnDevice))
    assert not run.is_replayed(torch.zeros(4))
    assert run.is_replayed(SAME)
    run.replayed.function = lambda tensors, *options: "called"
    with FakeTensorMode():
        fake = torch.empty(4, device="cuda")
        assert {run(fake), run(SAME)} == {"called"}
    assert run(fake) == "called"


def test_launches_of_another_thread_are_not_written_down():
    def launch_elsewhere(x, made):
        thread = threading.Thread(target=lambda: other(on_device()))
        thread.start()
        thread.join()

    run = Pass(launch_elsewhere)
    other = Pass()
    other.launcher = run.launcher
    assert run.is_replayed()
    before = len(run.first.started), len(other.first.started)
    run()
    assert (len(run.first.started), len(other.first.started)) == (before[0] + 1, before[1])


def test_a_pass_that_two_threads_call_first_is_made_again():
    both = threading.Barrier(2)
    run = Pass(lambda x, made: both.wait(10) if not run.first.started else None)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.count == 2
    run.more = lambda x, made: None
    assert run.is_replayed()


def test_a_function_that_fails_is_called_again():
    def fail(x, made):
        if run.count == 2:
            raise RuntimeError("out of memory")

    run = Pass(fail)
    run()
    with pytest.raises(RuntimeError, match="memory"):
        run()
    assert run.is_replayed()
    run()
    assert len(run.first.started) == len(run.second.started)


def test_checks_are_made_once_for_equal_forms_and_refusals_at_every_call():
    calls = []

    @made_once
    def check(tensors, option):
        calls.append(option)
        if tensors[0].shape != (4,) or tensors[1] is not None:
            raise ValueError("no")
        return option

    x = on_device()
    assert [check((x, None), 1) for _ in range(3)] == [1] * 3
    assert calls == [1]
    assert check((x, None), True) is True
    for other in (x[:2].as_subclass(OnDevice), x.double().as_subclass(OnDevice)):
        count = len(calls)
        try:
            check((other, None), 1)
        except ValueError:
            assert other.shape != (4,)
        assert len(calls) == count + 1
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            check((x, x), 1)
    count = len(calls)
    for _ in range(2):
        check((torch.zeros(4), None), 1)
    assert len(calls) == count + 2


def test_an_option_that_cannot_be_a_key_is_refused_by_the_check():
    @made_once
    def check(tensors, backend):
        return use_triton("op", backend, *tensors)

    with pytest.raises(ValueError, match=r"^op: backend=\['triton'\] is not one of 'auto', 'torch', 'triton'.$"):
        check((on_device(),), ["triton"])


def scan_call(g):
    from subquad.kernels.selective_scan.triton import TUNING, Tile, selective_scan_triton
    from subquad.kernels.selective_scan.triton.backward import scan_backward
    from subquad.kernels.selective_scan.triton.forward import scan_forward

    x, dt, z = (torch.randn(1, 16, 8, generator=g) for _ in range(3))
    maps, A = torch.randn(1, 16, 8, generator=g), -torch.rand(8, 4, generator=g)
    # the interpreter's time grows with the steps of a tile
    tiles = {name: replace(tile, steps=4) for name, tile in vars(TUNING).items() if isinstance(tile, Tile)}
    tuning = replace(TUNING, **tiles, uncut=0, chunk=8, min_segment=8, enough_warps=10**6, busy_warps=10**6)
    # B and C are parts of one tensor
    inputs = {"x": x, "dt": dt, "A": A, "B": maps[..., :4], "C": maps[..., 4:], "z": z, "dt_bias": A[:, 0].clone()}
    return partial(selective_scan_triton, dt_softplus=True, tuning=tuning), inputs, (scan_forward, scan_backward)


def linear_attention_call(g):
    from subquad.kernels.gated_linear_attention.triton.autograd import gated_linear_attention_triton
    from subquad.kernels.gated_linear_attention.triton.passes import _attend, _backward

    q, k, v, d = (torch.randn(1, 80, 2, 16, generator=g) for _ in range(4))
    inputs = {"q": q, "k": k, "v": v, "log_decay": -d.abs()}
    return lambda **given: gated_linear_attention_triton(**given)[0], inputs, (_attend, _backward)


def delta_rule_call(g):
    from subquad.kernels.delta_rule.triton.autograd import _forward, _gradients, delta_rule_triton

    q, k, v = (torch.randn(1, 80, 2, 16, generator=g) / 4 for _ in range(3))
    beta, d = (torch.rand(1, 80, 2, generator=g) for _ in range(2))
    inputs = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": -d}
    return lambda **given: delta_rule_triton(**given)[0], inputs, (_forward, _gradients)


def slot_attention_call(g):
    from subquad.kernels.gated_linear_attention.triton.passes import _backward
    from subquad.kernels.gated_slot_attention.triton import _attend, gated_slot_attention_triton

    q, k, v, slots, d = (torch.randn(1, 40, 2, 16, generator=g) for _ in range(5))
    inputs = {"q": q, "k": k, "v": v, "slots": slots.softmax(-1), "log_decay": -d.abs()}
    return lambda **given: gated_slot_attention_triton(**given)[0], inputs, (_attend, _backward)


def ssd_call(g):
    from subquad.kernels.ssd.triton import _forward, ssd_triton

    # q and k are parts of one tensor
    maps, v = torch.randn(1, 40, 1, 32, generator=g), torch.randn(1, 40, 2, 16, generator=g)
    write, d = (torch.rand(1, 40, 2, generator=g) for _ in range(2))
    inputs = {"q": maps[..., :16], "k": maps[..., 16:], "v": v, "log_decay": -d, "write": write}
    rest = {"own": None, "skip": None, "initial_state": None, "return_final_state": False, "recompute": False}
    return lambda **given: ssd_triton(**given, **rest)[0], inputs, (_forward,)


@pytest.mark.parametrize("call", [scan_call, linear_attention_call, delta_rule_call, slot_attention_call, ssd_call])
def test_passes_whose_launches_are_made_again_compute_the_same(call, monkeypatch):
    """Also where later inputs have other values, and where results of earlier calls are still in memory.

    The interpreter stands for a GPU where there is none.
    """
    g = torch.Generator().manual_seed(0)
    (op, inputs, passes), (_, others, _) = call(g), call(g)

    def results(given):
        leaves = {name: x.detach().to(DEVICE).requires_grad_() for name, x in given.items()}
        y = op(**leaves)
        return y, *torch.autograd.grad(y, list(leaves.values()), y.detach())

    wanted = [results(given) for given in (inputs, others)]
    assert not torch.equal(wanted[0][0], wanted[1][0])
    with on_a_gpu(*passes, computes=True) if DEVICE == "cpu" else nullcontext():
        found = [results(inputs), results(others)]
        for one in passes if DEVICE == "cpu" else ():
            # from the third call on it is not needed; the GPU may have a version of Triton that was not tested
            monkeypatch.setattr(one, "function", None)
        found += [results(inputs), results(others)]
    for i, tensors in enumerate(found):
        assert all(map(torch.equal, tensors, wanted[i % 2]))
