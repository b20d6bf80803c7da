"""Laws that every model must obey, as functions that `check model NAME` and the tests call.

Each takes the class of the model's configuration and options, builds small networks of it in float64 on the CPU, and
raises AssertionError where the law is broken. Together they hold that the network is causal, that its steps compute
what its parallel form computes, that it keeps as much as it says, and that its gradients are its slopes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.suite.contracts import TaskSpec
from subquad.suite.registry import few
from subquad.suite.runs import RunEnded
from subquad.suite.state import tensors
from subquad.suite.training.numerics import default_dtype, same_settings

LENGTH = 70
"""Positions of the test sequences: more than a chunk of 64, which many operators compute by."""
CUT = 37
"""Position of the test sequences from which on other tokens are tried."""
STEPS = 24
"""Steps from the first position on that are compared; later ones are taken behind a prompt."""
LONG = 333
"""Positions of the longest test sequences: some chunks more, and no multiple of one."""
TOKENS = TaskSpec(input="tokens", num_classes=16, readout="token", max_length=LENGTH, vocab_size=16)
SIGNAL = TaskSpec(input="signal", num_classes=5, readout="sequence", max_length=LENGTH, channels=2)
SMALL = {"num_layers": 2, "d_model": 32, "init_std": 0.2}
"""Options of the test networks, where a model has them. With weights larger than the default, every path of so small a
network contributes to its output."""


def build(
    config: Any, spec: TaskSpec = TOKENS, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any
) -> Any:
    """A small network in evaluation mode, the same at every call. config: the class of its configuration."""
    sizes = {name: value for name, value in SMALL.items() if name in config.model_fields}
    # `torch.manual_seed` takes half a millisecond more, because it keeps a traceback for each kind of device
    torch.default_generator.manual_seed(seed)
    with default_dtype(dtype):
        return config(**{**sizes, **options}).build(spec).eval()


def _kinds(model: Any) -> dict[tuple[Any, ...], str]:
    """One trainable parameter of every kind, by name and shape: layers are alike, so that one stands for all."""
    named = [(key, parameter) for key, parameter in model.named_parameters() if parameter.requires_grad]
    return {(*key.split(".")[-2:], parameter.shape): key for key, parameter in reversed(named)}


def build_one_layer(config: Any, **options: Any) -> Any:
    """A network as `build` gives it, but of one layer, unless it then lacks a kind of parameter."""
    model = build(config, **options)
    if "num_layers" in options or "num_layers" not in config.model_fields:
        return model
    with suppress(ValueError):
        one = build(config, num_layers=1, **options)
        if _kinds(one).keys() == _kinds(model).keys():
            return one
    return model


def _with_dropout(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options with dropout, and without the batch norm of a backbone, whose statistics are over all positions."""
    fields = config.model_fields
    dropout: dict[str, Any] = {name: 0.2 for name in fields if name.endswith("_dropout")}
    norm = {"norm": "layer"} if "norm" in fields and fields["norm"].default == "batch" else {}
    return {**dropout, **norm, **options}


def make_inputs(spec: TaskSpec, length: int = LENGTH, batch: int = 3) -> Tensor:
    """Random tokens [B, T], or a random signal [B, T, C] in float64; the same at every call."""
    generator = torch.Generator().manual_seed(1)
    if spec.input == "tokens":
        return torch.randint(spec.vocab_size, (batch, length), generator=generator, dtype=torch.int16)
    return torch.randn(batch, length, spec.channels, generator=generator, dtype=torch.float64)


