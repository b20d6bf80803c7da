"""Tiny seeded calls of every operator, for the record of what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import OPERATORS
from subquad.kernels.attention import attention_step
from subquad.kernels.attention.reference import attention_step_reference
from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_heads, causal_conv1d_step
from subquad.kernels.causal_conv1d.reference import causal_conv1d_heads_reference, causal_conv1d_reference
from subquad.kernels.embedding import embedding
from subquad.kernels.embedding.reference import embedding_reference
from subquad.kernels.forget_gate import forget_gate
from subquad.kernels.forget_gate.reference import forget_gate_reference
from subquad.kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_step
from subquad.kernels.gated_linear_attention.reference import gated_linear_attention_reference
from subquad.kernels.gated_slot_attention import gated_slot_attention, gated_slot_attention_step
from subquad.kernels.gated_slot_attention.reference import gated_slot_attention_reference
from subquad.kernels.lti_ssm import ContinuousSystem, lti_ssm_step
from subquad.kernels.rotary import rotary
from subquad.kernels.rotary.reference import rotary_reference
from subquad.kernels.skinny_linear import Norm, skinny_linear
from subquad.kernels.skinny_linear.reference import skinny_linear_reference
from subquad.run_suite import REPOSITORY
from subquad.suite.bench.measure import find
from tests.laws.draw import LENGTH, Draw, wide

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One call of an operator: its implementations by name, and the arguments that all of them take.

    in_place: names of arguments that the call overwrites; they count as outputs, and no gradient is asked for.
    """

    case: str
    implementations: dict[str, Callable[..., Any]]
    inputs: Inputs
    in_place: tuple[str, ...] = ()
    gradients: bool = True


def _of(result: Any, keep: slice = slice(None)) -> tuple[Tensor, ...]:
    parts = result if isinstance(result, tuple) else (result,)
    flat = [x for part in parts for x in (part if isinstance(part, tuple) else (part,)) if x is not None]
    return tuple(flat)[keep]


def _pair(op: Callable[..., Any], reference: Callable[..., Any], **options: Any) -> dict[str, Callable[..., Any]]:
    """The PyTorch backend of an operator beside its reference; options are for the operator alone."""
    return {"torch": partial(op, backend="torch", **options), "reference": reference}


def _torch_of(name: str, **options: Any) -> dict[str, Callable[..., Any]]:
    """The PyTorch backend of an operator as its workload has it, which gives its states too where it updates them."""
    return {"torch": partial(find(REPOSITORY.operators.load(name), "torch").load(), **options)}


def _pair_of(name: str, **options: Any) -> dict[str, Callable[..., Any]]:
    """The same beside its reference; options are for both."""
    reference = partial(REPOSITORY.operators.load(name).reference, **options)
    return {**_torch_of(name, **options), "reference": reference}


def _attention(draw: Draw) -> Iterator[Call]:
    shape = (2, LENGTH, 2, 4)
    inputs = {"q": draw(*shape), "k": draw(*shape), "v": draw(*shape)}
    yield Call("plain", _pair_of("attention"), inputs)
    yield Call("scaled", _pair_of("attention"), inputs | {"scale": 0.3})
    at = {"q": inputs["q"][:, :3], "positions": torch.tensor([[0, 5, 69], [3, 4, 60]])}
    yield Call("at positions", _pair_of("attention"), inputs | at)
    yield Call("in a window", _pair_of("attention"), inputs | {"window": 9})


