"""The kernels of the delta rule for Hopper, run on a CPU (tests/kernels/gluon.py), and where they are used."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.delta_rule import delta_rule_reference
from subquad.suite.laws.accuracy import assert_matches_reference

hopper = pytest.importorskip("subquad.kernels.delta_rule.triton.hopper")
if not hopper.HAS_GLUON:
    pytest.skip("these kernels are not used with this Triton", allow_module_level=True)

from subquad.kernels.delta_rule.triton import autograd, delta_rule_triton  # noqa: E402
from subquad.kernels.delta_rule.triton import back as tree_back  # noqa: E402
from subquad.kernels.delta_rule.triton import walk as tree_walk  # noqa: E402
from subquad.kernels.delta_rule.triton.hopper import back, forward, grads, walk  # noqa: E402
from subquad.kernels.delta_rule.triton.plan import PLANNER, SHORT_CHUNKS  # noqa: E402
from subquad.kernels.delta_rule.triton.segments import Segments  # noqa: E402
from tests.kernels import gluon  # noqa: E402


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels for Hopper that calls launch here, as on a GPU with a multiprocessor for every head."""
    names = []

    def launch(kernel, plan, **tensors):
        named = {name: x for name, x in (tensors | plan.named).items() if name != "num_warps"}
        numbers = [p.name for p in kernel.params if not p.is_constexpr]
        assert list(named)[: len(numbers)] == numbers
        gluon.run(kernel, plan.axes, hopper.forward.COPY_WARPS.value, **named)
        names.append(kernel.fn.__name__)

    for module in (forward, back, grads, walk):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    monkeypatch.setattr(hopper, "num_processors", lambda device: 2)
    # fewer programs than chunks, so that slots are filled again
    monkeypatch.setattr(grads, "num_processors", lambda device: 2)
    return names


def cut(monkeypatch, count, num_walked):
    for module in (autograd, tree_walk, tree_back):
        monkeypatch.setattr(module, "cut_time", lambda *_: Segments(count, num_walked))


def make_state():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 2, 128, 128, generator=generator, dtype=torch.float64) / 128**0.5


def make_inputs(length=384, groups=2):
    g = torch.Generator().manual_seed(length)
    leading = 1, length, 2

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "q": normal(1, length, groups, 128),
        "k": F.normalize(normal(1, length, groups, 128), dim=-1),
        "v": normal(*leading, 128),
        # also below 0 and above 1
        "beta": 1.2 * torch.rand(leading, generator=g, dtype=torch.float64) - 0.1,
        # no two chunks decay alike
        "log_decay": F.logsigmoid(normal(*leading)) / 16 * torch.linspace(0, 2, length)[:, None],
    }


def on_views(q, k, v, **others):
    """The operator on views, as the parts of a projection are."""
    q, k, v = (F.pad(x, (0, 16))[..., :128] for x in (q, k, v))
    return delta_rule_triton(q, k, v, **others)[0]


@pytest.mark.parametrize("case", ["shared", "forgets"])
def test_the_kernels_equal_the_recurrence(launched, monkeypatch, case):
    inputs = make_inputs(groups=1 if case == "shared" else 2)
    if case == "shared":
        # with chunks enough for its programs, a program adds the gradients of the heads that share keys
        monkeypatch.setattr(grads, "num_processors", lambda device: 1)
    if case == "forgets":
        inputs["log_decay"][:, 3::7], inputs["log_decay"][:, 5::11] = -1000.0, -torch.inf
    assert_matches_reference(on_views, delta_rule_reference, inputs, dtype=torch.bfloat16, keep=("log_decay",))
    assert set(launched) == {"_hopper_forward_kernel", "_hopper_back_kernel", "_hopper_grads_kernel"}


def test_a_call_without_gradients_writes_nothing_else(launched):
    inputs = {name: x.bfloat16() for name, x in make_inputs().items()}
    o = delta_rule_triton(**inputs)[0]
    inputs["v"].requires_grad_()
    assert torch.equal(o, delta_rule_triton(**inputs)[0].detach())
    assert launched == ["_hopper_forward_kernel"] * 2


@pytest.mark.parametrize("case", ["none", "shared", "segments"])
def test_the_walk_alone_equals_the_recurrence(launched, monkeypatch, case):
    """States at both ends, and for `segments` starts at the ends of the segments before, of which the last is short."""
    inputs = make_inputs(352 if case == "segments" else 224, groups=1 if case == "shared" else 2)
    if case == "none":
        inputs["log_decay"] = None
    if case == "segments":
        cut(monkeypatch, 3, 4)
    inputs["initial_state"] = make_state()
    options = {"keep": ("log_decay", "initial_state"), "grad": False}
    assert_matches_reference(
        lambda **x: delta_rule_triton(**x, return_final_state=True),
        lambda **x: delta_rule_reference(**x, return_final_state=True),
        inputs, dtype=torch.bfloat16, **options,
    )  # fmt: skip
    assert launched == ["_hopper_walk_kernel"]


