"""Every workload describes its operator truthfully: inputs, smallest cost, shapes, implementations."""

from __future__ import annotations

import importlib
import itertools
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from subquad.kernels import OPERATORS
from subquad.kernels.workload import Workload
from subquad.suite.bench.cases import Case, cases, label
from subquad.suite.bench.measure import Unavailable, find, gate
from subquad.suite.laws.accuracy import outputs_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETS = ("quick", "paper")
DTYPES = (torch.bfloat16, torch.float32)

every_operator = pytest.mark.parametrize("op", OPERATORS)


def workload(op: str) -> Workload:
    module, attribute = OPERATORS[op][0].split(":")
    return getattr(importlib.import_module(module), attribute)


def short_shapes(op: str) -> list[dict]:
    """The shapes of an operator cut down to those on which the accuracy rule is checked, each once."""
    found = workload(op)
    shorts = [dict(found.short(shape)) for name in SETS for shape in found.shapes.get(name, ())]
    return list({label(shape): shape for shape in shorts}.values())


def num_bytes(*values: object) -> int:
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor))


@every_operator
def test_the_floor_counts_every_input_and_output_once(op):
    found = workload(op)
    for shape, wanted in itertools.product(short_shapes(op), DTYPES):
        dtype = wanted if wanted in found.dtypes else found.dtypes[0]
        inputs = found.make_inputs(shape, dtype, torch.Generator().manual_seed(1))
        # outputs of all implementations have the same shapes and dtypes, and this one is the fastest on a CPU
        with torch.no_grad():
            outputs = outputs_of(find(found, "torch").load()(**inputs))
        # inputs that are returned as they are need not be written, but their gradients are read
        passing = {"rwkv6_inputs": ("k", "v"), "rwkv7_inputs": ("r",), "attention_step": ("keys", "values")}
        passed = num_bytes(*(inputs[name] for name in passing.get(op, ())))
        read, written = num_bytes(*inputs.values()), num_bytes(*outputs) - passed
        forward, both = (found.cost(shape, dtype, backward) for backward in (False, True))
        assert 0.9 * (read + written) <= forward.num_bytes <= 1.01 * (read + written), label(shape)
        assert forward.num_flops > 0
        if found.backward:
            # input and output gradients are as large as inputs and outputs; one operator computes them in the forward
            # pass, and those of a rotation do not depend on what was rotated
            rest = read + written
            backward = {"linear_cross_entropy": 0, "rotary": written}.get(op, rest + passed) + read
            assert 0.9 * backward <= both.num_bytes - forward.num_bytes <= 1.01 * backward, label(shape)
            assert both.num_flops > forward.num_flops


@every_operator
def test_shapes_are_named_once_and_cut_to_the_same_kernel(op):
    found = workload(op)
    assert found.op == op
    # the arena draws its cases from those of the two sets
    every = [label(shape) for name in SETS for shape in found.shapes[name]]
    assert set(found.shapes) <= {*SETS, "arena"}
    assert {label(shape) for shape in found.shapes.get("arena", ())} <= set(every)
    for name, shapes in found.shapes.items():
        labels = [label(shape) for shape in shapes]
        assert labels, name
        assert len(set(labels)) == len(labels), name
    assert len(found.shapes["quick"]) <= 2
    for shape in (shape for shapes in found.shapes.values() for shape in shapes):
        short = found.short(shape)
        assert list(short) == list(shape)
        for key, value in shape.items():
            if isinstance(value, str) or key in "KVNMW":
                assert short[key] == value
            else:
                assert 1 <= short[key] <= value


@every_operator
def test_inputs_are_the_generators_alone(op):
    found = workload(op)
    shape = short_shapes(op)[0]
    torch.manual_seed(1)
    first = found.make_inputs(shape, torch.float32, torch.Generator().manual_seed(5))
    torch.manual_seed(2)
    second = found.make_inputs(shape, torch.float32, torch.Generator().manual_seed(5))
    other = found.make_inputs(shape, torch.float32, torch.Generator().manual_seed(6))
    tensors = [name for name, value in first.items() if isinstance(value, Tensor)]
    assert all(torch.equal(first[name], second[name]) for name in tensors)
    assert any(not torch.equal(first[name], other[name]) for name in tensors)


