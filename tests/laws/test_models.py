"""Laws that every registered model must obey, at sizes that take a CPU a second."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.models import MODELS
from subquad.models.attention import Attention
from subquad.models.linear_attention import LinearAttention, LinearAttentionConfig
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.time_axis import LeftPadding
from subquad.suite.laws import models as laws
from subquad.suite.laws.models import LENGTH, SIGNAL, TOKENS, make_inputs, unroll
from subquad.suite.state import map_tensors, tensors
from subquad.suite.training.readout import mean_loss

OPTIONS = {
    "mesanet": {"num_steps": 8},
    "s4": {"d_state": 8},
    "sashimi": {"num_layers": 1, "pool": [4], "options": {"s4": {"d_state": 8}}},
}
"""Options of models whose small network is large or slow. Every stage of SaShiMi has `num_layers` blocks; more than two
stages are tried with other options of it."""


def build(name: str, *arguments, **options):
    return laws.build(MODELS.load(name), *arguments, **{**OPTIONS.get(name, {}), **options})


def build_one_layer(name: str, **options):
    return laws.build_one_layer(MODELS.load(name), **{**OPTIONS.get(name, {}), **options})


every_model = pytest.mark.parametrize("name", list(MODELS))


OF_DERIVATIVES = (
    laws.gradients_are_slopes,
    laws.second_derivatives_are_right_or_refused,
    laws.ends_of_ranges_are_seen,
)
WITH_CHANNELS = ("attention", "transformer++", "rwkv", "pythia", "sashimi")
"""Models that keep their channel mixers under the laws of derivatives; those of all others are the same."""


@every_model
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_a_model_obeys_the_law(name, law):
    alone = {"channel_mixer": "none"} if law in OF_DERIVATIVES and name not in WITH_CHANNELS else {}
    law(MODELS.load(name), **alone, **OPTIONS.get(name, {}))


class Normed(LinearAttention):
    """It normalises over all positions in training alone."""

    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True) if self.training else x)


class Noisy(LinearAttention):
    """Its dropout does not end with training."""

    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.1))


class Stale(LinearAttention):
    """It keeps a weight of its first evaluation."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        self.kept = getattr(self, "kept", next(self.parameters()).detach().clone())
        return super().forward(x * self.kept.sum())


class Apart(LinearAttention):
    """It has a weight that is neither a parameter nor a buffer."""

    def __init__(self, config):
        super().__init__(config)
        self.apart = torch.randn(config.d_model)

    def forward(self, x):
        return super().forward(x * self.apart)


class Quick(LinearAttention):
    """It chooses the precision of products itself."""

    def forward(self, x):
        torch.set_float32_matmul_precision("high")
        return super().forward(x)


class Short(LinearAttention):
    """Its parallel form forgets what is 128 positions back."""

    def forward(self, x):
        return torch.cat([super(Short, self).forward(part) for part in x.split(128, dim=1)], dim=1)


class Undefined(LinearAttention):
    """It gives NaN at its first position."""

    def forward(self, x):
        return super().forward(x) / (torch.arange(x.shape[1])[:, None] > 0)


class Kept(LinearAttention):
    """It begins with what the last call has left."""

    def forward(self, x):
        y = super().forward(x) + getattr(self, "last", 0.0)
        self.last = y[:, -1:].mean(0)
        return y