def test_nan_reaches_the_outputs_behind_it(launched):
    for name in ("q", "k", "v", "beta", "log_decay"):
        inputs = {name: x.bfloat16() for name, x in make_inputs(128).items()}
        inputs[name][:, 70, 0] = torch.nan
        o = delta_rule_triton(**inputs)[0]
        assert o[:, 70, 0].isnan().any(), name
        assert o[:, :64].isfinite().all()
        assert o[:, :, 1].isfinite().all()
        assert o[:, 96:, 0].isnan().any() == (name != "q")


def test_where_the_kernels_are_used(monkeypatch):
    def takes(heads=128, length=256, dim=128, processors=132, **changes):
        shape = 8, length, heads // 8
        inputs = {name: torch.empty(*shape, dim, dtype=torch.bfloat16) for name in "qkv"}
        inputs |= {"beta": torch.empty(shape), "g": torch.empty(shape)}
        inputs |= changes
        monkeypatch.setattr(hopper, "num_processors", lambda device: processors)
        plan = PLANNER(1.0, inputs["q"], inputs["k"], inputs["v"])
        return hopper.takes(plan, **inputs) and (hopper.has_many(inputs["v"]) or "few")

    assert not takes()
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    assert takes() is True
    assert takes(heads=256) is True
    # two rounds, of which the second one has few programs
    assert takes(heads=136) == "few"
    assert takes(heads=64) == "few"
    assert takes(length=192) == "few"
    assert not takes(length=96)
    assert not takes(length=0)
    assert not takes(dim=64)
    assert not takes(g=None)
    assert not takes(g=torch.empty(8, 256, 16, 128))
    x = torch.empty(8, 256, 16, 128)
    assert not takes(q=x, k=x, v=x)
    # neither addresses nor strides that 16 bytes do not divide
    x = torch.empty(8 * 256 * 16 * 128 + 1, dtype=torch.bfloat16)[1:].view(8, 256, 16, 128)
    assert not takes(k=x)
    x = torch.empty(8, 256, 16, 132, dtype=torch.bfloat16)[..., :128]
    assert not takes(v=x)


def test_where_the_walk_alone_is_used(monkeypatch):
    def takes(length=96, dim=128, value_dim=64, k_out=None, planner=SHORT_CHUNKS, dtype=torch.bfloat16):
        q, k, v = (torch.empty(1, length, 2, n, dtype=dtype) for n in (dim, dim, value_dim))
        return hopper.takes_walk(planner(1.0, q, k, v), q, k, v, SimpleNamespace(k_out=k_out))

    assert not takes()
    monkeypatch.setattr(hopper, "is_hopper", lambda: True)
    assert takes()
    assert not takes(length=80)
    assert not takes(dim=64)
    assert not takes(value_dim=96)
    assert not takes(k_out=torch.empty(1))
    assert not takes(planner=PLANNER)
    assert not takes(dtype=torch.float32)


def test_walks_in_segments_with_a_gradient_equal_the_recurrence(launched, monkeypatch):
    """Segments of 3, 3, 3 and 1 chunks, of which the gradients take pairs: one head forgets all that is before a
    segment, and the other does not. They share their keys. States are given and returned."""
    cut(monkeypatch, 4, 3)
    inputs = make_inputs(320, groups=1) | {"initial_state": make_state()}
    inputs["log_decay"][:, :, 0] = inputs["log_decay"][:, :, 0] * 8 - 0.5
    assert_matches_reference(
        lambda **x: delta_rule_triton(**x, return_final_state=True),
        lambda **x: delta_rule_reference(**x, return_final_state=True),
        inputs, dtype=torch.bfloat16, keep=("log_decay", "initial_state"),
    )  # fmt: skip
    assert set(launched) == {"_hopper_walk_kernel", "_hopper_back_kernel", "_hopper_grads_kernel"}


def test_gradients_without_those_of_decays_are_the_same(launched):
    """The length is none of `hopper_forward`."""
    inputs = make_inputs(192)

    def gradients(*names):
        x = {name: value.bfloat16().requires_grad_(name in names) for name, value in inputs.items()}
        delta_rule_triton(**x)[0].square().sum().backward()
        return [x[name].grad for name in ("q", "k", "beta")]

    with_decays = gradients("q", "k", "beta", "log_decay")
    assert all(map(torch.equal, gradients("q", "k", "beta"), with_decays))
    assert set(launched) == {"_hopper_walk_kernel", "_hopper_back_kernel", "_hopper_grads_kernel"}