def unroll(model: Any, inputs: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """Outputs [B, T, ..] of a model or a mixer from one step after the other, and the last state.

    state: that before the first step; only a model has a default, an empty one.
    """
    state = model.init_state(len(inputs)) if state is None else state
    outputs = []
    for t in range(inputs.shape[1]):
        y_t, state = model.step(inputs[:, t], state)
        outputs.append(y_t)
    return torch.stack(outputs, dim=1), state


def read_on(model: Any, inputs: Tensor, cut: int, lengths: Tensor | None = None) -> Tensor:
    """Logits [B, T - cut + 1, ..] behind a prompt of `cut` positions, and of the steps after it."""
    last, state = model.prefill(inputs[:, :cut], lengths)
    return torch.cat([last.unsqueeze(1), unroll(model, inputs[:, cut:], state)[0]], dim=1)


def stored_floats(state: Any) -> int:
    """Number of floating elements in the tensors of a state; complex ones count as two."""
    return sum(
        part.numel() * (2 if part.is_complex() else 1)
        for part in tensors(state)
        if part.is_complex() or part.is_floating_point()
    )


def _listed(shapes: list[torch.Size]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "of no tensor"


def assert_near(found: Tensor, wanted: Tensor, what: str, advice: str = "") -> None:
    """Both are equal to rounding in float64: to 1e-9 of the largest element. advice: what to do where they are not."""
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)} in place of {tuple(wanted.shape)}"
    assert torch.isfinite(found).all(), f"{what}: not finite"
    error = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
    if error < 1e-5:
        advice = "as little as float32 loses; compute in the dtype of x"
    said = f"{what}: the largest difference is {error:.1e} of the largest value" + (f"; {advice}" if advice else "")
    assert error < 1e-9, said


@torch.no_grad()
def calls_stand_alone(config: Any, **options: Any) -> None:
    """Outputs are finite, exist at every length, and depend on no earlier call and on no other row of the batch."""
    try:
        with same_settings():
            model, inputs = build(config, **options), make_inputs(TOKENS)
            outputs = model(inputs)
    except RunEnded as changed:
        raise AssertionError(str(changed)) from None
    bad = (~torch.isfinite(outputs)).any(-1).any(0).nonzero().flatten().tolist()
    assert not bad, f"{len(bad)} of {LENGTH} positions give NaN or infinity, the first of them is position {bad[0]}"
    advice = "in evaluation, draw nothing at random and keep nothing from call to call"
    assert_near(model(inputs), outputs, "a second call with the same inputs", advice)
    assert_near(model(inputs[1:2]), outputs[1:2], "a row alone against the same in a batch", "never mix rows")
    for length in (1, 2, 9):
        try:
            model(inputs[:, :length])
        except Exception as error:
            raise AssertionError(f"a sequence of length {length} ends in {type(error).__name__}: {error}") from error


@torch.no_grad()
def states_stand_alone(config: Any, **options: Any) -> None:
    """Two batches are decoded side by side, a step of one after a step of the other, as each would be alone."""
    model, inputs = build(config, **options), make_inputs(TOKENS, 5)
    alone, _ = unroll(model, inputs)
    state, other = model.init_state(3), model.init_state(3)
    for t in range(inputs.shape[1]):
        logits, state = model.step(inputs[:, t], state)
        advice = "keep the state in what `step` takes and returns, and not in the mixer"
        assert_near(logits, alone[:, t], f"step {t} beside another batch", advice)
        _, other = model.step(inputs[:, t].flip(0), other)


@torch.no_grad()
def is_causal(config: Any, **options: Any) -> None:
    """Later tokens do not change earlier outputs, and a token changes the output at its own position."""
    before, after = _causal_outputs(build(config, **options))
    own = ((before - after)[:, CUT].abs().amax(-1).min() / before.abs().max()).item()
    assert own > 1e-3, f"another token at position {CUT} changes the output there by only {own:.1e} of the largest"


