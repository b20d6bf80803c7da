"""The refusals of operators, in words that begin with their names, as tables for `test_refusals.py`.

REFUSED is the table to which a new refusal is added: words of the message, and what is changed of valid inputs. Rows of
REFUSED are refused by every backend, rows of REFUSED_BY_KERNELS by the kernels alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from subquad.kernels import OPERATORS
from subquad.kernels.attention import attention_step
from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from subquad.kernels.embedding import embedding
from subquad.kernels.float32_matmul import float32_matmul
from subquad.kernels.forget_gate import forget_gate
from subquad.kernels.gated_slot_attention import gated_slot_attention_step
from subquad.kernels.lti_ssm import ContinuousSystem, lti_ssm_step
from subquad.kernels.rotary import rotary
from subquad.kernels.rwkv6_inputs import rwkv6_position
from subquad.kernels.rwkv7_inputs import rwkv7_position
from subquad.kernels.skinny_linear import MAX_ROWS, Norm, skinny_linear
from subquad.kernels.token_shift import token_shift_step
from subquad.run_suite import REPOSITORY
from subquad.suite.laws.calls import Operator, is_float

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch", "triton"]
INT, HALF = torch.int64, torch.bfloat16


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def ints(*values):
    return torch.tensor(values, device=DEVICE)


def of_workload(name, index=0, **options):
    """Valid inputs: those of a workload, and its operator, which takes a backend."""

    def make():
        found = Operator(REPOSITORY.operators.load(name), device=DEVICE)
        call = next(call for call in found.once() if call.implementation.name == "torch")
        return found.function(call), found.rounded(call, found.inputs(found.shapes[index])) | options

    return make


def of_function(function, **inputs):
    return lambda: (function, {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()})


def continuous_step(u, state, backend="torch", **system):
    return lti_ssm_step(u, ContinuousSystem(**system), state, conj_pairs=False, backend=backend)


def without_backend(function):
    """A function in plain PyTorch alone."""
    return lambda backend="torch", **inputs: function(**inputs)


HEADS = {name: ones(2, 3, 4) for name in "qkv"}
CALLS = {
    **{name: of_workload(name) for name in OPERATORS},
    "attention with window": of_workload("attention", 1),
    "attention_step with count": of_function(
        attention_step, **HEADS, keys=ones(2, 6, 3, 4), values=ones(2, 6, 3, 4), count=ints(0, 1)
    ),
    "causal_conv1d without state": of_function(causal_conv1d, x=ones(2, 8, 6), weight=ones(6, 4)),
    "causal_conv1d_step": of_function(
        causal_conv1d_step, x=ones(2, 6), weight=ones(6, 4), bias=None, state=ones(2, 6, 3)
    ),
    "delta_rule of B 2": of_workload("delta_rule", 1),
    "delta_rule without decay": of_workload("delta_rule", 2),
    "embedding": of_function(embedding, tokens=ints(0, 2, 1), weight=ones(3, 2)),
    "float32_matmul with bias": of_function(float32_matmul, a=ones(3, 4), b=ones(4, 3), bias=ones(3), out=ones(3, 3)),
    "forget_gate": of_function(forget_gate, x=ones(2, 3)),
    "forget_gate with a rate": of_function(forget_gate, x=ones(2, 4), bias=ones(4), log_rate=ones(2)),
    "forget_gate of a layer": of_function(forget_gate, x=ones(2, 3), logits=ones(4, 3), layer=1),
    "gated_linear_attention of B 1": of_workload("gated_linear_attention", 4),
    "gated_slot_attention of B 2": of_workload("gated_slot_attention", 1),
    "gated_slot_attention_step": of_function(
        gated_slot_attention_step, **HEADS, slots=ones(2, 3, 5), log_decay=-ones(2, 3, 5),
        state=(ones(2, 3, 4, 5), ones(2, 3, 5, 4)),
    ),
    "lti_ssm of dss-softmax": of_workload("lti_ssm", 2),
    "lti_ssm_step of a ContinuousSystem": of_function(
        continuous_step, u=ones(2, 8), state=ones(2, 8, 3), A=-ones(8, 3), B=None, C=ones(8, 3), dt=ones(8), D=ones(8)
    ),
    "norm of heads": of_workload("norm", 3),
    "rotary": of_function(
        rotary, q=ones(2, 3, 1, 4), k=ones(2, 3, 1, 4), cos=ones(5, 2), sin=ones(5, 2), time=ints(0, 1, 2)
    ),
    "rwkv6_position": of_function(
        without_backend(rwkv6_position), **dict.fromkeys("rkvw", ones(2, 6)), w_0=ones(6), bonus=ones(6), head_dim=3
    ),
    "rwkv7_position": of_function(
        without_backend(rwkv7_position), **dict.fromkeys("rkwa", ones(2, 6)),
        **dict.fromkeys(("w_0", "a_0", "xi", "alpha", "rho"), ones(6)), head_dim=3,
    ),
    "selective_scan of complex states": of_workload("selective_scan", 2),
    "selective_scan_step of complex states": of_workload("selective_scan_step", 1),
    "skinny_linear": of_function(skinny_linear, x=ones(1, 8), weight=ones(4, 8, dtype=HALF)),
    "token_shift_step": of_function(without_backend(token_shift_step), x_t=ones(2, 4), state=ones(2, 4), mu=ones(5, 4)),
}  # fmt: skip
"""Functions with valid inputs; the name begins with that of the operator."""


def less(axis):
    """One element less along an axis."""
    return lambda x: x.narrow(axis, 0, x.shape[axis] - 1)


def one(axis):
    """A single element along an axis, which would be broadcast."""
    return lambda x: x.narrow(axis, 0, 1)


def none_of(axis):
    return lambda x: x.narrow(axis, 0, 0)


def real(x):
    return x.real.clone()


def trained(x):
    return x.clone().requires_grad_()


def norm_of(*size, kind="rms", bias=None, eps=1e-5):
    return Norm(kind, ones(*size), bias, eps)


NAN = float("nan")
NOT_FINITE = "must be a finite number"
BACKEND = ("is not one of 'auto', 'torch', 'triton'", {"backend": "cuda"})

REFUSED = {
    "attention": [
        ("k and v must be [B, T, H, K] with T, H, K >= 1 and q of the same shape", {"k": less(3)}),
        ("or with `positions` [B, P, H, K]; got q, k and v [2, 69, 2, 8], [2, 70, 2, 8], ", {"q": less(1)}),
        ("k and v must be", {"q": lambda x: x[..., 0]}),
        ("k and v must be", {name: none_of(3) for name in "qkv"}),
        ("positions must be [2, 70] and int64, got [2, 69]", {"positions": ones(2, 69, dtype=INT)}),
        ("positions must be [2, 70] and int64, got [2, 70] and torch.float32", {"positions": ones(2, 70)}),
        ("window must be at least 1 and whole, got 0", {"window": 0}),
        ("window must be at least 1 and whole, got 2.5", {"window": 2.5}),
        ("window must be a number or [2] and int64, one for each head", {"window": ints(1, 2, 3)}),
        ("window must be a number or [2] and int64, one for each head", {"window": ones(2)}),
        ("dropout must be at least 0 and below 1, got 1.0", {"dropout": 1.0}),
        ("dropout must be at least 0 and below 1, got nan", {"dropout": NAN}),
        (f"scale {NOT_FINITE}, got nan", {"scale": NAN}),
    ],
    "attention_step": [
        ("q, k and v must be [B, H, K], all of one shape", {"k": less(2)}),
        ("values must be [2, 20, 2, 8], got [2, 19, 2, 8]", {"values": less(1)}),
        ("cos must be [positions, 4] with at least 20 positions", {"cos": less(0)}),
        ("window must be [2] and int64", {"window": ints(1)}),
        ("window must be [2] and int64", {"window": ones(2)}),
        ("cos and sin are given together", {"sin": None}),
        ("with a capacity of at least 1", {"keys": none_of(1), "values": none_of(1)}),
        (f"scale {NOT_FINITE}", {"scale": NAN}),
    ],
    "attention_step with count": [("count must be int64, got torch.int32", {"count": lambda x: x.int()})],
    "cauchy": [
        ("residues must end in [3, 5] as Lambda, got [2, 3, 4]", {"residues": less(2)}),
        ("Lambda must be [D, N >= 1] with D=3 as in dt, got [2, 5]", {"Lambda": less(0)}),
        ("dt must be real and [D], got torch.float32 and [3, 1]", {"dt": lambda x: x[:, None]}),
        ("s must be complex and [F >= 1], got torch.float32 and [11]", {"s": real}),
        ("must be complex64 with dt in float32, or complex128 with float64", {"dt": lambda x: x.double()}),
    ],
    "causal_conv1d": [
        ("x must be [B, T, D] with T >= 1", {"x": none_of(1)}),
        ("W in 2..4, got [5, 9]; use fft_conv", {"weight": ones(5, 9)}),
        ("bias must be [5], got [4]", {"bias": less(0)}),
        ("activation='gelu' is not one of None, 'silu'", {"activation": "gelu"}),
        ("initial_state must be [2, 5, 3], or longer along the last axis, got [2, 5, 2]", {"initial_state": less(2)}),
        ("seq_idx excludes states", {"seq_idx": ones(2, 37, dtype=INT)}),
        BACKEND,
    ],
    "causal_conv1d without state": [
        ("seq_idx must be [2, 8], got [2, 7]", {"seq_idx": ones(2, 7, dtype=INT)}),
        ("seq_idx must be integers, got torch.float32", {"seq_idx": ones(2, 8)}),
    ],
    "causal_conv1d_step": [
        ("state must be [2, 6, 3], or longer along the last axis, got [2, 6, 2]", {"state": less(2)}),
        ("x must be [B, D] or [B, T, D]", {"x": lambda x: x[0]}),
    ],
    "delta_rule": [
        ("q and v must be [B, T, H, K] and [B, T, H, V]", {"q": lambda x: x[..., 0]}),
        ("needs at least one key channel, got K=0", {name: none_of(3) for name in "qk"}),
        ("beta must be [1, 70, 2] to go with q and v, got [1, 70, 2, 1]", {"beta": lambda x: x[..., None]}),
        ("log_decay must be [1, 70, 2, 8] or [1, 70, 2] to go with q and v, got [2]", {"log_decay": ones(2)}),
        ("k must be [1, 70, 2, 8] to go with q and v, got [1, 70, 2, 7]", {"k": less(3)}),
        ("write must be [1, 70, 2, 8]", {"write": ones(1, 70, 2, 7)}),
        ("plain must be [1, 70, 2, 8]", {"plain": ones(1, 69, 2, 8)}),
        ("v must share B, T, H with q", {"v": less(1)}),
        ("the heads of q must divide those of v, got 2 and 3; give", {"v": ones(1, 70, 3, 12)}),
        ("k must be [1, 70, 1, 8] to go with q and v", {"q": one(2)}),
        ("write must be [1, 70, 2, 8]", {name: ones(1, 70, 1, 8) for name in ("q", "k", "write")}),
        ("initial_state must be [1, 2, 8, 12] to go with q and v", {"initial_state": lambda x: x.mT}),
        ("cu_seqlens must rise from 0 to T=70 and never fall, got [0, 69]", {"cu_seqlens": ints(0, 69)}),
        (f"scale {NOT_FINITE}", {"scale": NAN}),
        BACKEND,
    ],
    "delta_rule of B 2": [("cu_seqlens needs all sequences packed along time, B=1", {"cu_seqlens": ints(0, 20)})],
    "delta_rule_step": [
        ("k must be [2, 2, 5] to go with q and v, got [1, 2, 5]", {"k": one(0)}),
        ("v must share B, H with q [2, 2, 5], got [1, 2, 12]", {"v": one(0)}),
        ("the heads of q must divide those of v, got 2 and 1; give", {"v": one(1)}),
        ("beta must be [2, 2]", {"beta": one(1)}),
        ("state must be [2, 2, 5, 12] to go with q and v, got [1, 2, 5, 12]", {"state": one(0)}),
    ],
    "embedding": [
        ("tokens must be integers, got torch.float32", {"tokens": lambda x: x.float()}),
        ("tokens must be integers, got torch.bool", {"tokens": lambda x: x > 0}),
        ("weight must be [V, D], got [3]", {"weight": ones(3)}),
    ],
    "fft_conv": [
        ("u must be [B, T, D] with T >= 1", {"u": none_of(1)}),
        ("filter must be [D, L] with D=3 and L >= 1, got [2, 32]", {"filter": less(0)}),
        ("gate_in must be [1, 32, 3] to go with u, got [1, 1, 3]", {"gate_in": one(1)}),
        BACKEND,
    ],
    "fft_conv_at": [
        ("positions must be integers, got torch.float32", {"positions": lambda x: x.float()}),
        ("positions must be [2, P] to go with u, got [1, 5]", {"positions": less(0)}),
    ],
    "float32_matmul": [("a is [M, K] and b [K, N], got [20, 32] and [33, 9]", {"a": less(1)})],
    "float32_matmul with bias": [
        ("bias must be [3], got [1]", {"bias": one(0)}),
        ("out must be [3, 3], got [3, 2]", {"out": less(1)}),
    ],
    "forget_gate": [
        ("damping must be a finite number above 0, got 0.0", {"damping": 0.0}),
        ("damping must be a finite number above 0, got nan", {"damping": NAN}),
    ],
    "forget_gate with a rate": [
        ("bias must be [4] to go with x, got [3]", {"bias": less(0)}),
        ("log_rate must be [H] with H a divisor of 4, got [3]", {"log_rate": ones(3)}),
        ("bias and log_rate go together, and without logits", {"bias": None}),
        ("bias and log_rate go together, and without logits", {"logits": ones(4, 4), "layer": 1}),
        ("damping must be 1 with logits or a rate, got 2.0", {"damping": 2.0}),
    ],
    "forget_gate of a layer": [
        ("logits must be [layers, 3] with layers > layer >= 1, got [4, 2]", {"logits": less(1)}),
        ("with layers > layer >= 1, got [4, 3] and layer=4", {"layer": 4}),
        ("damping must be 1 with logits or a rate, got 2.0", {"damping": 2.0}),
    ],
    "gated_linear_attention": [
        ("decay_on='keys' is not one of 'key', 'value'", {"decay_on": "keys"}),
        ("k must be [1, 70, 2, 8] to go with q and v", {"k": less(3)}),
        ("v must share B, T, H with q", {"v": less(1)}),
        ("the heads of q must divide those of v, got 2 and 3; give", {"v": ones(1, 70, 3, 12)}),
        ("the heads of q must divide those of v, got 2 and 0; give", {"v": none_of(2)}),
        ("the heads of q must divide those of v, got 0 and 2; give", {name: none_of(2) for name in "qk"}),
        ("k must be [1, 70, 1, 8] to go with q and v", {"q": one(2)}),
        ("log_decay must be [1, 70, 2, 8] or [1, 70, 2] or [2]", {"log_decay": one(2)}),
        ("q and v must be [B, T, H, K] and [B, T, H, V]", {"q": lambda x: x[..., 0]}),
        ("needs at least one key channel, got K=0", {name: none_of(3) for name in "qk"}),
        ("log_decay must be [1, 70, 2, 8] or [1, 70, 2] or [2]", {"log_decay": less(3)}),
        ("initial_state must be [1, 2, 8, 12] to go with q and v", {"initial_state": lambda x: x.mT}),
        ("cu_seqlens must be integers, got torch.float32", {"cu_seqlens": ones(2)}),
        (f"scale {NOT_FINITE}", {"scale": float("inf")}),
        BACKEND,
    ],
    "gated_linear_attention of B 1": [
        *(
            ("cu_seqlens must rise from 0 to T=20", {"cu_seqlens": ints(*ends)})
            for ends in ([0], [0, 19], [1, 20], [0, 13, 2, 20])
        ),
        ("cu_seqlens must be [sequences + 1]", {"cu_seqlens": ints([0, 20])}),
        (
            "cu_seqlens needs all sequences packed along time, B=1, got B=2",
            {"cu_seqlens": ints(0, 20)} | {name: lambda x: torch.cat([x, x]) for name in "qkv"},
        ),
    ],
    "gated_linear_attention_step": [
        ("k must be [2, 2, 5] to go with q and v, with decay_on='key', got [1, 2, 5]", {"k": one(0)}),
        ("v must share B, H with q [2, 2, 5], got [1, 2, 12]", {"v": one(0)}),
        ("the heads of q must divide those of v, got 2 and 1; give", {"v": one(1)}),
        ("log_decay must be [2, 2, 5] or [2, 2] or [2]", {"log_decay": less(2)}),
        ("state must be [2, 2, 5, 12] to go with q and v, got [1, 2, 5, 12]", {"state": one(0)}),
    ],
    "gated_slot_attention": [
        ("k must be [1, 70, 1, 8] to go with q and slots", {"k": less(3)}),
        ("slots must be [1, 70, 1, 5] to go with q and slots, got [1, 69, 1, 5]", {"slots": less(1)}),
        ("log_decay must be [1, 70, 1, 5]", {"log_decay": less(3)}),
        ("needs at least one slot", {"slots": none_of(3), "log_decay": None}),
        ("initial_state[0] must be [1, 1, 8, 5]", {"initial_keys": lambda x: x.mT}),
        ("initial_state[1] must be [1, 1, 5, 12]", {"initial_values": one(2)}),
        (f"scale {NOT_FINITE}", {"scale": NAN}),
        BACKEND,
    ],
    "gated_slot_attention of B 2": [
        ("cu_seqlens needs all sequences packed along time, B=1", {"cu_seqlens": ints(0, 20)})
    ],
    "gated_slot_attention_step": [
        ("k must be [2, 3, 4]", {"k": one(0)}),
        ("v must share B, H with q", {"v": one(1)}),
        ("slots must be [2, 3, 5]", {"slots": one(1)}),
        ("log_decay must be [2, 3, 5]", {"log_decay": one(2)}),
        ("state[1] must be [2, 3, 5, 4]", {"state": (ones(2, 3, 4, 5), ones(1, 3, 5, 4))}),
    ],
    "generalised_delta_rule": [
        ("remove must be [1, 70, 1, 8] to go with q, got [1, 1, 1, 8]", {"remove": one(1)}),
        ("add must be [1, 70, 1, 8]", {"add": one(1)}),
        ("log_decay must be [1, 70, 1, 8]", {"log_decay": one(3)}),
    ],
    "h3_inner_step": [
        ("C must be [40, 4, 2] to go with the state, got [39, 4, 2]", {"C": less(0)}),
        ("taps [D, M] with M >= 2", {"taps": one(1)}),
        ("state must be complex", {"state": real}),
        ("dt_scale must be a finite number above 0, got nan", {"dt_scale": NAN}),
        ("discretization='dss-softmax' is not one of 'zoh', 'bilinear'", {"discretization": "dss-softmax"}),
    ],
    "linear_cross_entropy": [
        ("x is [..., D] and targets [...], got [40, 16] and [39]", {"targets": less(0)}),
        ("weight must be [V, D] with D=16, got [70, 15]", {"weight": less(1)}),
        ("bias must be [70], got [5]", {"bias": ones(5)}),
        ("targets must be integers, got torch.float32", {"targets": lambda x: x.float()}),
        ("targets must be integers, got torch.bool", {"targets": lambda x: x > 0}),
    ],
    "lti_ssm": [
        ("belong to dss-softmax, not to zoh", {"length": 8}),
        ("needs C as [2, D, N]", {"bidirectional": True}),
        ("bidirectional=True has no state to pass", {"bidirectional": True, "C": lambda x: torch.stack([x, x])}),
        ("D must be [3] to go with u and A, got [2]", {"D": less(0)}),
        ("gate_out must be [2, 70, 3]", {"gate_out": one(0)}),
        BACKEND,
    ],
    "lti_ssm of dss-softmax": [
        ("normalized over length=8, got 20 steps from position 4; raise length to 24", {"length": 8, "position": 4}),
    ],
    "lti_ssm_step": [
        ("C must be [20, 4, 2] to go with the state, got [19, 4, 2]", {"C": less(0)}),
        ("u must be [B, D] and state [B, D, N], got [1, 19] and [1, 20, 4]", {"u": less(1)}),
        ("gate_in must be [1, 20] to go with u, got [2, 20]", {"gate_in": ones(2, 20)}),
        ("a DiagonalSystem needs a complex state", {"state": real}),
        ("discretization='zero' is not one of 'zoh'", {"discretization": "zero"}),
        ("dss-softmax needs length", {"discretization": "dss-softmax"}),
        ("dt_scale must be a finite number above 0, got -1.0", {"dt_scale": -1.0}),
        (
            "position must be a number or [1], got [2]",
            {"discretization": "dss-softmax", "length": 9, "position": ints(0, 1)},
        ),
    ],
    "lti_ssm_step of a ContinuousSystem": [("D must be [8] to go with u and the state, got [7]", {"D": less(0)})],
    "mamba_inner_step": [
        ("x_proj must be [30, 72], got [29, 72]", {"x_proj": less(0)}),
        ("x must be [B, width], log_A [width, N]", {"log_A": lambda x: x[0]}),
    ],
    "norm": [
        ("x must be [..., D] with at least one element", {"x": none_of(0)}),
        ("weight must be [12] or [21, 12], a row for each head, got [11]", {"weight": less(0)}),
        ("weight must be [12], got [1, 12]", {"x": lambda x: x[0], "weight": lambda x: x[None], "residual": None}),
        ("residual must be [21, 12] to go with x, got [12]", {"residual": lambda x: x[0]}),
        ("kind='batch' is not one of 'layer', 'rms', 'l2'", {"kind": "batch"}),
        ("gate_activation='relu' is not one of 'silu', 'sigmoid'", {"gate_activation": "relu"}),
        ("activation='gelu' is not one of None, 'silu'", {"activation": "gelu"}),
        ("a bias needs a weight", {"weight": None, "bias": ones(12)}),
        ("gate_first needs a gate", {"gate_first": True}),
        ("eps must be a finite number of at least 0, got nan", {"eps": NAN}),
        ("eps must be a finite number of at least 0, got -1.0", {"eps": -1.0}),
        ("linear excludes a residual", {"linear": ones(5, 12)}),
    ],
    "norm of heads": [
        ("linear must be [O, 12] or [O, 48] in the dtype of y", {"linear": ones(5, 24)}),
        ("or [4, 12], a row for each head, got [3, 12]", {"weight": less(0)}),
        ("bias must be [4, 12] to go with the weight, got [12]", {"bias": ones(12)}),
    ],
    "rotary": [
        ("q and k are [B, T, H, K] with an even K", {"q": less(3), "k": less(3)}),
        ("cos and sin are [positions, 2], got [5, 1] and [5, 2]", {"cos": less(1)}),
        ("time is [T] or [B, T] with T=3, got [2]", {"time": less(0)}),
        ("time must be integers, got torch.float32", {"time": lambda x: x.float()}),
    ],
    "rotated_keys": [
        ("B must be [batch, T, N] with at least one element, got [2, 0, 9]", {"B": none_of(1)}),
        ("C must be [2, 20, 9] to go with B, got [2, 20, 8]", {"C": less(2)}),
        ("B_bias must be [H, 9] with H >= 1, got [3, 8]", {"B_bias": less(1)}),
        ("C_bias must be [3, 9] to go with B, got [2, 9]", {"C_bias": less(0)}),
        ("B_weight must be [9] to go with B, got [8]", {"B_weight": less(0)}),
        ("w must be [2, 20, R] with 1 <= R <= 4, half of N, got [2, 20, 5]", {"w": ones(2, 20, 5)}),
        ("dt must be [2, 20, 3] to go with B, got [2, 20, 1]", {"dt": one(2)}),
    ],
    "ssd": [
        ("k must be [2, 70, 1, 16] to go with q and v, got [2, 70, 1, 15]", {"k": less(3)}),
        ("write must be [2, 70, 4] to go with q and v, got [2, 70, 3]", {"write": less(2)}),
        ("skip must be [4] to go with q and v, got [1]", {"skip": one(0)}),
        ("the heads of q must divide those of v, got 3 and 4", {"q": ones(2, 70, 3, 16), "k": ones(2, 70, 3, 16)}),
    ],
    "ssd_steps": [
        ("x must be [..., T, H] with at least one element, got [2, 0, 5]", {"x": none_of(1)}),
        ("share must be [2, 300, 5] to go with x, got [2, 299, 5]", {"share": less(1)}),
        ("bias must be [5] to go with x and share, got [1]", {"bias": one(0)}),
        ("rate must be [2, 300, 5] to go with x and share, got [5]", {"rate": ones(5)}),
        ("least must be a finite number, got nan", {"least": NAN}),
    ],
    "rwkv6_inputs": [
        ("r must be [B, T >= 1, D] with at least one element, got [7, 15]", {"r": lambda x: x[0]}),
        ("w must be [3, 7, 15] to go with r, got [3, 1, 15]", {"w": one(1)}),
        ("bonus must be [15] to go with r, got [1]", {"bonus": one(0)}),
        ("head_dim must divide D=15, got -5", {"head_dim": -5}),
    ],
    "rwkv6_position": [("head_dim must divide D=6, got 4", {"head_dim": 4})],
    "rwkv7_inputs": [
        ("r must be [B, T >= 1, D] with at least one element", {"r": lambda x: x[0]}),
        ("a must be [3, 7, 15] to go with r", {"a": one(1)}),
        ("xi must be [15] to go with r", {"xi": one(0)}),
    ],
    "rwkv7_position": [("head_dim must divide D=6, got 4", {"head_dim": 4})],
    "selective_scan": [
        ("x must be [batch, length, width] with length >= 1", {"x": none_of(1)}),
        ("A must be [width, N] with width 5", {"A": less(0)}),
        ("equally many groups, which divide the width 5", {"C": ones(1, 20, 4, 4)}),
        ("C must be [1, 20, 4] or [5, 4] to go with x and A, got [1, 20, 3]", {"C": less(2)}),
    ],
    "selective_scan of complex states": [
        ("negative_eigenvalues needs real A, B, C and states", {"negative_eigenvalues": True}),
    ],
    "selective_scan_step": [("state must be [2, 5, 4] to go with x and A, got [2, 5, 3]", {"state": less(2)})],
    "selective_scan_step of complex states": [
        ("negative_eigenvalues needs real A", {"negative_eigenvalues": True}),
    ],
    "skinny_linear": [
        ("x must be [B, K] and weight [N, K]", {"x": less(1)}),
        ("bias must be [4], got [3]", {"bias": ones(3)}),
        ("gate must be [1, 8], got [1, 4]", {"gate": ones(1, 4)}),
        ("activation='relu' is not one of", {"activation": "relu"}),
        ("groups that divide 8 channels", {"norm": norm_of(3)}),
        ("'layer' over all of", {"norm": norm_of(4, kind="layer")}),
        ("has no bias", {"norm": norm_of(8, bias=ones(8))}),
        ("weight of the norm must be [8], got [1, 8]", {"norm": norm_of(1, 8)}),
        ("its bias must be [8], got [1]", {"norm": norm_of(8, kind="layer", bias=ones(1))}),
        ("eps of the norm must be a finite number of at least 0, got nan", {"norm": norm_of(8, eps=NAN)}),
    ],
    "slstm": [
        ("x must be [batch, length >= 1, 4, heads, K]", {"x": none_of(1)}),
        ("recurrent must be [4, 2, 5, 5] to go with x, got [4, 2, 5, 4]", {"recurrent": less(3)}),
        ("bias must be [4, 2, 5] to go with x, got [4, 10]", {"bias": lambda x: x.flatten(1)}),
        ("initial_state must be [3, 4, 2, 5]", {"initial_state": less(1)}),
    ],
    "slstm_step": [
        ("x must be [batch, 4, heads, K]", {"x": less(1)}),
        ("state must be [3, 4, 2, 5]", {"state": less(1)}),
    ],
    "ssm_kernel": [
        ("conj_pairs=True needs a complex A", {"A": real}),
        ("discretization='zho' is not one of 'zoh', 'bilinear'", {"discretization": "zho"}),
        ("length must be at least 1, got 0", {"length": 0}),
        ("normalize_over=21 is for dss-softmax and at least length=20, got zoh", {"normalize_over": 21}),
        (
            "normalize_over=7 is for dss-softmax and at least length=20, got dss-softmax",
            {"normalize_over": 7, "discretization": "dss-softmax"},
        ),
        ("detach_maximum is for dss-softmax, got zoh", {"detach_maximum": True}),
        ("dt must be [D], got [3, 1]", {"dt": lambda x: x[:, None]}),
        ("C must be [3, 4] to go with A and dt", {"C": one(0)}),
        BACKEND,
    ],
    "squared_relu": [
        ("x must be [..., F] with at least one element", {"x": none_of(1)}),
        (
            "weight must have the dtype of x, torch.float32, got torch.bfloat16",
            {"weight": ones(3, 20, dtype=torch.bfloat16)},
        ),
    ],
    "swiglu": [
        ("x must be [..., 2 F] with at least one element, got [5, 39]", {"x": less(1)}),
        ("up must be [5, 40] to go with x, got [5, 20]", {"up": ones(5, 20)}),
        ("weight must be [20] to go with x, got []", {"weight": ones()}),
    ],
    "token_shift": [
        ("x must be [B, T >= 1, D] with at least one element, got [19, 6]", {"x": lambda x: x[0]}),
        ("mu must be [U >= 1, 6], got [6]", {"mu": lambda x: x[0]}),
        ("delta must be [5, 3, 19, 6] to go with x and mu, got [1, 3, 19, 6]", {"delta": one(0)}),
        ("initial_state must be [3, 6]", {"initial_state": one(0)}),
        ("delta needs weighs='before', got weighs='now'", {"weighs": "now"}),
        ("weighs='after' is not one of 'before', 'now'", {"weighs": "after"}),
    ],
    "token_shift_step": [("state must be [2, 4] to go with x and mu, got [4]", {"state": lambda x: x[0]})],
    "wkv": [
        ("k must be [batch, length, width] with length >= 1", {"k": none_of(1)}),
        ("bonus must be [5] to go with k, got [4]", {"bonus": less(0)}),
        ("initial_state must be [2, 3, 5]", {"initial_state": lambda x: x[:, 0]}),
    ],
    "wkv_step": [("state must be [2, 3, 5] to go with k, got [2, 3, 4]", {"state": less(2)})],
}


def double(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64) if is_float(x) else x


GRADIENT = "has no gradient; call it under torch.no_grad()"
NARROW = "takes float32, bfloat16 and float16, got torch.float64"
ALL = "all tensors"

REFUSED_BY_KERNELS = {
    **{name: [(NARROW, {ALL: double})] for name in OPERATORS if name != "attention"},
    "attention": [
        ("takes float32, got torch.bfloat16", {name: lambda x: x.bfloat16() for name in "qkv"}),
        ("takes K up to 128, got 136", {name: ones(1, 2, 1, 136) for name in "qkv"}),
        ("has no window", {"window": 5}),
        ("has no window", {"window": ints(1, 2)}),
    ],
    "attention_step": [
        (GRADIENT, {"q": trained}),
        ("takes K up to 256, got 260", {
            **{name: ones(1, 1, 260) for name in "qkv"}, **{name: ones(1, 2, 1, 260) for name in ("keys", "values")},
            "cos": None, "sin": None,
        }),
        ("takes keys and values of equal strides", {"keys": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}),
    ],
    "cauchy": [
        (NARROW, {ALL: double}),
        ("needs at least one element", {"residues": none_of(1), "Lambda": none_of(0), "dt": none_of(0)}),
    ],
    "causal_conv1d without state": [("does not take seq_idx", {"seq_idx": ones(2, 8, dtype=INT)})],
    "causal_conv1d_step": [(GRADIENT, {"weight": trained})],
    "delta_rule": [
        (NARROW, {ALL: double}),
        ("takes at most K=128 unless q, k and v are bfloat16", {
            **{name: ones(1, 2, 1, 130) for name in "qkv"}, "beta": ones(1, 2, 1), "log_decay": None,
            "initial_state": None,
        }),
    ],
    "delta_rule without decay": [("takes `write` only with a decay of key channels", {"write": ones(1, 20, 2, 5)})],
    "delta_rule_step": [(GRADIENT, {"q": trained})],
    "embedding": [("takes D up to 8192, got 9000", {"weight": ones(3, 9000)})],
    "float32_matmul": [
        (GRADIENT, {"a": trained}),
        ("takes float32, got torch.bfloat16", {name: lambda x: x.bfloat16() for name in "ab"}),
        ("takes matrices with contiguous rows or columns", {"a": lambda x: x.repeat_interleave(2, 1)[:, ::2].T[:].T}),
    ],
    "gated_linear_attention_step": [(GRADIENT, {"q": trained})],
    "gated_slot_attention_step": [(GRADIENT, {"q": trained})],
    "h3_inner_step": [("takes a state in complex64, got torch.complex128", {"state": double})],
    "lti_ssm": [
        ("takes no dss-softmax", {"discretization": "dss-softmax"}),
        (NARROW, dict.fromkeys(("A", "C", "initial_state"), double)),
        ("takes N <= 64, got N=65", {
            "A": lambda x: x[:, :1].expand(3, 65), "C": lambda x: x[:, :1].expand(3, 65), "initial_state": None,
        }),
    ],
    "lti_ssm_step": [
        ("takes no dss-softmax", {"discretization": "dss-softmax", "length": 8, "position": 0}),
        (GRADIENT, {"skip": trained}),
        ("takes a state in complex64, got torch.complex128", {"state": double}),
        (NARROW, {"log_dt": double}),
        ("takes N <= 512, got N=513", {
            "state": ones(1, 20, 513, dtype=torch.complex64), "C": ones(20, 513, 2),
            "log_A_real": ones(20, 513), "A_imag": ones(20, 513),
        }),
    ],
    "lti_ssm_step of a ContinuousSystem": [("takes a DiagonalSystem, got a ContinuousSystem", {})],
    "mamba_inner_step": [("takes x_proj and dt_proj in bfloat16 or float16, got torch.float64", {ALL: double})],
    "norm": [("takes D up to 8192, got D=8193", {"x": ones(1, 8193), "weight": ones(8193), "residual": None})],
    "rotated_keys": [
        (NARROW, {ALL: double, "dtype": torch.float32}),
        ("gives float32, bfloat16 and float16, not torch.float64", {"dtype": torch.float64}),
    ],
    "rotary": [(NARROW, {ALL: double}), ("has no gradient of cos and sin", {"cos": trained})],
    "rwkv6_inputs": [("takes K up to 256, got K=300", {
        **{name: ones(1, 1, 300) for name in "rkvw"}, **{name: ones(300) for name in ("w_0", "bonus")}, "head_dim": 300,
    })],
    "rwkv7_inputs": [("takes K up to 256, got K=300", {
        **{name: ones(1, 1, 300) for name in "rkwa"}, "head_dim": 300,
        **{name: ones(300) for name in ("w_0", "a_0", "xi", "alpha", "rho")},
    })],
    "selective_scan": [
        ("takes N up to 64, got N=65", {
            "A": -ones(5, 65), "B": ones(1, 20, 65), "C": ones(1, 20, 65), "initial_state": None,
        }),
        ("needs at least one element", {"A": none_of(1), **{name: none_of(2) for name in ("B", "C", "initial_state")}}),
    ],
    "selective_scan of complex states": [(NARROW, {ALL: double})],
    "selective_scan_step": [(GRADIENT, {"x": trained})],
    "skinny_linear": [
        ("takes norms and gates of one row only", {"x": ones(2, 8), "norm": norm_of(8)}),
        ("takes up to", {"x": ones(MAX_ROWS + 1, 8)}),
        ("takes weights in bfloat16 or float16", {"weight": ones(4, 8)}),
        ("takes groups of a power of two", {
            "x": ones(1, 48), "weight": ones(4, 48, dtype=HALF), "norm": norm_of(24),
        }),
        (GRADIENT, {"weight": trained}),
    ],
    "slstm": [("takes K up to 64, got K=65", {
        "x": ones(1, 2, 4, 1, 65), "recurrent": ones(4, 1, 65, 65), "bias": None, "initial_state": None,
    })],
    "token_shift": [("takes U up to 6, got U=7", {"mu": ones(7, 6), "delta": None})],
    "wkv_step": [(GRADIENT, {"k": trained})],
}  # fmt: skip