def _attention_step(draw: Draw) -> Iterator[Call]:
    inputs = {name: draw(2, 2, 4) for name in "qkv"} | {name: draw(2, 6, 2, 4) for name in ("keys", "values")}
    inputs |= {"cos": draw(6, 2), "sin": draw(6, 2)}

    def torch_step(keys: Tensor, values: Tensor, **rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        o = attention_step(keys=keys, values=values, count=torch.tensor([0, 4]), **rest, backend="torch")
        return o, keys, values

    reference = partial(attention_step_reference, count=torch.tensor([0, 4]))
    both = {"torch": torch_step, "reference": reference}
    yield Call("rotated", both, inputs, gradients=False)
    yield Call("in windows", both, inputs | {"window": torch.tensor([2, 2**40])}, gradients=False)


def _cauchy(draw: Draw) -> Iterator[Call]:
    system = {"residues": draw.complex(2, 3, 4), "Lambda": draw.complex(3, 4, high=-0.1), "dt": draw(3, low=0.1)}
    # points are constants, so no gradient is asked for them
    points = draw.complex(9, low=0.01, high=0.1) / 4
    yield Call("plain", _pair_of("cauchy", s=points), system)


def _causal_conv1d(draw: Draw) -> Iterator[Call]:
    x, weight, bias, state = draw(2, LENGTH, 3), draw(3, 4), draw(3), draw(2, 3, 3)
    both = _pair(causal_conv1d, causal_conv1d_reference, return_final_state=True)
    yield Call("plain", both, {"x": x, "weight": weight})
    yield Call("silu", both, {"x": x, "weight": weight, "bias": bias, "activation": "silu", "initial_state": state})
    unit = {"heads": ((2, 3), (1, 4)), "num_unit": 1, "activation": "silu"}
    of_heads = _pair(causal_conv1d_heads, causal_conv1d_heads_reference)
    yield Call("heads of length one", of_heads, {"x": draw(2, LENGTH, 10), "weight": draw(10, 4), **unit})
    inputs = {"x": x[:, 0], "weight": weight, "bias": bias, "state": state, "activation": "silu"}
    yield Call("step", {"torch": partial(causal_conv1d_step, backend="torch")}, inputs, ("state",), False)


def _delta_rule(draw: Draw) -> Iterator[Call]:
    leading = (2, LENGTH, 2)
    inputs = _qkv(draw, 2, LENGTH) | {"beta": draw(*leading, low=0.0)}
    # the largest key that this distribution gives is a unit vector
    inputs["k"] /= 2
    both = _pair_of("delta_rule")
    keep = {"initial_state": draw(2, 2, 4, 3), "return_final_state": True}
    yield Call("no decay", both, inputs)
    yield Call("head", both, inputs | {"log_decay": draw(*leading, low=-0.5, high=-0.01), "scale": 0.7} | keep)
    yield Call("key", both, inputs | {"log_decay": draw(*leading, 4, low=-0.5, high=-0.01)} | keep)
    packed = {name: x[:1] for name, x in inputs.items()} | {"cu_seqlens": torch.tensor([0, 3, 3, 68, LENGTH])}
    yield Call("packed", {"torch": both["torch"]}, packed | {"return_final_state": True})
    more = {"log_decay": draw(*leading, 4, low=-0.5, high=-0.01), "write": draw(*leading, 4) / 2}
    yield Call("another key to write", both, inputs | more | keep)
    yield Call("values that are added", both, inputs | more | keep | {"plain": draw(*leading, 4) / 2})


def _generalised_delta_rule(draw: Draw) -> Iterator[Call]:
    inputs = _qkv(draw, 2, LENGTH)
    shape = inputs["q"].shape
    inputs |= {"remove": draw(*shape) / 2, "add": draw(*shape) / 2, "log_decay": draw(*shape, low=-0.6, high=-0.01)}
    yield Call("plain", _pair_of("generalised_delta_rule"), inputs)


def _delta_rule_step(draw: Draw) -> Iterator[Call]:
    inputs = _qkv(draw, 2) | {"beta": draw(2, 2, low=0.0), "log_decay": draw(2, 2, 4, low=-0.5, high=-0.01)}
    torch_only = _torch_of("delta_rule_step")
    yield Call("key", torch_only, inputs | {"state": draw(2, 2, 4, 3)}, gradients=False)
    more = {"state": draw(2, 2, 4, 3), "write": draw(2, 2, 4)}
    yield Call("another key to write", torch_only, inputs | more, gradients=False)


def _embedding(draw: Draw) -> Iterator[Call]:
    inputs = {"tokens": torch.arange(LENGTH) ** 2 % 7, "weight": draw(7, 3)}
    yield Call("plain", _pair(embedding, embedding_reference), inputs)


def _fft_conv(draw: Draw) -> Iterator[Call]:
    u, filter, gates = draw(2, LENGTH, 3), draw(3, LENGTH + 5), draw(2, 2, LENGTH, 3)
    both = _pair_of("fft_conv")
    yield Call("plain", both, {"u": u, "filter": filter})
    yield Call("gated", both, {"u": u, "filter": filter, "D": draw(3), "gate_in": gates[0], "gate_out": gates[1]})
    yield Call("short filter", both, {"u": u, "filter": filter[:, :9]})


def _fft_conv_at(draw: Draw) -> Iterator[Call]:
    inputs = {"u": draw(2, LENGTH, 3), "filter": draw(3, LENGTH), "D": draw(3)}
    places = torch.tensor([[0, 5, LENGTH - 1], [1, 2, 3]])
    yield Call("some positions", _pair_of("fft_conv_at"), inputs | {"positions": places})


def _qkv(draw: Draw, *leading: int) -> Inputs:
    return {"q": draw(*leading, 2, 4), "k": draw(*leading, 2, 4), "v": draw(*leading, 2, 3)}


def _float32_matmul(draw: Draw) -> Iterator[Call]:
    inputs = {"a": draw(3, 8), "b": draw(8, 5), "bias": draw(5)}
    yield Call("plain", _pair_of("float32_matmul"), inputs, gradients=False)


def _forget_gate(draw: Draw) -> Iterator[Call]:
    both = _pair(forget_gate, forget_gate_reference)
    yield Call("damped", both, {"x": draw(3, 4), "damping": 8.0})
    yield Call("bounded", both, {"x": draw(3, 4), "logits": draw(5, 4), "layer": 2})

    def of_rate(op: Callable[..., Any]) -> Callable[..., Any]:
        # the record was made when the operator took the rate, and not its logarithm
        return lambda x, bias, rate: op(x, bias=bias, log_rate=rate.log())

    rated = {name: of_rate(op) for name, op in both.items()}
    yield Call("rated", rated, {"x": draw(3, 4), "bias": draw(4), "rate": draw(2, low=0.5, high=2.0)})


def _gated_linear_attention(draw: Draw) -> Iterator[Call]:
    leading = (2, LENGTH)
    inputs, state = _qkv(draw, *leading), draw(2, 2, 4, 3)
    both = _pair(gated_linear_attention, gated_linear_attention_reference)
    keep = {"initial_state": state, "return_final_state": True}
    yield Call("no decay", both, inputs)
    yield Call("head", both, inputs | {"log_decay": draw(2, low=-0.5, high=-0.01), "scale": 0.7} | keep)
    yield Call("head and step", both, inputs | {"log_decay": draw(*leading, 2, low=-0.5, high=-0.01)} | keep)
    yield Call("key", both, inputs | {"log_decay": draw(*leading, 2, 4, low=-0.5, high=-0.01)} | keep)
    on_value = {"log_decay": draw(*leading, 2, 3, low=-0.5, high=-0.01), "decay_on": "value"}
    yield Call("value", both, inputs | on_value | keep)
    packed = {name: x[:1] for name, x in inputs.items()}
    packed |= {"log_decay": draw(1, LENGTH, 2, 4, low=-0.5, high=-0.01), "cu_seqlens": torch.tensor([0, 3, 68, LENGTH])}
    yield Call("packed", {"torch": both["torch"]}, packed | {"return_final_state": True})


def _gated_linear_attention_step(draw: Draw) -> Iterator[Call]:
    torch_only = {"torch": partial(gated_linear_attention_step, backend="torch")}
    inputs = _qkv(draw, 2) | {"log_decay": draw(2, 2, 4, low=-0.5, high=-0.01), "state": draw(2, 2, 4, 3)}
    yield Call("key", torch_only, inputs, gradients=False)
    on_value = {"log_decay": draw(2, 2, 3, low=-0.5, high=-0.01), "decay_on": "value"}
    yield Call("value", torch_only, inputs | on_value, gradients=False)


def _gated_slot_attention(draw: Draw) -> Iterator[Call]:
    leading = (2, LENGTH, 2)
    inputs = _qkv(draw, *leading[:2]) | {"slots": draw(*leading, 5, low=0.0)}
    both = _pair(gated_slot_attention, gated_slot_attention_reference)
    log_decay = draw(*leading, 5, low=-0.5, high=-0.01)
    state = (draw(2, 2, 4, 5), draw(2, 2, 5, 3))
    yield Call("no decay", both, inputs)
    keep = {"initial_state": state, "return_final_state": True}
    yield Call("decay", both, inputs | {"log_decay": log_decay, "scale": 0.7} | keep)
    packed = {name: x[:1] for name, x in inputs.items()}
    packed |= {"log_decay": log_decay[:1], "cu_seqlens": torch.tensor([0, 3, 68, LENGTH])}
    yield Call("packed", {"torch": both["torch"]}, packed | {"return_final_state": True})
    one = {name: x[:, 0] for name, x in inputs.items()} | {"log_decay": log_decay[:, 0], "state": state}
    yield Call("step", {"torch": partial(gated_slot_attention_step, backend="torch")}, one, gradients=False)


RULES = ("zoh", "bilinear", "dss-softmax", "dss-exp", "dss-exp-no-scale")


def _system(draw: Draw, *, shared: bool = False) -> Inputs:
    return {
        "A": draw.complex(*(() if shared else (3,)), 4, low=-0.9, high=-0.1),
        "B": draw.complex(3, 4),
        "C": draw.complex(3, 4),
        "dt": draw(3, low=0.05, high=0.3),
    }


def _linear_cross_entropy(draw: Draw) -> Iterator[Call]:
    inputs = {"x": draw(2, LENGTH, 3), "weight": draw(11, 3), "targets": draw.integers(11, 2, LENGTH)}
    both = _pair_of("linear_cross_entropy")
    yield Call("plain", both, inputs)
    targets = inputs["targets"].clone()
    targets[0, ::2] = -1
    yield Call("bias, not all labelled", both, inputs | {"bias": draw(11), "targets": targets, "ignore_index": -1})


def _lti_ssm(draw: Draw) -> Iterator[Call]:
    u, gates, state = draw(2, LENGTH, 3), draw(2, 2, LENGTH, 3), draw.complex(2, 3, 4)
    both = _pair_of("lti_ssm", return_final_state=True)
    for rule in RULES:
        yield Call(rule, both, {"u": u, **_system(draw), "discretization": rule})
    more = {"D": draw(3), "gate_in": gates[0], "gate_out": gates[1]}
    yield Call("gated, with a state", both, {"u": u, **_system(draw), **more, "initial_state": state})
    shared = _system(draw, shared=True) | {"B": None, "conj_pairs": False}
    yield Call("shared eigenvalues", both, {"u": u, **shared})
    two_sided = _system(draw) | {"C": draw.complex(2, 3, 4), "bidirectional": True}
    yield Call("bidirectional", _pair_of("lti_ssm"), {"u": u, **two_sided})
    one = {"u": u[:, 0], "state": state, **_system(draw), "D": draw(3)}

    def step(A: Tensor, B: Tensor, C: Tensor, dt: Tensor, D: Tensor, **rest: Any) -> Tensor:
        return lti_ssm_step(system=ContinuousSystem(A, B, C, dt, D), **rest)

    yield Call("step", {"torch": step}, one, ("state",), False)
    softmax = {"discretization": "dss-softmax", "length": 9, "position": 4}
    yield Call("step of dss-softmax", {"torch": step}, one | softmax, ("state",), False)


def _lti_ssm_step(draw: Draw) -> Iterator[Call]:
    inputs = {"u": draw(2, 3), "state": draw.complex(2, 3, 4), "log_dt": draw(3) - 3, "skip": draw(3)}
    inputs |= {"log_A_real": draw(3, 4), "A_imag": draw(3, 4), "B": None, "C": draw(3, 4, 2)}
    both = _pair_of("lti_ssm_step")
    for rule in ("zoh", "bilinear", "dss-exp", "dss-exp-no-scale"):
        yield Call(rule, both, inputs | {"discretization": rule}, gradients=False)
    more = {"B": draw(3, 4, 2), "gate_in": draw(2, 3), "gate_out": draw(2, 3)}
    yield Call("trained B, gated", both, inputs | more, gradients=False)
    shared = {"log_A_real": draw(1, 4), "A_imag": draw(1, 4), "conj_pairs": False}
    yield Call("shared eigenvalues", both, inputs | shared, gradients=False)


def _scan(draw: Draw, *leading: int) -> Inputs:
    return {
        "x": draw(*leading, 3),
        "dt": draw(*leading, 3, low=0.05, high=0.5),
        "A": draw(3, 4, low=-2.0, high=-0.1),
        "B": draw(*leading, 4),
        "C": draw(*leading, 4),
    }


def _norm(draw: Draw) -> Iterator[Call]:
    x, residual, gate, weight, bias = draw(2, 5, 8), draw(2, 5, 8), draw(2, 5, 8), draw(8), draw(8)
    both = _pair_of("norm")
    yield Call("layer", both, {"x": x, "weight": weight, "bias": bias, "kind": "layer", "residual": residual})
    yield Call("rms", both, {"x": x, "weight": weight, "residual": residual})
    yield Call("gated", both, {"x": x, "weight": weight, "gate": gate, "activation": "silu", "eps": 1e-2})
    yield Call("gated first", both, {"x": x, "weight": weight, "gate": gate, "gate_first": True})
    heads = {"weight": draw(5, 8), "bias": draw(5, 8), "kind": "layer"}
    yield Call("heads, sigmoid gate", both, {"x": x, **heads, "gate": gate, "gate_activation": "sigmoid"})
    added = {"gate": gate, "gate_activation": "identity", "skip": draw(2, 5, 8), "skip_scale": draw(2, 5)}
    yield Call("heads, with a skip", both, {"x": x, **heads, **added})


def _rotary(draw: Draw) -> Iterator[Call]:
    heads = {"q": draw(2, 3, 2, 4), "k": draw(2, 3, 2, 4)}
    cos, sin, time = draw(5, 2), draw(5, 2), torch.tensor([[0, 1, 2], [4, 2, 3]])

    def with_tables(op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k: op(q, k, cos.to(q), sin.to(q), time)

    yield Call("plain", {name: with_tables(op) for name, op in _pair(rotary, rotary_reference).items()}, heads)


def _rotated_keys(draw: Draw) -> Iterator[Call]:
    inputs = {"B": draw(2, 5, 9), "C": draw(2, 5, 9), "B_weight": draw(9), "C_weight": draw(9)}
    inputs |= {"B_bias": draw(3, 9), "C_bias": draw(3, 9), "dt": draw(2, 5, 3), "w": draw(2, 5, 2)}
    yield Call("plain", _pair_of("rotated_keys"), inputs)


def _squared_relu(draw: Draw) -> Iterator[Call]:
    both = _pair_of("squared_relu")
    yield Call("plain", both, {"x": draw(3, 5, 8)})
    yield Call("in front of a linear map", both, {"x": draw(3, 5, 4), "weight": draw(6, 4)})


def _ssd(draw: Draw) -> Iterator[Call]:
    both = _pair_of("ssd", return_final_state=True)
    inputs = {"q": draw(2, 70, 2, 5), "k": draw(2, 70, 2, 5), "v": draw(2, 70, 4, 3)}
    inputs |= {"log_decay": draw(2, 70, 4, low=-0.5, high=-0.01), "write": draw(2, 70, 4, low=0.1, high=0.9)}
    yield Call("one weight", both, inputs)
    yield Call("two weights", both, inputs | {"own": draw(2, 70, 4, low=0.1, high=0.9), "skip": draw(4)})


def _ssd_steps(draw: Draw) -> Iterator[Call]:
    both = _pair_of("ssd_steps")
    inputs = {"x": draw(2, 9, 3), "bias": draw(3), "rate": draw(3, low=1.0, high=16.0)}
    yield Call("euler", both, inputs)
    inputs |= {"rate": draw(2, 9, 3), "share": draw(2, 9, 3)}
    yield Call("trapezoid", _pair_of("ssd_steps", least=0.3), inputs)


def _rwkv6_inputs(draw: Draw) -> Iterator[Call]:
    inputs = {name: draw(2, 5, 6) for name in "rkvw"} | {"w_0": draw(6), "bonus": draw(6), "head_dim": 3}
    yield Call("plain", _pair_of("rwkv6_inputs"), inputs)


def _rwkv7_inputs(draw: Draw) -> Iterator[Call]:
    inputs = {name: draw(2, 5, 6) for name in "rkwa"} | {name: draw(6) for name in ("w_0", "a_0", "xi")}
    inputs |= {"alpha": draw(6, low=0.5, high=1.5), "rho": draw(6), "head_dim": 3}
    yield Call("plain", _pair_of("rwkv7_inputs"), inputs)


def _selective_scan(draw: Draw) -> Iterator[Call]:
    leading = (2, LENGTH)
    inputs = _scan(draw, *leading)
    both = _pair_of("selective_scan", return_final_state=True)
    yield Call("plain", both, inputs)
    more = {"D": draw(3), "z": draw(*leading, 3), "dt_bias": draw(3), "dt_softplus": True}
    yield Call("gated, softplus, with a state", both, inputs | more | {"initial_state": draw(2, 3, 4)})
    yield Call("negative eigenvalues", both, inputs | {"negative_eigenvalues": True})
    fixed = {"A": draw.complex(3, 4, low=-2.0, high=-0.1), "B": draw.complex(3, 4), "C": draw.complex(3, 4)}
    yield Call("complex, fixed maps", both, inputs | fixed)


def _h3_inner_step(draw: Draw) -> Iterator[Call]:
    inputs = {name: draw(2, 3) for name in "qkv"} | {"window": draw(2, 3, 4), "taps": draw(3, 5)}
    inputs |= {"state": torch.view_as_complex(draw(2, 3, 4, 2)), "C": draw(3, 4, 2), "B": None}
    inputs |= {"log_A_real": draw(3, 4), "A_imag": draw(3, 4), "log_dt": draw(3) - 3}
    inputs |= {"shift_skip": draw(3), "skip": draw(3)}
    yield Call("plain", _pair_of("h3_inner_step"), inputs, gradients=False)


def _mamba_inner_step(draw: Draw) -> Iterator[Call]:
    inputs = {
        "x": draw(2, 3), "z": draw(2, 3), "window": draw(2, 3, 3), "state": draw(2, 3, 4), "conv_weight": draw(3, 4),
        "conv_bias": draw(3), "x_proj": draw(10, 3), "dt_proj": draw(3, 2), "dt_bias": draw(3), "log_A": draw(3, 4),
        "D": draw(3),
    }  # fmt: skip
    yield Call("gated", _pair_of("mamba_inner_step"), inputs, gradients=False)


def _selective_scan_step(draw: Draw) -> Iterator[Call]:
    inputs = _scan(draw, 2) | {"state": draw(2, 3, 4), "D": draw(3), "z": draw(2, 3), "dt_bias": draw(3)}
    yield Call("softplus", _torch_of("selective_scan_step"), inputs | {"dt_softplus": True}, gradients=False)


def _skinny_linear(draw: Draw) -> Iterator[Call]:
    inputs = {"x": draw(3, 8), "weight": draw(5, 8), "bias": draw(5)}

    def both(norm: Norm) -> dict[str, Callable[..., Any]]:
        reference = partial(skinny_linear_reference, norm=norm)
        return {"torch": partial(skinny_linear, norm=norm, backend="torch"), "reference": reference}

    layer, groups = Norm("layer", draw(8), draw(8), 1e-2), Norm("rms", draw(4), None, 1e-2)
    yield Call("layer norm", both(layer), inputs | {"activation": "gelu"}, gradients=False)
    more = {"gate": draw(3, 8), "residual": draw(3, 5)}
    yield Call("groups and gate", both(groups), inputs | more, gradients=False)


def _ssm_kernel(draw: Draw) -> Iterator[Call]:
    both = _pair_of("ssm_kernel")
    for rule in RULES:
        yield Call(rule, both, {**_system(draw), "length": LENGTH, "discretization": rule})
    shared = _system(draw, shared=True) | {"B": None, "conj_pairs": False}
    yield Call("shared eigenvalues", both, {**shared, "length": LENGTH})
    longer = {"length": LENGTH, "discretization": "dss-softmax", "normalize_over": LENGTH + 7}
    yield Call("normalised over more", {"torch": both["torch"]}, {**_system(draw), **longer})
    detached = {"length": LENGTH, "discretization": "dss-softmax", "detach_maximum": True}
    growing = _system(draw)
    growing["A"] = -growing["A"]
    yield Call("maximum detached", both, {**growing, **detached})


def _slstm(draw: Draw) -> Iterator[Call]:
    inputs = {"x": draw(2, 9, 4, 2, 3), "recurrent": draw(4, 2, 3, 3), "bias": draw(4, 2, 3)}
    both = _pair_of("slstm", return_final_state=True)
    yield Call("plain", both, inputs)
    yield Call("with a state", both, inputs | {"initial_state": draw(2, 4, 2, 3, low=1.0, high=2.0)})


def _slstm_step(draw: Draw) -> Iterator[Call]:
    inputs = {"x": draw(2, 4, 2, 3), "recurrent": draw(4, 2, 3, 3), "bias": draw(4, 2, 3)}
    inputs["state"] = draw(2, 4, 2, 3, low=1.0, high=2.0)
    yield Call("plain", _torch_of("slstm_step"), inputs, gradients=False)


def _swiglu(draw: Draw) -> Iterator[Call]:
    yield Call("plain", _pair_of("swiglu"), {"x": draw(3, 5, 8)})
    inputs = {"x": draw(3, 5, 8), "weight": draw(6, 4)}
    yield Call("in front of a linear map", _pair_of("swiglu"), inputs)
    yield Call("halves apart", _pair_of("swiglu"), {"x": draw(3, 5, 4), "up": draw(3, 5, 4)})


def _token_shift(draw: Draw) -> Iterator[Call]:
    both, inputs = _pair_of("token_shift"), {"x": draw(2, 5, 3), "mu": draw(4, 3)}
    yield Call("plain", both, inputs)
    yield Call("mu weighs the present input", both, {**inputs, "weighs": "now"})
    yield Call("with a state", both, inputs | {"delta": draw(4, 2, 5, 3), "initial_state": draw(2, 3)})


def _wkv(draw: Draw) -> Iterator[Call]:
    inputs = {"k": draw(2, LENGTH, 3), "v": draw(2, LENGTH, 3), "log_decay": draw(3, low=-2.0, high=-0.1)}
    inputs["bonus"] = draw(3)
    both = _pair_of("wkv", return_final_state=True)
    yield Call("plain", both, inputs)
    state = draw(2, 3, 3, low=1.0, high=2.0)
    yield Call("with a state", both, inputs | {"initial_state": state})


def _wkv_step(draw: Draw) -> Iterator[Call]:
    inputs = {"k": draw(2, 3), "v": draw(2, 3), "log_decay": draw(3, low=-2.0, high=-0.1), "bonus": draw(3)}
    inputs["state"] = draw(2, 3, 3, low=1.0, high=2.0)
    yield Call("plain", _torch_of("wkv_step"), inputs, gradients=False)


OPERATOR_CALLS: dict[str, Callable[[Draw], Iterator[Call]]] = {name: globals()[f"_{name}"] for name in OPERATORS}
"""The functions above by the names of their operators."""


def run(call: Call, implementation: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of a call, and the gradients of every floating tensor among its inputs."""
    inputs = {name: _fresh(value, call.gradients) for name, value in call.inputs.items()}
    outputs = [*_of(implementation(**inputs)), *(inputs[name] for name in call.in_place)]
    if not call.gradients:
        return outputs, []
    leaves = [x for value in inputs.values() for x in _of(value) if isinstance(x, Tensor) and x.requires_grad]
    weights = Draw(7)
    total = sum((wide(x) * weights(*wide(x).shape)).sum() for x in outputs)
    return outputs, list(torch.autograd.grad(total, leaves))


def _fresh(value: Any, gradients: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_fresh(part, gradients) for part in value)
    if not isinstance(value, Tensor):
        return value
    return value.clone().requires_grad_(gradients and (value.is_floating_point() or value.is_complex()))
