"""Tests the arguments that the benchmark passes to other projects' kernels, on stand-ins that compute in float32.

Each stand-in computes what the source of the peer says of these arguments (layouts, scales, gates), and the accuracy
rule of the benchmark judges what comes back, with the gradients of our inputs. So a wrong layout or scale is found,
and so is a conversion that loses more than the rule allows and would be taken for an error of the peer.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.attention import workloads as attention
from subquad.kernels.delta_rule import workloads as delta_rule
from subquad.kernels.delta_rule.reference import delta_rule_reference
from subquad.kernels.gated_linear_attention import workloads as linear_attention
from subquad.kernels.gated_linear_attention.reference import gated_linear_attention_reference
from subquad.kernels.linear_cross_entropy import workloads as cross_entropy
from subquad.kernels.norm import workloads as norm
from subquad.kernels.workload import Workload
from subquad.suite.bench.cases import Case
from subquad.suite.bench.measure import Unavailable, find, gate

CPU = torch.device("cpu")


def recurrence(q, k, v, beta, log_decay, scale, dtype):
    """The delta rule of [B, T, H, ...] in float32."""
    inputs = (x.float() for x in (q, k, v, beta, log_decay))
    return delta_rule_reference(*inputs, scale=scale).to(dtype)


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False
):
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    return recurrence(q, k, v, beta, g, scale, q.dtype), None


def chunk_delta_rule(q, k, v, beta, scale=None):
    raise NotImplementedError


def flash_kda(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None):
    assert all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in (q, k, v, g, beta, out))
    assert A_log.shape == q.shape[2:3]
    assert dt_bias.shape == q.shape[2:]
    gate = lower_bound * torch.sigmoid(A_log.exp()[:, None] * (g.float() + dt_bias))
    q, k = (F.normalize(x.float(), dim=-1) for x in (q, k))
    out.copy_(recurrence(q, k, v, torch.sigmoid(beta.float()), gate, scale, out.dtype))


def sequences(cu_seqlens, *tensors):
    """The sequences between the starts, as a batch."""
    return (torch.stack([x[a:b] for a, b in pairwise(cu_seqlens)]) for x in tensors)


def flashinfer(q, k, v, g=None, beta=None, scale=None, initial_state=None, cu_seqlens=None, max_seqlen=None):
    assert all(x.dim() == 3 and x.is_contiguous() for x in (q, k, v))
    assert g.dtype == beta.dtype == torch.float32
    assert max_seqlen == (cu_seqlens[1:] - cu_seqlens[:-1]).max()
    return recurrence(*sequences(cu_seqlens, q, k, v, beta, g.log()), scale, q.dtype).flatten(0, 1)


def cudnn(q, k, v, g, beta, cu_seqlens, scale=None, initial_state=None, output_final_state=False):
    assert q.dim() == 3
    return recurrence(*sequences(cu_seqlens, q, k, v, beta, g), scale, q.dtype).flatten(0, 1), q.new_empty(0)


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None):
    """x [B, T, H, P], dt [B, T, H], A [H], and B, C [B, T, G, N] of groups of heads."""
    B, C = (part.float().repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (B, C))
    written = dt.unsqueeze(-1) * x.float()
    return gated_linear_attention_reference(C, B, written, dt * A, scale=1.0).to(x.dtype)


def mlstm(q, k, v, i, f, c_initial=None, eps=1e-6, normalize=True, chunk_size=128, autocast_kernel_dtype=None):
    """q, k, v [B, H, T, ...] and the gates [B, H, T]."""
    assert q.shape[2] % chunk_size == 0
    assert not normalize
    assert autocast_kernel_dtype == q.dtype
    q_, k_, v_, i, f = (x.float().transpose(1, 2) for x in (q, k, v, i, f))
    written = torch.sigmoid(i).unsqueeze(-1) * v_
    o = gated_linear_attention_reference(q_, k_, written, F.logsigmoid(f), scale=q.shape[-1] ** -0.5)
    return o.transpose(1, 2).to(q.dtype)


def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False):
    total = residual + x
    y = (F.rms_norm(total, total.shape[-1:], eps=eps) * weight).to(x.dtype)
    return (y, total) if prenorm else y


def chunked_linear_cross_entropy(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean"):
    return F.cross_entropy(F.linear(x, weight).float(), target, ignore_index=ignore_index, reduction=reduction)


STAND_INS = {
    "fla.ops.delta_rule": {"chunk_delta_rule": chunk_delta_rule},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    "fla.ops.kda": {"chunk_kda": chunk_gated_delta_rule},
    "flash_qla": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    "flash_kda": {"fwd": flash_kda},
    "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": flashinfer},
    "cudnn.linear_attention": {"gated_delta_net": cudnn, "kimi_delta_attention": cudnn},
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba_chunk_scan_combined},
    "mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging": {"mlstm_siging_chunkwise__xl_chunk": mlstm},
    "quack.rmsnorm": {"rmsnorm": rmsnorm},
    "quack.linear_cross_entropy": {"chunked_linear_cross_entropy": chunked_linear_cross_entropy},
}


@pytest.fixture
def stand_ins(monkeypatch):
    for path, functions in STAND_INS.items():
        names = path.split(".")
        for depth in range(1, len(names) + 1):
            module = ModuleType(".".join(names[:depth]))
            vars(module).update(functions if depth == len(names) else {"__path__": []})
            if depth == len(names) or module.__name__ not in STAND_INS:
                monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("FLA_FLASH_QLA", "")


def case(workload: Workload, peer: str, shape: dict, backward: bool) -> Case:
    return Case(workload.op, peer, tuple(shape.items()), "bfloat16", backward)


HEADS = {"B": 2, "T": 40, "H": 2, "K": 128, "V": 128}
LINEAR = {"B": 2, "T": 40, "H": 2, "K": 16, "V": 24, "decay": "head-step"}
GROUPS = {"B": 2, "T": 40, "H": 2, "G": 1, "K": 128, "V": 128, "decay": "head"}
CALLS = [
    *((delta_rule.WORKLOAD, peer, GROUPS) for peer in ("flash-qla", "flashinfer", "cudnn")),
    (delta_rule.WORKLOAD, "flash-linear-attention", GROUPS),
    (linear_attention.WORKLOAD, "mamba-ssm", {**LINEAR, "G": 1}),
    *((delta_rule.WORKLOAD, peer, {**HEADS, "decay": "head"}) for peer in ("flash-qla", "flashinfer", "cudnn")),
    (delta_rule.WORKLOAD, "flash-linear-attention + flash-qla", {**HEADS, "decay": "head"}),
    *((delta_rule.WORKLOAD, peer, {**HEADS, "decay": "key"}) for peer in ("flash-kda", "cudnn")),
    (delta_rule.WORKLOAD, "flash-linear-attention", {**HEADS, "decay": "key"}),
    *((linear_attention.WORKLOAD, peer, LINEAR) for peer in ("mamba-ssm", "mlstm-kernels")),
    (norm.WORKLOAD, "quack", {"R": 40, "D": 96, "kind": "rms"}),
    (cross_entropy.WORKLOAD, "quack", {"T": 40, "D": 64, "classes": 70}),
]


@pytest.mark.parametrize(
    ("workload", "peer", "shape"), CALLS, ids=[f"{w.op}-{p}-{s.get('decay')}-{s.get('G')}" for w, p, s in CALLS]
)
def test_a_peer_gets_our_inputs_in_its_own_layout_and_scale(stand_ins, workload, peer, shape):
    gate(workload, case(workload, peer, shape, backward=find(workload, peer).backward), CPU)


def test_flash_linear_attention_is_told_at_every_call_whether_to_use_flash_qla(stand_ins, monkeypatch):
    seen = []

    def dispatched(**inputs):
        import os

        seen.append(os.environ["FLA_FLASH_QLA"])
        return inputs["v"], None

    monkeypatch.setattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", dispatched)
    names = ("flash-linear-attention", "flash-linear-attention + flash-qla")
    plain, on_flash_qla = (find(delta_rule.WORKLOAD, name).load() for name in names)
    inputs = delta_rule.make_inputs({**HEADS, "decay": "head"}, torch.bfloat16, torch.Generator())
    for call in (plain, on_flash_qla, plain):
        call(**inputs)
    assert seen == ["0", "1", "0"]


def test_only_the_kernels_of_flash_qla_lose_the_check_that_refuses_them(stand_ins, monkeypatch):
    kernel, other = ModuleType("kernel"), ModuleType("other")
    kernel.pass_configs, other.pass_configs = {"fast": True}, {}
    for name, found in (("flash_qla.ops.bwd", kernel), ("tilelang_kernels", other)):
        module = ModuleType(name)
        module.kernel = found
        monkeypatch.setitem(sys.modules, name, module)
    find(delta_rule.WORKLOAD, "flash-qla").load()
    assert kernel.pass_configs == {"fast": True, "tl.disable_buffer_init_check": True}
    assert other.pass_configs == {}


def test_a_peer_without_a_backward_pass_says_so(stand_ins):
    for peer in ("flash-kda", "flashinfer"):
        decay = {"flash-kda": "key", "flashinfer": "head"}[peer]
        with pytest.raises(Unavailable, match="it has no backward pass") as caught:
            gate(delta_rule.WORKLOAD, case(delta_rule.WORKLOAD, peer, {**HEADS, "decay": decay}, True), CPU)
        assert caught.value.status == "n/a"


def test_an_assertion_of_a_peer_is_a_refusal_and_not_a_wrong_result(stand_ins, monkeypatch):
    def refuses(**inputs):
        raise AssertionError("only head_size 256")

    monkeypatch.setattr(sys.modules["flash_qla"], "chunk_gated_delta_rule", refuses)
    with pytest.raises(Unavailable, match="AssertionError: only head_size 256") as caught:
        gate(delta_rule.WORKLOAD, case(delta_rule.WORKLOAD, "flash-qla", {**HEADS, "decay": "head"}, False), CPU)
    assert caught.value.status == "n/a"


def test_attention_of_cudnn_is_asked_for_by_name():
    shape = {"B": 1, "T": 8, "H": 1, "K": 16}
    with pytest.raises(Unavailable, match="No viable backend"):
        gate(attention.WORKLOAD, case(attention.WORKLOAD, "sdpa-cudnn", shape, False), CPU)


def test_the_matrix_memory_of_mlstm_kernels_is_our_recurrence():
    native = pytest.importorskip(
        "mlstm_kernels.torch.parallel.native_siging", reason="mlstm_kernels is not installed; it is a peer of bench"
    )
    inputs = linear_attention.make_inputs({**LINEAR, "T": 128}, torch.float64, torch.Generator().manual_seed(1))
    given = find(linear_attention.WORKLOAD, "mlstm-kernels").to_native(inputs)
    length = given.pop("length")
    given = {name: x.double() for name, x in given.items()}
    o = native.mlstm_siging_parallel__native_autograd(**given, normalize=False)[:, :, :length].transpose(1, 2)
    expected = gated_linear_attention_reference(inputs["q"], inputs["k"], inputs["v"], inputs["log_decay"])
    # the gates go through float32
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)


def test_the_scan_of_mamba_2_is_our_recurrence():
    pytest.importorskip("einops", reason="einops is not installed; mamba_ssm needs it")
    minimal = pytest.importorskip(
        "mamba_ssm.modules.ssd_minimal", reason="mamba_ssm is not installed; it is a peer of bench"
    )
    inputs = linear_attention.make_inputs({**LINEAR, "T": 64}, torch.float64, torch.Generator().manual_seed(1))
    given = find(linear_attention.WORKLOAD, "mamba-ssm").to_native(inputs)
    dt = given["dt"].double()
    y, _ = minimal.ssd_minimal_discrete(
        given["x"] * dt.unsqueeze(-1), given["A"].double() * dt, given["B"], given["C"], 16
    )
    expected = gated_linear_attention_reference(inputs["q"], inputs["k"], inputs["v"], inputs["log_decay"])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_the_gated_delta_rule_of_flash_linear_attention_is_our_recurrence():
    naive = pytest.importorskip(
        "fla.ops.gated_delta_rule.naive", reason="flash-linear-attention is not installed; it is a peer of bench"
    )
    shape = {"B": 1, "T": 12, "H": 2, "K": 8, "V": 12, "decay": "head"}
    inputs = delta_rule.make_inputs(shape, torch.float32, torch.Generator().manual_seed(1))
    expected = delta_rule_reference(**inputs)
    o, _ = naive.naive_recurrent_gated_delta_rule(g=inputs.pop("log_decay"), **inputs)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