def _causal_outputs(model: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the outputs for tokens, and for those that differ from CUT on; asserts that earlier outputs agree."""
    inputs = make_inputs(TOKENS)
    changed = inputs.clone()
    changed[:, CUT:] = (changed[:, CUT:] + 1) % TOKENS.vocab_size
    before, after = model(inputs), model(changed)
    early = ((before - after)[:, :CUT].abs().max() / before.abs().max()).item()
    assert early < 1e-11, f"tokens from position {CUT} on change earlier outputs, by {early:.1e} of the largest"
    return before, after


@torch.no_grad()
def steps_equal_parallel(config: Any, **options: Any) -> None:
    """One step after the other gives what the parallel form gives."""
    model, inputs = build(config, **options), make_inputs(TOKENS)
    parallel = model(inputs)
    assert parallel.std() > 1e-2, f"the outputs are nearly constant (s.d. {parallel.std():.1e}), so nothing is compared"
    assert_near(unroll(model, inputs[:, :STEPS])[0], parallel[:, :STEPS], "steps against the parallel form")


@torch.no_grad()
def prefill_equals_parallel(config: Any, **options: Any) -> None:
    """A prompt that is read at once, and the steps behind it, give what the parallel form gives."""
    model, inputs = build(config, **options), make_inputs(TOKENS)
    parallel = model(inputs)
    # a few steps tell whether the state is right; that many of them agree is the law above
    for cut, end in ((1, 6), (37, 42), (66, LENGTH)):
        assert_steps_follow_a_prompt(model, inputs[:, :end], parallel[:, :end], cut)


def assert_steps_follow_a_prompt(model: Any, inputs: Tensor, parallel: Tensor, cut: int) -> None:
    """A prompt of `cut` positions and the steps behind it give what the parallel form gave for these inputs."""
    got = read_on(model, inputs, cut)
    assert_near(got, parallel[:, cut - 1 :], f"a prompt of {cut} and steps against parallel")


@torch.no_grad()
def a_prompt_in_parts_is_right_or_refused(config: Any, **options: Any) -> None:
    """The second part of a prompt is read behind the first one, or refused; it does not begin anew without a word."""
    model, inputs = build(config, **options), make_inputs(TOKENS)
    parallel = model(inputs)
    for read, cut in (("prefill", CUT), ("step", 9)):
        state = model.init_state(len(inputs))
        if read == "prefill":
            _, state = model.prefill(inputs[:, :cut], state=state)
        else:
            _, state = unroll(model, inputs[:, :cut], state)
        try:
            logits, _ = model.prefill(inputs[:, cut:], state=state)
        except ValueError:
            continue
        assert_near(
            logits, parallel[:, -1], f"a prompt behind {cut} positions read by {read}, against the parallel form"
        )


def gradients_pass_through_steps(config: Any, **options: Any) -> None:
    """One step after the other, all parameters have the gradients of the parallel form, and so has the first state."""
    model, inputs = build_one_layer(config, **options), make_inputs(TOKENS, 6, 2)
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
    wanted = torch.autograd.grad(model(inputs).square().sum(), list(parameters.values()), allow_unused=True)
    logits, _ = unroll(model, inputs)
    found = torch.autograd.grad(logits.square().sum(), list(parameters.values()), allow_unused=True)
    scale = max(gradient.abs().max() for gradient in wanted if gradient is not None)
    for key, got, expected in zip(parameters, found, wanted, strict=True):
        got, expected = (torch.zeros(()) if gradient is None else gradient for gradient in (got, expected))
        off = ((got - expected).abs().max() / scale).item()
        assert off < 1e-9, f"the gradient of {key} through steps is off by {off:.1e} of the largest of all gradients"
    state = model.init_state(2)
    starts = [part.requires_grad_() for part in tensors(state) if part.is_floating_point() or part.is_complex()]
    total = unroll(model, inputs[:, :3], state)[0].square().sum()
    for gradient in torch.autograd.grad(total, starts, allow_unused=True) if starts else ():
        assert gradient is None or torch.isfinite(gradient).all(), "a gradient of the first state is not finite"


@torch.no_grad()
def padding_is_not_read(config: Any, **options: Any) -> None:
    """Prompts of unlike length in one batch, padded on the left, are read as they would be alone."""
    model, inputs = build(config, **options), make_inputs(TOKENS)
    prompt, lengths, steps = 40, torch.tensor([40, 2, 29]), 5
    got = read_on(model, inputs[:, : prompt + steps], prompt, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = model(inputs[row : row + 1, prompt - length : prompt + steps])[0, length - 1 :]
        assert_near(got[row], alone, f"a padded prompt of {length} against the same alone")
    _, state = model.prefill(inputs[:, :3], lengths := torch.tensor([3, 1, 2]))
    model.restart(state)
    kept = lengths.tolist()
    assert kept == [3, 1, 2], f"the lengths 3, 1, 2 of prompts are {kept} after `restart`: let the state copy them"


@torch.no_grad()
def states_keep_their_shapes(config: Any, **options: Any) -> None:
    """A state has the same shapes after every step, and `restart` sets it back to the beginning."""
    model, inputs = build(config, **options), make_inputs(TOKENS, 9, 2)
    state = model.init_state(2, 64)
    shapes = [part.shape for part in tensors(state)]
    first, state = model.step(inputs[:, 0], state)
    after = [part.shape for part in tensors(state)]
    assert after == shapes, f"a state of 2 rows has the shapes {_listed(shapes)}, and after a step {_listed(after)}"
    model.restart(state)
    again, _ = model.step(inputs[:, 0], state)
    assert_near(again, first, "the first step after `restart`")


@torch.no_grad()
def state_size_is_what_is_stored(config: Any, **options: Any) -> None:
    """`state_size` counts the floating elements that the mixers keep for one sequence."""
    batch, length = 2, 9
    spec = dataclasses.replace(TOKENS, max_length=length)
    model = build(config, spec, **options)
    _, state = unroll(model, make_inputs(spec, length, batch))
    # a network may keep more beside the states of its mixers, such as the positions it has seen
    stored = stored_floats(getattr(state, "mixers", state))
    said = batch * model.state_size(length)
    assert stored == said, f"{batch} sequences keep {stored} elements, and state_size({length}) says {said}"


def gradients_reach_every_parameter(config: Any, **options: Any) -> None:
    """Every trainable parameter has a finite gradient that is not zero, for tokens and for a signal."""
    for spec in (TOKENS, SIGNAL):
        model = build(config, spec, **options).train()
        # a signal is read by the same parameters at every position
        logits = model(make_inputs(spec, LENGTH if spec is TOKENS else 20))
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
        (logits * weights).sum().backward()
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, f"{key} has no gradient ({spec.input})"
                assert torch.isfinite(parameter.grad).all(), f"the gradient of {key} is not finite ({spec.input})"
                assert parameter.grad.abs().max() > 0, f"the gradient of {key} is zero ({spec.input})"


def gradients_are_slopes(config: Any, **options: Any) -> None:
    """The derivative along random directions of all parameters is that of finite differences."""
    model, inputs = build_one_layer(config, **options), make_inputs(TOKENS, batch=2)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(2, LENGTH, TOKENS.num_classes, generator=generator, dtype=torch.float64)

    def value() -> Tensor:
        return (model(inputs) * weights).sum()

    gradients = torch.autograd.grad(value(), parameters, materialize_grads=True, allow_unused=True)
    step = 1e-7
    for _ in range(2):
        directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in parameters]
        # the gradient of a complex parameter is that of its real and imaginary parts as two real ones
        slope = sum((g.conj() * d).real.sum().item() for g, d in zip(gradients, directions, strict=True))
        ends = []
        with torch.no_grad():
            for sign in (1, -2, 1):
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter.add_(direction, alpha=sign * step)
                ends.append(value().item())
        measured = (ends[0] - ends[1]) / (2 * step)
        size = max(abs(measured), abs(slope), 1e-12)
        assert abs(measured - slope) < 1e-4 * size, f"slope {measured:.6g} by differences, {slope:.6g} by gradients"


def _in_float32(config: Any, options: dict[str, Any], build: Callable[..., Any] = build) -> Any:
    """A small network whose weights are of the usual size, so that nothing overflows by itself."""
    usual = {"init_std": 0.05} if "init_std" in config.model_fields else {}
    return build(config, dtype=torch.float32, **{**usual, **options})


ENDS = (89.0, -104.0)
"""Values of parameters at which the exponential of a float32 is infinite and zero."""


def ends_of_ranges_are_seen(config: Any, **options: Any) -> None:
    """Finite outputs have finite gradients also where a parameter is so extreme that exponentials overflow.

    What is not finite in the outputs is seen in the loss, and what is not finite in the gradients alone is not. A
    parameter at whose end double precision has finite outputs has them in float32 too.
    """
    model, inputs = _in_float32(config, options, build_one_layer), make_inputs(TOKENS, 20, 2)
    parameters = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    for key in _kinds(model).values():
        parameter = parameters[key]
        kept = parameter.detach().clone()
        for value in ENDS:
            with torch.no_grad():
                parameter.fill_(value)
            loss = model(inputs).square().mean()
            if not torch.isfinite(loss):
                wide = copy.deepcopy(model).double()(inputs).square().mean()
                assert not torch.isfinite(wide), f"where all of {key} is {value}, outputs are finite in float64 alone"
                continue
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for other, found in zip(parameters, gradients, strict=True):
                assert found is None or torch.isfinite(found).all(), (
                    f"where all of {key} is {value}, outputs are finite and the gradient of {other} is not"
                )
        with torch.no_grad():
            parameter.copy_(kept)


def float16_is_near_or_refused(config: Any, **options: Any) -> None:
    """Under autocast to float16, outputs are near those in float32 and gradients finite, or a ValueError says why."""
    model, inputs = _in_float32(config, options), make_inputs(TOKENS, 40, 2)
    with torch.no_grad():
        wanted = model(inputs)
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            found = model(inputs).float()
    except ValueError as error:
        assert "float16" in str(error), f"float16 ends in: {error}"  # noqa: PT017
        return
    off = ((found.detach() - wanted).square().mean() / wanted.square().mean()).sqrt().item()
    assert off < 0.02, f"in float16, outputs are off by {off:.1e} of their size"
    found.square().mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), (
            f"in float16, {key} has no finite gradient"
        )


def second_derivatives_are_right_or_refused(config: Any, **options: Any) -> None:
    """The derivative of a function of the gradients is that of finite differences, or an error says that there is none.

    Where one is refused, each parameter is asked for alone, so that no path to one of them goes around the errors on
    the others.
    """
    model, inputs = build_one_layer(config, **options), make_inputs(TOKENS, 20, batch=2)
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(5)
    weights, *directions = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 20, TOKENS.num_classes), *(p.shape for p in parameters.values()))
    )

    def penalty(power: int, create_graph: bool) -> Tensor:
        loss = (model(inputs) ** power * weights).sum()
        gradients = torch.autograd.grad(
            loss, list(parameters.values()), create_graph=create_graph, materialize_grads=True, allow_unused=True
        )
        return torch.stack([(g.real * d).sum() for g, d in zip(gradients, directions, strict=True)]).sum()

    for power in (1, 2):
        found = _second_derivatives(partial(penalty, power, True), parameters)
        given = [(key, p, d) for (key, p), d in zip(parameters.items(), directions, strict=True) if key in found]
        slope = sum((found[key].real * direction).sum().item() for key, _, direction in given)
        step, ends = 1e-6, []
        for sign in (1, -2, 1):
            with torch.no_grad():
                for _, parameter, direction in given:
                    parameter.add_(direction, alpha=sign * step)
            ends.append(penalty(power, False).item())
        measured = (ends[0] - ends[1]) / (2 * step)
        assert abs(measured - slope) < 1e-3 * max(abs(measured), abs(ends[0])), (
            f"the slope of the gradients in {few(list(found))} is {measured:.6g} by differences, "
            f"{slope:.6g} by a second derivative, which is neither right nor refused"
        )


def _second_derivatives(penalty: Callable[[], Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The derivative in each parameter for which none is refused; zero where the graph has no path."""
    found = {}
    try:
        value = penalty()
        if not value.requires_grad:
            return {key: torch.zeros_like(parameter) for key, parameter in parameters.items()}
    except RuntimeError as error:
        return _refused(error)
    # if no gradient is refused, one pass gives all of them
    with suppress(RuntimeError):
        gradients = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
        return {
            key: torch.zeros_like(parameter) if gradient is None else gradient
            for (key, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        }
    for key, parameter in parameters.items():
        try:
            (gradient,) = torch.autograd.grad(value, [parameter], retain_graph=True, allow_unused=True)
            found[key] = torch.zeros_like(parameter) if gradient is None else gradient
        except RuntimeError as error:
            _refused(error)
    return found


def _refused(error: RuntimeError) -> dict[str, Tensor]:
    # our operators raise an error with the first text, the attention of torch one with the second
    if not any(text in str(error) for text in ("cannot be differentiated twice", "is not implemented")):
        raise AssertionError(f"a second derivative ends in: {error}") from error
    return {}


def _seeded(model: Any, inputs: Tensor, seed: int = 4) -> Tensor:
    torch.default_generator.manual_seed(seed)
    found: Tensor = model(inputs)
    return found


@torch.no_grad()
def training_is_causal(config: Any, **options: Any) -> None:
    """In training mode, too, with dropout, later tokens do not change earlier outputs, and a seed repeats them all."""
    model = build(config, **_with_dropout(config, options)).train()
    before, _ = _causal_outputs(partial(_seeded, model))
    assert_near(_seeded(model, make_inputs(TOKENS)), before, "the same inputs and seed in training mode")


@torch.no_grad()
def evaluation_follows_training(config: Any, **options: Any) -> None:
    """Evaluation draws nothing at random, and uses the weights as training has left them."""
    options = _with_dropout(config, options)
    model, inputs = build(config, **options), make_inputs(TOKENS, 9)
    assert_near(_seeded(model, inputs, 5), _seeded(model, inputs, 4), "an evaluation with another seed")
    model.step(inputs[:, 0], model.init_state(3))
    model.train()(inputs)
    for parameter in model.parameters():
        parameter.mul_(1.1)
    fresh = build(config, seed=1, **options)
    fresh.load_state_dict(model.state_dict())
    advice = "keep what is drawn or learned in a parameter or a buffer, which checkpoints and kept weights have"
    what = "an evaluation after training against a new model of its weights"
    assert_near(model.eval()(inputs), fresh(inputs), what, advice)


@torch.no_grad()
def long_sequences_agree(config: Any, **options: Any) -> None:
    """A long sequence gives what its beginning gives alone, and what a prompt and the steps behind it give."""
    spec = dataclasses.replace(TOKENS, max_length=LONG)
    model, inputs = build(config, spec, **options), make_inputs(spec, LONG, 2)
    whole = model(inputs)
    for length in (1, LENGTH):
        assert_near(model(inputs[:, :length]), whole[:, :length], f"the first {length} of {LONG} positions alone")
    assert_steps_follow_a_prompt(model, inputs, whole, LONG - 3)


LAWS: tuple[Callable[..., None], ...] = (
    calls_stand_alone,
    is_causal,
    states_stand_alone,
    steps_equal_parallel,
    prefill_equals_parallel,
    a_prompt_in_parts_is_right_or_refused,
    gradients_pass_through_steps,
    padding_is_not_read,
    states_keep_their_shapes,
    state_size_is_what_is_stored,
    gradients_reach_every_parameter,
    gradients_are_slopes,
    second_derivatives_are_right_or_refused,
    ends_of_ranges_are_seen,
    float16_is_near_or_refused,
    training_is_causal,
    evaluation_follows_training,
    long_sequences_agree,
)
"""All laws, in the order in which `check model` tries them."""