@every_operator
def test_inputs_have_the_dtype_asked_for_except_those_kept(op):
    found = workload(op)
    inputs = found.make_inputs(short_shapes(op)[0], torch.bfloat16, torch.Generator().manual_seed(5))
    assert set(found.keep) <= {*inputs, *found.states} | {"D", "dt_bias", "bias", "log_rate", "own", "skip_scale"}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            assert value.dtype == (torch.float32 if name in found.keep else torch.bfloat16), name


@every_operator
def test_implementations_have_distinct_names_and_ours_come_first(op):
    implementations = workload(op).implementations
    kinds = [implementation.kind for implementation in implementations]
    assert kinds == sorted(kinds, key=["ours", "torch", "peer"].index)
    assert len({implementation.name for implementation in implementations}) == len(implementations)


def test_a_step_is_timed_forward_only():
    for op in ("selective_scan_step", "gated_linear_attention_step"):
        assert {case.backward for case in cases(workload(op), ["quick"], ["ours"])} == {False}
    assert {case.backward for case in cases(workload("selective_scan"), ["quick"], ["ours"])} == {False, True}


PEERS = [(op, i.name) for op in OPERATORS for i in workload(op).implementations if i.kind == "peer"]


PACKAGES = (
    *("fla", "mamba_ssm", "causal_conv1d", "flashfftconv", "liger_kernel", "flash_qla", "flash_kda", "flashinfer"),
    *("cudnn", "quack", "mlstm_kernels"),
)


@pytest.mark.parametrize(("op", "name"), PEERS)
def test_a_missing_peer_is_a_reason_and_not_a_failure(op, name, monkeypatch):
    class Refuse:
        def find_spec(self, fullname, path=None, target=None):
            if fullname.partition(".")[0] in PACKAGES:
                raise ModuleNotFoundError(f"No module named {fullname!r}")

    monkeypatch.setattr("sys.meta_path", [Refuse(), *sys.meta_path])
    peer = next(i for i in workload(op).implementations if i.name == name)
    with pytest.raises(ImportError, match="No module named"):
        peer.load()


def test_a_backward_pass_that_a_peer_refuses_costs_its_own_row_only():
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError("incorrect results\non this device")

    found = workload("gated_linear_attention")
    ours = found.implementations[0]
    peer = replace(ours, name="peer", kind="peer", from_native=Refuses.apply)
    found = replace(found, implementations=(ours, peer))
    shape = tuple({"B": 1, "T": 4, "H": 2, "K": 4, "V": 4, "decay": "head-step"}.items())
    gate(found, Case("gated_linear_attention", "peer", shape, "float32", False), torch.device("cpu"))
    with pytest.raises(Unavailable, match="RuntimeError: incorrect results on this device") as caught:
        gate(found, Case("gated_linear_attention", "peer", shape, "float32", True), torch.device("cpu"))
    assert caught.value.status == "n/a"


def test_products_of_linear_attention_are_those_of_plain_chunks_and_what_backward_computes_again():
    from torch.utils.flop_counter import FlopCounterMode

    from subquad.kernels.gated_linear_attention.workloads import CHUNK, products

    chunks, key_dim, value_dim = 4, 8, 24
    q, k = (torch.randn(chunks, CHUNK, key_dim, requires_grad=True) for _ in "qk")
    v = torch.randn(chunks, CHUNK, value_dim, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        states = (k.mT @ v).cumsum(0)
        o = (q @ k.mT).tril() @ v + q @ states
    with FlopCounterMode(display=False) as backward:
        o.sum().backward()
    positions = chunks * CHUNK
    again = CHUNK * key_dim + key_dim * value_dim
    assert forward.get_total_flops() == 2 * positions * products(key_dim, value_dim, False)
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both + 2 * positions * again == 2 * positions * products(key_dim, value_dim, True)
