"""Passes whose launches are made again, on a GPU: that they are, where, and in how much memory."""

import pytest
import torch
import triton

from subquad.kernels.delta_rule.triton import autograd as delta_rule
from subquad.kernels.gated_linear_attention.triton import passes as linear_attention
from subquad.kernels.gated_slot_attention import triton as slot_attention
from subquad.kernels.launch import launch
from subquad.kernels.replay import Replayed
from subquad.kernels.selective_scan.triton import backward, forward
from subquad.kernels.ssd import triton as ssd
from subquad.run_suite import REPOSITORY
from subquad.suite.laws.calls import is_float
from tests.gpu.real_sizes import memory_taken, results

PASSES = {
    "selective_scan": (forward.scan_forward, backward.scan_backward),
    "gated_linear_attention": (linear_attention._attend, linear_attention._backward),
    "gated_slot_attention": (slot_attention._attend, linear_attention._backward),
    "delta_rule": (delta_rule._forward, delta_rule._gradients),
    "ssd": (ssd._forward,),
}
"""All `Replayed`, by operator."""

every_operator = pytest.mark.parametrize("name", PASSES)


@pytest.fixture(autouse=True)
def tested_triton():
    if not launch.relaunches:
        pytest.skip(f"Triton {triton.__version__} starts every launch itself")


def call_of(name, device="cuda", dtype=torch.bfloat16):
    """The operator and inputs of real size, but for the batch, the same ones at every call."""
    workload = REPOSITORY.operators.load(name)
    shape = {**workload.shapes["quick"][0], "B": 1}
    inputs = workload.make_inputs(shape, dtype, torch.Generator(device).manual_seed(0))
    (ours,) = (one for one in workload.implementations if one.name == "triton")
    return ours.load(), inputs


def plainly(self, tensors, *options):
    return self.function(tensors, *options)


@every_operator
def test_the_third_call_gives_the_same_without_its_python_and_takes_no_more_memory(name, monkeypatch):
    op, inputs = call_of(name)
    with monkeypatch.context() as patch:
        patch.setattr(Replayed, "__call__", plainly)
        wanted, before = results(op, inputs), memory_taken(op, inputs)
    for _ in range(2):
        results(op, inputs)
    for one in PASSES[name]:
        monkeypatch.setattr(one, "function", None)
    torch.cuda.empty_cache()
    # whatever is freed here is what temporary memory begins as
    torch.full((1 << 26,), torch.nan, device="cuda")
    found = results(op, inputs)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    # temporary tensors live to the end of the call, also small ones that the plain pass frees before (3 MB here), and
    # the allocator may give up to 1 MB more for each tensor
    assert memory_taken(op, inputs) <= before + (16 << 20)


@every_operator
def test_a_stream_of_its_own_runs_behind_what_it_waits_for(name, monkeypatch):
    """The launches of a pass go to the stream that is current at each call, and not to that on which it was noted."""
    op, inputs = call_of(name)
    wanted = results(op, inputs)
    for _ in range(2):
        results(op, inputs)
    for one in PASSES[name]:
        monkeypatch.setattr(one, "function", None)
    given = {key: torch.full_like(x, torch.nan) if is_float(x) else x for key, x in inputs.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # values that arrive late on this stream alone
        torch.cuda._sleep(100_000_000)
        for key, x in inputs.items():
            if is_float(x):
                given[key].copy_(x)
        found = results(op, given)
    stream.synchronize()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_operator
def test_a_pass_runs_on_the_device_of_its_inputs(name):
    """Another one is current, on which a pass of the same sizes was noted before."""
    calls = [call_of(name, f"cuda:{index}") for index in (0, 1)]
    for _ in range(4):
        zero, one = (results(op, inputs) for op, inputs in calls)
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(one[key].to("cuda:0"), zero[key]) for key in zero)
