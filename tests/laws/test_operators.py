"""Laws that every registered operator must obey, with kernels in Triton's interpreter."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subquad.kernels import OPERATORS
from subquad.kernels.workload import Cost, Implementation, Workload, initial_state, normal, sizes
from subquad.run_suite import REPOSITORY
from subquad.suite.commands import main
from subquad.suite.laws import operators as laws
from subquad.suite.laws.accuracy import FLOOR, cast
from subquad.suite.laws.calls import Operator
from subquad.suite.laws.tasks import NotApplicable
from tests.gpu.real_sizes import assert_an_operator_equals_plain_pytorch, assert_equals_plain_pytorch


def broken(operator, tried):
    """One line for each law that the operator breaks: its name and that of the law, the call and the tensor."""
    lines = []
    for law in tried:
        try:
            law(operator)
        except NotApplicable:
            continue
        except AssertionError as error:
            lines.append(f"{operator.workload.op} breaks {law.__name__}: {error}")
    return lines


def load(name):
    pytest.importorskip("triton")
    return REPOSITORY.operators.load(name)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_obeys_its_laws(name):
    """One test an operator, since a call of a kernel is interpreted once for all laws that judge it."""
    lines = broken(Operator(load(name)), laws.LAWS)
    assert not lines, "\n".join(lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them")
@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "gpu").glob("test_*.py")), ids=lambda path: path.stem
)
def test_tests_for_a_gpu_can_be_imported(path):
    """They are not collected without one, so a name that is gone would show on a GPU alone."""
    pytest.importorskip("triton")
    importlib.import_module(f"tests.gpu.{path.stem}")


@pytest.mark.slow
# the reference of wkv starts from a number that float16 does not have
@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "wkv"])
def test_an_operator_is_accurate_in_float16(name):
    lines = broken(Operator(load(name), dtypes=(torch.float16,)), laws.ACCURACY)
    assert not lines, "\n".join(lines)


# others say that they multiply matrices, or transform, in the dtype of their inputs
@pytest.mark.parametrize(
    "name",
    [
        "cauchy", "forget_gate", "norm", "rotary", "rotated_keys", "rwkv6_inputs", "rwkv7_inputs", "selective_scan",
        "ssd", "ssd_steps", "ssm_kernel", "token_shift", "wkv",
    ],
)  # fmt: skip
def test_what_plain_pytorch_keeps_in_float32_is_not_rounded_by_kernels(name):
    """The laws judge every result of a call in bfloat16 by bfloat16, also gradients in float32 of parameters."""
    operator = Operator(load(name), (torch.bfloat16,), "cuda" if torch.cuda.is_available() else "cpu")
    for call in operator.calls():
        # states of ssd are sums of products of matrices
        if call.implementation.name == "triton" and not (name == "ssd" and "state" in call.shape):
            assert_an_operator_equals_plain_pytorch(operator, call.shape, call.dtype)


@pytest.mark.parametrize(
    "name",
    [
        "delta_rule", "forget_gate", "gated_linear_attention", "gated_slot_attention", "lti_ssm", "rwkv6_inputs",
        "rwkv7_inputs", "selective_scan", "slstm", "ssd_steps", "ssm_kernel", "wkv",
    ],
)  # fmt: skip
def test_plain_pytorch_returns_float32_that_no_parameter_in_half_precision_has_rounded(name):
    """The laws keep parameters in float32, and a model that is cast as a whole does not."""
    operator = Operator(load(name), (torch.bfloat16,), compiled=False)
    for call in operator.calls():
        op = operator.function(call)
        inputs = {name: cast(x, call.dtype) for name, x in operator.inputs(call.shape).items()}
        floors = {name: FLOOR[call.dtype] * times for name, times in operator.workload.floors.items()}
        assert_equals_plain_pytorch(op, None, inputs, exact=op, floors=floors)


QUICK = ("causal_conv1d", "norm", "swiglu")


@pytest.mark.parametrize("name", [pytest.param(op, marks=[pytest.mark.slow] * (op not in QUICK)) for op in OPERATORS])
def test_the_compiler_takes_an_operator_as_one_graph(name):
    operator = Operator(load(name), (torch.float32,), compiled=False)
    torch.compiler.reset()
    (call,) = operator.once(1)
    compiled = torch.compile(operator.function(call), backend="eager", fullgraph=True, dynamic=False)
    operator.expected(call.shape, call.dtype).assert_met_by(compiled, "cpu")


@pytest.mark.parametrize("name", [name for name in OPERATORS if name.endswith("_step")])
def test_a_step_in_plain_pytorch_is_exact_in_double_precision(name):
    lines = broken(Operator(load(name), dtypes=(torch.float64,), compiled=False), laws.ACCURACY)
    assert not lines, "\n".join(lines)


def running_mean(x, initial_state=None, return_final_state=False):
    """A leaky sum: y_t = y_{t-1} / 2 + x_t^2."""
    state = x.new_zeros(x.shape[0], x.shape[2]) if initial_state is None else initial_state
    outputs = []
    for t in range(x.shape[1]):
        state = state / 2 + x[:, t] ** 2
        outputs.append(state)
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(x)
    return (y, state) if return_final_state else y


def make_inputs(shape, dtype, generator):
    size = sizes(shape, "BTD")
    return {"x": normal(generator, dtype, *size), **initial_state(shape, dtype, generator, *size[::2])}


TOY = Workload(
    op="toy",
    reference=running_mean,
    make_inputs=make_inputs,
    cost=lambda shape, dtype, backward: Cost(1, 1),
    short=dict,
    implementations=(),
    shapes={"quick": ({"B": 2, "T": 9, "D": 3, "state": "given"}, {"B": 1, "T": 4, "D": 2})},
    time={"x": 1},
    states=("initial_state",),
)


class Wrong(torch.autograd.Function):
    """Half of the gradient, and no second derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx / 2