class Mixed(LinearAttention):
    """It normalises over the batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Squeezed(LinearAttention):
    """It loses the axis of time where that has one position."""

    def forward(self, x):
        return super().forward(x).squeeze(1)


class Hidden(LinearAttention):
    """Its state is an attribute."""

    def init_state(self, batch_size, capacity):
        self.kept = super().init_state(batch_size, capacity)
        return ()

    def _step(self, x_t, norm, residual, state):
        y_t, self.kept = super()._step(x_t, norm, residual, self.kept)
        return y_t, state


class Rounded(LinearAttention):
    """It computes in float32."""

    def forward(self, x):
        return super().forward(x.float().to(x.dtype))


class Long(LinearAttention):
    """Its step, which stands for that of the class that it derives from, returns [B, 1, D]."""

    def step(self, x_t, state):
        y_t, state = super().step(x_t, state)
        return y_t[:, None], state


@pytest.mark.parametrize(
    ("law", "mixer", "words"),
    [
        (laws.calls_stand_alone, Undefined, "70 of 70 positions give NaN or infinity"),
        (laws.calls_stand_alone, Kept, "a second call with the same inputs.* keep nothing from call to call"),
        (laws.calls_stand_alone, Mixed, "a row alone .*; never mix rows"),
        (laws.calls_stand_alone, Squeezed, "a sequence of length 1 ends in ValueError: Squeezed.forward must return"),
        (
            laws.calls_stand_alone,
            Quick,
            "changed torch's float32 matmul precision from highest to high, so its numbers",
        ),
        (laws.states_stand_alone, Hidden, "step 1 beside another batch: .* and not in the mixer"),
        (laws.steps_equal_parallel, Rounded, "as little as float32 loses; compute in the dtype of x"),
        (laws.training_is_causal, Normed, "change earlier outputs"),
        (laws.evaluation_follows_training, Noisy, "an evaluation with another seed"),
        (laws.evaluation_follows_training, Stale, "an evaluation after training"),
        (laws.evaluation_follows_training, Apart, "drawn or learned in a parameter or a buffer"),
        (laws.long_sequences_agree, Short, "a prompt of 330 and steps against parallel"),
    ],
)
def test_a_model_that_breaks_a_law_is_told_so(law, mixer, words):
    class Mine(LinearAttentionConfig):
        def mixer(self, layer, spec):
            return mixer(self)

    with pytest.raises(AssertionError, match=words):
        law(Mine)


@pytest.mark.parametrize("prenorm", [True, False])
def test_a_step_of_another_shape_is_refused(prenorm):
    class Mine(LinearAttentionConfig):
        def mixer(self, layer, spec):
            return Long(self)

    model = laws.build(Mine, prenorm=prenorm)
    with pytest.raises(ValueError, match=r"Long.step must return \[B, D\] = \[3, 32\], got \[3, 1, 32\]"):
        unroll(model, make_inputs(TOKENS, 2))
    with pytest.raises(ValueError, match=r"Long.step must return"):
        Mixer.prefill(model.mixers[0], torch.zeros(3, 2, 32, dtype=torch.float64), model.init_state(3).mixers[0])


@pytest.mark.parametrize("state", [{"S": torch.zeros(1)}, (torch.zeros(1), object())])
def test_a_state_that_could_hide_tensors_is_refused(state):
    for read in (lambda: list(tensors(state)), lambda: map_tensors(torch.clone, state)):
        with pytest.raises(ValueError, match="keep its tensors in tuples, lists or dataclasses"):
            read()


def test_a_named_tuple_is_a_state():
    class State(NamedTuple):
        sums: Tensor
        count: int

    doubled = map_tensors(lambda part: 2 * part, State(torch.ones(1), 3))
    assert isinstance(doubled, State)
    assert (doubled.sums.item(), doubled.count) == (2, 3)


@every_model
@torch.no_grad()
def test_every_earlier_token_reaches_the_last_position(name):
    model, inputs = build(name, num_layers=1), make_inputs(TOKENS, length=LENGTH)
    places = (LENGTH - 2, LENGTH - 9, LENGTH - 20)
    changed = inputs.repeat(3, 1, 1)
    for rows, t in zip(changed, places, strict=True):
        rows[:, t] = (rows[:, t] + 1) % TOKENS.vocab_size
    before, *after = model(torch.cat([inputs, *changed]))[:, -1].split(3)
    for t, found in zip(places, after, strict=True):
        assert (found - before).abs().amax(-1).min() > 1e-9 * before.abs().max(), t


@every_model
@torch.no_grad()
def test_prefill_ends_in_the_state_of_the_steps(name):
    model, inputs = build_one_layer(name, short_conv=3), make_inputs(TOKENS, 66)
    # the laws say that steps behind a prompt are right, so this state is that of steps alone
    _, expected = unroll(model, inputs[:, 62:], model.prefill(inputs[:, :62])[1])
    empty = model.init_state(3)
    used = model.init_state(3)
    model.step(inputs[:, 0], used)
    model.restart(used)
    for state in (model.prefill(inputs)[1], model.prefill(inputs, state=used)[1]):
        for got, wanted, start in zip(tensors(state), tensors(expected), tensors(empty), strict=True):
            assert got.dtype == wanted.dtype == start.dtype
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@every_model
@torch.no_grad()
def test_prefill_of_padded_rows_is_that_of_the_base_class(name):
    mixer, padding = build(name, num_layers=1).mixers[0], LeftPadding.of(torch.tensor([9, 1, 5]), 9)
    x = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted_y, wanted = Mixer.prefill(mixer, x, mixer.init_state(3, 12), padding)
    y, state = mixer.prefill(x, mixer.init_state(3, 12), padding)
    real = padding.time >= 0
    assert torch.isfinite(y).all()
    torch.testing.assert_close(y[real], wanted_y[real], rtol=1e-9, atol=1e-9)
    # entries of a cache beyond a row's positions are not read
    for got, expected in zip(tensors(state), tensors(wanted), strict=True):
        if isinstance(mixer, Attention) and got.ndim == 4:
            filled = torch.arange(12) < padding.lengths[:, None]
            got, expected = got[filled], expected[filled]
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


# the short convolution and the positions are the same before every mixer
@pytest.mark.parametrize("name", ["attention", "gla", "mamba", "rwkv", "sashimi"])
def test_padding_is_not_read_by_short_convolutions_and_positions_either(name):
    position = {"position": "learned"} if name == "attention" else {}
    laws.padding_is_not_read(MODELS.load(name), short_conv=2, **position, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", ["gla", "transformer++", "hyena", "rwkv", "sashimi"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
@torch.no_grad()
def test_steps_and_prompts_of_a_signal_end_in_the_sequence_readout(name, pooling):
    """A few models and positions are enough, since all models have this readout; that all agree is a law of tokens."""
    length = 8
    model, inputs = build(name, SIGNAL, pooling=pooling), make_inputs(SIGNAL, length)
    parallel = model(inputs)
    assert parallel.shape == (3, SIGNAL.num_classes)
    recurrent, _ = unroll(model, inputs)
    torch.testing.assert_close(recurrent[:, -1], parallel, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.prefill(inputs)[0], parallel, rtol=1e-9, atol=1e-9)
    lengths = torch.tensor([length, 5, 2])
    logits, _ = model.prefill(inputs, lengths)
    for row, real in enumerate(lengths.tolist()):
        alone = model(inputs[row : row + 1, length - real :])[0]
        torch.testing.assert_close(logits[row], alone, rtol=1e-9, atol=1e-9)


@every_model
@torch.no_grad()
def test_the_state_of_a_recurrent_model_does_not_grow(name):
    model = build(name)
    grows = name in ("attention", "transformer++", "gated-attention", "pythia", "hyena", "hybrid")
    assert (model.state_size(64) > model.state_size(1)) == grows
    # tensors keep their shapes all the same, so that a step can be recorded
    state = model.init_state(2, 64)
    shapes = [part.shape for part in tensors(state)]
    _, after = model.step(make_inputs(TOKENS, 1, 2)[:, 0], state)
    assert [part.shape for part in tensors(after)] == shapes
    assert [part.shape for part in tensors(model.prefill(make_inputs(TOKENS, 9, 2), capacity=64)[1])] == shapes


@pytest.mark.parametrize(("name", "position"), [("attention", "learned"), ("transformer++", "rope"), ("hyena", "none")])
def test_more_positions_than_there_is_room_for_are_refused(name, position):
    model = build(name, position=position)
    with pytest.raises(ValueError, match="room for 8 positions, got 9"):
        model.prefill(make_inputs(TOKENS, 9), capacity=8)
    with pytest.raises(ValueError, match=f"max_length=?.*{LENGTH + 1}|covers {LENGTH} positions"):
        model.init_state(1, LENGTH + 1)


@every_model
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow
@torch.no_grad()
def test_hundreds_of_steps_stay_near_the_parallel_form(name, precision):
    length, cut = 320, 64
    spec = dataclasses.replace(TOKENS, max_length=length)
    exact = build(name, spec, init_std=0.05)
    inputs = make_inputs(spec, length)
    wanted = exact(inputs)
    model = build(name, spec, dtype=torch.float32, init_std=0.05)
    model.load_state_dict(exact.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        parallel = model(inputs)
        got = laws.read_on(model, inputs, cut)
    floor = {"fp32": 1e-5, "bf16": 1e-2}[precision] * wanted.square().mean().sqrt()
    # twice what the parallel form loses in this precision, as for operators
    lost_parallel, lost = (
        (x.double() - wanted[:, cut - 1 :]).square().mean().sqrt() for x in (parallel[:, cut - 1 :], got)
    )
    assert lost <= 2 * lost_parallel + floor


@every_model
def test_param_groups_cover_every_parameter_once(name):
    model = build(name, position="learned")
    groups = model.param_groups(no_decay=("bias", "norm", "embedding"))
    listed = [id(parameter) for group in groups for parameter in group.parameters]
    trainable = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(listed) == sorted(trainable)
    assert all(group.weight_decay == 0.0 for group in groups if group.name != "weight")
    ssm = {id(parameter) for mixer in model.mixers for parameter in mixer.ssm_parameters().values()}
    grouped = {id(parameter) for group in groups if group.name == "ssm" for parameter in group.parameters}
    assert grouped == {key for key in ssm if key in trainable}


@every_model
@torch.no_grad()
def test_readout_at_positions_is_the_full_readout_there(name):
    model, inputs = build(name), make_inputs(TOKENS)
    positions = torch.tensor([[0, 5, 69], [1, 64, 65], [63, 64, 69]], dtype=torch.int32)
    full = model(inputs)
    expected = torch.stack([full[row, positions[row].long()] for row in range(3)])
    torch.testing.assert_close(model(inputs, positions), expected, rtol=1e-12, atol=1e-12)


@every_model
def test_bfloat16_autocast_stays_near_float32(name):
    model, inputs = build_one_layer(name, dtype=torch.float32, init_std=0.05), make_inputs(TOKENS)
    exact = model(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(inputs)
        logits.float().square().mean().backward()
        with torch.no_grad():
            _, state = unroll(model, inputs[:, :4])
    assert ((logits.float() - exact).square().mean() / exact.square().mean()).sqrt() < 0.05
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    assert torch.bfloat16 not in dtypes_of(state)


# within the gradient of MesaNet's solution torch.autograd.grad takes another one, which torch does not trace
IN_PARTS = ("mesanet",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "deltanet")) for name in MODELS if name not in IN_PARTS],
)
def test_the_compiler_takes_a_network_as_one_graph(name):
    model, inputs = build_one_layer(name, dtype=torch.float32), make_inputs(TOKENS, 20, 2).long()
    targets = inputs.roll(-1, 1)
    torch.compiler.reset()
    compiled = torch.compile(partial(mean_loss, model), backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(inputs, targets), mean_loss(model, inputs, targets))


def dtypes_of(state: object) -> set[torch.dtype]:
    if isinstance(state, Tensor):
        return {state.dtype}
    if isinstance(state, (tuple, list)):
        return set().union(*map(dtypes_of, state))
    return dtypes_of(tuple(vars(state).values())) if dataclasses.is_dataclass(state) else set()


READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NoReads(TorchDispatchMode):
    """A context in which an operation raises an error that reads values of a tensor: a GPU would have to wait for it.

    Such are `.item()`, a branch on a tensor, and a shape that depends on data. The methods that copy a tensor into
    Python or NumPy are no operations and are replaced.
    """

    COPIES = ("tolist", "numpy", "__array__")

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for name in self.COPIES:
            self.patch.setattr(Tensor, name, lambda *_, name=name, **__: pytest.fail(f"{name} reads a tensor"))
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten.index.Tensor:
            reads = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        else:
            reads = operation is torch.ops.aten.equal.default or not READS.isdisjoint(operation.tags)
        if reads:
            pytest.fail(f"{operation} reads a tensor")
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: 1 if x.any() else 2,
        lambda x: range(x[0].long()),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.arange(3)[: x.argmax()],
        lambda x: torch.equal(x, x + 1),
        torch.unique,
        torch.nonzero,
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
    ],
)
def test_a_read_of_a_tensor_value_is_seen(read):
    with pytest.raises(pytest.fail.Exception, match="reads a tensor"), NoReads():
        read(torch.ones(3))
    with NoReads():
        torch.ones(3)[torch.tensor([2, 0])].cumsum(0)


@every_model
def test_no_step_of_training_or_decoding_reads_a_tensor_value(name):
    model = build_one_layer(name, dtype=torch.float32).train()
    with NoReads():
        model(torch.zeros(2, LENGTH, dtype=torch.int16)).sum().backward()
        model.eval()
        with torch.no_grad():
            model.restart(model.init_state(2))
            _, state = model.prefill(torch.zeros(2, 9, dtype=torch.int16), torch.ones(2, dtype=torch.long))
            for _ in range(2):
                logits, state = model.step(torch.zeros(2, dtype=torch.int16), state)
    assert logits.shape == (2, TOKENS.num_classes)
