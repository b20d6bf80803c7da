"""The delta rule on a GPU: the laws of `tests/kernels/test_delta_rule_triton.py` at sizes of real use."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.delta_rule import delta_rule, delta_rule_reference
from subquad.kernels.delta_rule.triton import autograd, back
from subquad.kernels.delta_rule.triton.segments import Segments
from tests.gpu.real_sizes import assert_equals_plain_pytorch

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TRITON = partial(delta_rule, backend="triton")
TORCH = partial(delta_rule, backend="torch")
DECAYS = ["none", "head", "key", "write", "plain", "shared"]
"""`write`: a decay of every key channel, and other keys for writing than for reading; `plain`: besides, values that are
added under keys of their own; `shared`: a decay of a head, and every two heads share queries and keys."""
every_decay = pytest.mark.parametrize("decay", DECAYS)
MISSES = pytest.mark.xfail(reason="kernels/delta_rule/README.md: What a per-channel decay gives away", strict=True)
CHANNEL_FLOOR = torch.finfo(torch.bfloat16).eps
"""Floor of the gradients with a decay of every key channel, twice that of other operators. They miss the rule, as the
README says; `test_gradients_with_a_decay_of_channels_follow_the_rule` is the test of it."""


def make_inputs(batch, length, heads, key_dim, value_dim, decay, dtype=torch.bfloat16, kept="mild"):
    """kept: how much of the state a step keeps. `mixed`: a fifth of the steps keep exp(-50), the others most of it."""
    g = torch.Generator("cuda").manual_seed(length)
    randn = partial(torch.randn, generator=g, device="cuda", dtype=torch.float64)
    rand = partial(torch.rand, generator=g, device="cuda", dtype=torch.float64)
    leading, log_decay = (batch, length, heads), None
    if decay != "none":
        size = leading if decay in ("head", "shared") else (*leading, key_dim)
        log_decay = F.logsigmoid(randn(*size)) / {"mild": 16, "medium": 1, "mixed": 16}[kept]
        if kept == "mixed":
            log_decay[rand(*size) < 0.2] = -50.0
        log_decay = log_decay.float()
    shared = (batch, length, heads // 2 if decay == "shared" else heads, key_dim)
    return {
        "q": randn(*shared).to(dtype),
        "k": F.normalize(randn(*shared), dim=-1).to(dtype),
        "v": randn(*leading, value_dim).to(dtype),
        "beta": ((1 if decay in ("write", "plain") else 2) * rand(*leading)).float(),
        "log_decay": log_decay,
        "write": F.normalize(randn(*leading, key_dim), dim=-1).to(dtype) if decay in ("write", "plain") else None,
        "plain": (key_dim**-0.5 * randn(*leading, key_dim)).to(dtype) if decay == "plain" else None,
        # as large as the states that unit keys write, so that no position stands out
        "initial_state": (key_dim**-0.5 * randn(batch, heads, key_dim, value_dim)).float(),
        "return_final_state": True,
    }


def assert_right(inputs, follows_the_rule=False, plain=delta_rule_reference, **options):
    decays, dtype = inputs["log_decay"], inputs["q"].dtype
    of_channels = decays is not None and decays.dim() == 4 and dtype == torch.bfloat16
    floors = dict.fromkeys(inputs, CHANNEL_FLOOR) if of_channels and not follows_the_rule else {}
    # the gradient of the state is as large as the state
    sizes = {1: inputs["q"].shape[-1] ** -0.5}
    ops = (partial(op, **options) if op and options else op for op in (TRITON, plain))
    exact = partial(TORCH, **options)
    assert_equals_plain_pytorch(*ops, inputs, dtype, exact=exact, floors=floors, sizes=sizes)


@pytest.mark.parametrize(
    ("decay", "dtype", "sizes"),
    [
        *((decay, torch.bfloat16, (2, 128, 128)) for decay in DECAYS),
        ("plain", torch.bfloat16, (2, 64, 64)),
        ("head", torch.bfloat16, (2, 256, 512)),
        *((decay, torch.bfloat16, (2, 256, 128)) for decay in ("key", "plain")),
        ("none", torch.float16, (2, 64, 128)),
        *((decay, torch.float32, (2, 128, 64)) for decay in ("head", "key")),
    ],
)
def test_real_sizes_equal_plain_pytorch_in_double_precision(decay, dtype, sizes):
    """One of the lengths is divided by 16, as those of training are: Triton compiles other code for it."""
    for length in (450, 512):
        for kept in ("mild", "medium", "mixed") if decay != "none" else ("mild",):
            assert_right(make_inputs(1, length, *sizes, decay, dtype, kept))


@every_decay
@pytest.mark.parametrize(("key_dim", "value_dim", "lengths"), [(40, 24, (1, 65)), (32, 64, (65, 200))])
def test_small_sizes_equal_plain_pytorch_in_double_precision(decay, key_dim, value_dim, lengths):
    for length in lengths:
        assert_right(make_inputs(2, length, 40, key_dim, value_dim, decay))


@pytest.mark.parametrize("decay", [pytest.param("key", marks=MISSES), pytest.param("write", marks=MISSES), "plain"])
def test_gradients_with_a_decay_of_channels_follow_the_rule(decay):
    for kept in ("mild", "medium", "mixed"):
        assert_right(make_inputs(1, 450, 2, 128, 128, decay, kept=kept), follows_the_rule=True)


@every_decay
def test_segments_equal_plain_pytorch_in_double_precision(decay):
    """One sequence of two heads is cut into segments. 16 divides its length, and its last chunk is not whole."""
    assert_right(make_inputs(1, 4112, 2, 128, 128, decay), plain=None)


def test_packed_sequences_equal_separate_ones():
    inputs = make_inputs(1, 700, 4, 64, 64, "head")
    ends = [0, 1, 130, 130, 700]
    inputs["initial_state"] = torch.cat([inputs["initial_state"]] * 4)
    assert_right(inputs, plain=None, cu_seqlens=torch.tensor(ends))


def on_hopper(monkeypatch):
    """The kernels for Hopper, and a list of the names of those that are launched from now on."""
    hopper = pytest.importorskip("subquad.kernels.delta_rule.triton.hopper")
    if not (hopper.HAS_GLUON and hopper.is_hopper()):
        pytest.skip("these kernels are for Hopper")
    launched = []

    def counted(launch):
        return lambda kernel, *plan, **named: (launched.append(kernel.fn.__name__), launch(kernel, *plan, **named))

    for module in (hopper.forward, hopper.walk, hopper.back, hopper.grads):
        monkeypatch.setattr(module, "launch", counted(module.launch))
    return hopper, launched


@pytest.mark.parametrize(("heads", "length"), [(0, 128), (6, 256), (6, 2048)])
@pytest.mark.parametrize("decay", ["head", "shared"])
def test_kernels_for_hopper_equal_plain_pytorch(decay, heads, length, monkeypatch):
    """Views of rows with gaps, a tenth of the steps that keep nothing, and a head for each multiprocessor.

    No other test has as many heads: how a call is replayed does not depend on what is changed here.
    """
    hopper, launched = on_hopper(monkeypatch)
    if heads:
        monkeypatch.setattr(hopper, "num_processors", lambda device: heads)
        for module in (autograd, back):
            monkeypatch.setattr(module, "cut_time", lambda *_: Segments(1, length // 32))
    heads = heads or hopper.num_processors(torch.device("cuda"))
    if length > 256:
        # so few programs that each adds the gradients of heads that share keys
        monkeypatch.setattr(hopper.grads, "num_processors", lambda device: 8)
    inputs = make_inputs(1, length, heads, 128, 128, decay, kept="medium")
    del inputs["initial_state"], inputs["return_final_state"]
    inputs |= {name: F.pad(inputs[name], (0, 16))[..., :128] for name in "qkv"}
    inputs["log_decay"][:, ::10] = -torch.inf
    assert_right(inputs, plain=None if length > 256 else delta_rule_reference)
    assert sorted(launched) == ["_hopper_back_kernel", *["_hopper_forward_kernel"] * 2, "_hopper_grads_kernel"]


@pytest.mark.parametrize("decay", ["none", "head", "shared"])
@pytest.mark.parametrize(("heads", "length"), [(2, 4096), (2, 4160), (130, 128)])
def test_walks_on_hopper_equal_plain_pytorch(decay, heads, length, monkeypatch):
    """States at both ends. The time of two heads is cut into segments, of which the last one may be shorter and begin
    within a pair of chunks; that of many heads is not."""
    _, launched = on_hopper(monkeypatch)
    inputs = make_inputs(1, length, heads, 128, 128, decay)
    if inputs["log_decay"] is not None:
        # one head keeps what a segment starts from
        inputs["log_decay"][:, :, 0] *= 0.01
    # gradients of that head's keys are sums of many larger numbers, so plain PyTorch says how much a rounding costs
    assert_right(inputs)
    with_gradient = [] if decay == "none" else ["_hopper_back_kernel", "_hopper_grads_kernel", "_hopper_walk_kernel"]
    assert sorted(launched) == [*with_gradient, "_hopper_walk_kernel"]


@pytest.mark.large
def test_offsets_beyond_two_to_the_31():
    """A view whose last step is more than 2^31 elements behind its first."""
    inputs = make_inputs(1, 70, 1, 64, 64, "head")
    storage = torch.zeros(69 * 2**25 + 64, dtype=torch.bfloat16, device="cuda")
    inputs["v"] = storage.as_strided((1, 70, 1, 64), (0, 2**25, 64, 1)).copy_(inputs["v"])
    assert_right(inputs, plain=None)