class Once(torch.autograd.Function):
    """x^2 with a backward pass that hides from autograd that it depends on x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach())
        return x**2

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy.detach()


def with_once(x, initial_state=None, return_final_state=False):
    return running_mean(Once.apply(x).clamp(min=0).sqrt(), initial_state, return_final_state)


def unwritten(x, **rest):
    y = running_mean(x, **rest)
    hole = torch.empty(3, dtype=x.dtype)
    return (y[0] + 0 * hole, y[1]) if isinstance(y, tuple) else y + 0 * hole[: x.shape[2]]


def by_storage(x, **rest):
    """It reads the memory behind x as if x were contiguous."""
    return running_mean(torch.as_strided(x, x.shape, x[:].contiguous().stride()), **rest)


def seen_ahead(x, **rest):
    y = running_mean(x, **rest)
    late = 1e-3 * x.detach().sum(1, keepdim=True)
    return (y[0] + late, y[1]) if isinstance(y, tuple) else y + late


def forgotten(x, initial_state=None, **rest):
    return running_mean(x, None if initial_state is None else 0 * initial_state, **rest)


def overwritten(x, **rest):
    y = running_mean(x, **rest)
    x.data.mul_(2)
    return y


CALLS: list[int] = []


def drifting(x, **rest):
    CALLS.append(1)
    return running_mean(x * (1 + 1e-6 * len(CALLS)), **rest)


def wide(x, **rest):
    y = running_mean(x, **rest)
    return (y[0].double(), y[1]) if isinstance(y, tuple) else y.double()


def detached_state(x, **rest):
    y = running_mean(x, **rest)
    return (y[0], y[1].detach()) if isinstance(y, tuple) else y


def refuses_half(x, **rest):
    if len(x) == 0:
        raise ValueError("no batch")
    return running_mean(x, **rest)


def by_sign(x, **rest):
    """It does not read what x is where its signs are lazy."""
    return running_mean(2 * x if x.is_neg() else x, **rest)


def reads_values(x, **rest):
    return running_mean(x * (1 if x.sum().item() < 1e9 else 2), **rest)


def test_a_right_operator_breaks_no_law():
    right = Implementation("right", "ours", lambda: running_mean)
    assert broken(Operator(replace(TOY, implementations=(right,))), laws.LAWS) == []


@pytest.mark.parametrize(
    ("mutant", "law", "words"),
    [
        (lambda x, **rest: running_mean(1.01 * x, **rest), "results_are_those_of_the_reference", "output 0: rms"),
        (lambda x, **rest: running_mean(Wrong.apply(x), **rest), "results_are_those", "gradient of x: rms"),
        (detached_state, "results_are_those", "gradient of x"),
        (forgotten, "parts_equal_the_whole", "in two parts: output 0"),
        (lambda x, **rest: running_mean(x.nan_to_num(), **rest), "what_is_not_a_number", "a NaN in x is lost in"),
        (by_sign, "signs_may_be_lazy", "lazy signs: output 0 is wrong"),
        (by_storage, "inputs_may_have_any_memory", "output 0"),
        (unwritten, "no_memory_is_read_before", "not finite"),
        (wide, "results_have_one_dtype", "float64"),
        (seen_ahead, "the_future_is_not_seen", "later inputs change the earlier output 0"),
        (overwritten, "calls_repeat", "changed its input x"),
        (drifting, "calls_repeat", "two runs differ"),
        (detached_state, "outputs_have_gradients", "loss of output 1 alone"),
        (with_once, "second_derivatives", "second derivative of x in a linear loss by autograd.grad"),
        (refuses_half, "few_elements", "without the name of an operator"),
        (reads_values, "shapes_are_known", "Raised"),
    ],
)
def test_a_wrong_operator_is_told_what_is_wrong(mutant, law, words):
    implementations = [Implementation(name, "ours", lambda f=f: f) for name, f in (("r", running_mean), ("m", mutant))]
    operator = Operator(replace(TOY, implementations=tuple(implementations)))
    tried = next(each for each in laws.LAWS if each.__name__.startswith(law))
    if words == "Raised":
        with pytest.raises(RuntimeError):
            tried(operator)
        return
    with pytest.raises(AssertionError) as caught:
        tried(operator)
    assert str(caught.value).startswith("m at B")
    assert words in str(caught.value)


def test_a_reference_with_wrong_gradients_is_told_so():
    wrong = replace(TOY, reference=lambda x, **rest: running_mean(Wrong.apply(x), **rest))
    with pytest.raises(AssertionError, match="by differences"):
        laws.the_reference_has_the_right_gradients(Operator(wrong))


def test_a_plugin_is_checked(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton")
    path = tmp_path / "checked_operator.py"
    # an import of this module would let the check read and parse all modules of the tests for the plugin's digest
    path.write_text(
        "import sys\n"
        "from dataclasses import replace\n"
        "from subquad.kernels.workload import Implementation\n"
        f"tests = sys.modules[{__name__!r}]\n"
        "mine = [Implementation(f.__name__, 'ours', lambda f=f: f) for f in (tests.running_mean, tests.seen_ahead)]\n"
        "OPERATORS = {'toy': replace(tests.TOY, implementations=tuple(mine))}\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    for arguments, code, words in (
        (["toy", "--plugin", str(path)], 1, "broken  Later inputs change no earlier output by more than rounding"),
        (["soft_cap", "--plugin", "examples/my_kernel.py"], 0, "soft_cap obeys all 8 laws"),
        (["rotary", "--set", "x=1"], 2, "--set: an operator has no settings"),
    ):
        with pytest.raises(SystemExit) as end:
            main(REPOSITORY, ["check", "operator", *arguments])
        assert end.value.code == code
        assert words in "".join(capsys.readouterr())
