"""Kernels and bytes that a launcher starts and allocates are counted on meta tensors and may not exceed a budget."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch

from subquad.suite.bench import budgets
from subquad.suite.bench.budgets import Collection, check, savings, update
from subquad.suite.bench.calls import Calls, Counting
from tests.suite.test_budgets import TARGET, collect_from

pytest.importorskip("triton")

MODULE = """
import functools

import torch
import triton
import triton.language as tl

from subquad.kernels.workload import Implementation, Workload, normal


@triton.jit
def _double_kernel(x, y, T, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < T), mask=i < T)


CONFIGS = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})]
_tuned_kernel = triton.autotune(CONFIGS, key=["T"])(_double_kernel)


@functools.cache
def kept(device):
    return torch.zeros(8, device=device)


def workload(op, function):
    return Workload(
        op=op,
        reference=None,
        make_inputs=lambda shape, dtype, generator: {"x": normal(generator, dtype, shape["T"])},
        cost=None,
        short=lambda shape: shape,
        implementations=(Implementation("triton", "ours", lambda: function.apply, cold_start=True),),
        shapes={"quick": ({"T": 1024},)},
    )
"""
LAUNCHER = """

class NAME(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kept(x.device)
        y = torch.empty_like(x)
        _double_kernel[(1,)](x, y, x.numel(), BLOCK=128)
        return y.view(-1, 2)

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty(1024, dtype=dy.dtype, device=dy.device)
        _tuned_kernel[(1,)](dy, dx, dy.numel())
        return dx


NAME = workload("NAME", NAME)
"""
START = "_double_kernel[(1,)](x, y,"
COSTLIER = {
    "A_MEMSET": ("torch.empty_like(x)", "torch.zeros_like(x)", ["other operations 1 > budget 0 (zeros_like 0 -> 1)"]),
    "IN_PLACE": (START, f"y.zero_(); {START}", ["other operations 1 > budget 0 (zero_ 0 -> 1)"]),
    "AN_ALLOCATION": (START, f"torch.empty_like(x); {START}", ["allocated bytes 4096 > budget 2048"]),
    "A_LAUNCH": (START, f"{START} 8, BLOCK=128); {START}", ["launches 2 > budget 1 (_double_kernel 1 -> 2)"]),
    "A_COPY": (
        START,
        "_double_kernel[(1,)](x.clone(), y,",
        ["other operations 1 > budget 0 (clone 0 -> 1)", "allocated bytes 4096 > budget 2048"],
    ),
}
"""Edits of a launcher's forward pass, each with the violations that it is."""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """The cost of one call of each launcher, by case."""
    text = MODULE + LAUNCHER.replace("NAME", "DOUBLE")
    for name, (old, new, _) in COSTLIER.items():
        assert LAUNCHER.count(old) == 1
        text += LAUNCHER.replace(old, new).replace("NAME", name)
    names = ["DOUBLE", *COSTLIER]
    # no kernel is compiled, since the digest of each is equal to that of an unchanged one
    options = {"targets": [TARGET], "jobs": 1, "unchanged": {TARGET: SimpleNamespace(get=lambda name: ANY)}}
    found = collect_from(tmp_path_factory.mktemp("launchers"), text, names, **options)
    assert not found.failures
    return found.calls[TARGET]


def case(name, direction="forward"):
    return f"{name} triton T1024 bfloat16 {direction}"


def collection(calls, targets=(TARGET,)):
    return Collection("1.0", ("DOUBLE",), {}, {}, {}, {}, (), dict.fromkeys(targets, calls))


def test_a_call_counts_launches_operations_and_bytes_of_both_passes(calls):
    pass_by = {"forward": "1 _double_kernel; ; 2048", "forward+backward": "2 _double_kernel; ; 4096"}
    # neither views, nor cotangents, nor what a launcher keeps, nor a second configuration of a tuned kernel counts
    assert {name: str(calls[case("DOUBLE", name)]) for name in pass_by} == pass_by


@pytest.mark.parametrize("name", COSTLIER)
def test_a_launcher_that_costs_more_is_named_with_old_and_new_numbers(calls, tmp_path, name):
    path = tmp_path / "budgets.json"
    update(collection({case("DOUBLE"): calls[case("DOUBLE")]}), path)
    costlier = collection({case("DOUBLE"): calls[case(name)]}, (TARGET,))
    problems = COSTLIER[name][2]
    assert list(map(str, check(costlier, path))) == [f"{case('DOUBLE')} {TARGET}: {problem}" for problem in problems]
    assert savings(costlier, path) == []
    # the other way round it is a saving, printed and no violation
    update(costlier, path)
    cheap = collection({case("DOUBLE"): calls[case("DOUBLE")]})
    assert check(cheap, path) == []
    assert [line.count("< budget") for line in savings(cheap, path)] == [1] * len(problems)
    assert update(cheap, path).endswith(f"{calls[case(name)]} -> {calls[case('DOUBLE')]}")


def test_what_all_targets_share_is_one_line_and_calls_and_budgets_must_match(tmp_path):
    path, both = tmp_path / "budgets.json", ("sm_80", "sm_90")
    old, new = Calls.from_text("1 _a, 2 _b; 1 zeros; 8"), Calls.from_text("1 _a, 2 _c; ; 8")
    update(collection({"DOUBLE a": old, "DOUBLE b": old}, both), path)
    changed = collection({"DOUBLE a": new, "DOUBLE c": new}, both)
    assert list(map(str, check(changed, path))) == [
        f"DOUBLE c sm_80, sm_90: no budget (1 _a, 2 _c; ; 8); {budgets.UPDATE}",
        f"DOUBLE b sm_80, sm_90: a budget that no call has; {budgets.UPDATE}",
    ]
    # a kernel of another name is no further launch
    assert savings(changed, path) == ["DOUBLE a sm_80, sm_90: other operations 0 < budget 1 (zeros 1 -> 0)"]
    others = replace(collection({"OTHER a": old}), ops=("OTHER",))
    update(others, path)
    update(changed, path)
    assert check(changed, path) == check(others, path) == []


def test_a_file_without_budgets_of_calls_is_refused_in_one_line(tmp_path):
    path = tmp_path / "budgets.json"
    update(collection({}, ()), path)
    (line,) = map(str, check(collection({"DOUBLE a": Calls()}), path))
    assert line == f"no budgets of launches, other operations and allocated bytes yet; {budgets.UPDATE}"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x.t().reshape(-1).contiguous(), "; 1 clone; 4096"),
        (lambda x: x.unflatten(0, (4, 8)).unsafe_split(2)[1].squeeze_(), "; ; 0"),
        (lambda x: torch.zeros(0, device="meta"), "; ; 0"),
        (lambda x: x.to(torch.bfloat16).add_(1), "; 1 _to_copy, 1 add_; 2048"),
        (lambda x: torch.cat([x, x.new_empty(1, 32)]).resize_(2), "; 1 cat; 4352"),
        (lambda x: torch.sort(x), "; 1 sort; 12288"),
        (lambda x: torch.ones(32).to("meta"), "; 1 _to_copy; 128"),
    ],
)
def test_views_and_host_tensors_cost_nothing_on_the_gpu(function, text):
    counted, x = Calls(), torch.empty(32, 32, device="meta")
    with Counting(counted):
        function(x)
    assert str(counted) == text
    assert Calls.from_text(text) == counted
