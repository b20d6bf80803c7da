"""Generation draws one token after the other from the model's own distribution."""

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec
from subquad.suite.generate import Decoder, Sampling, generate, lengths_until
from subquad.suite.state import tensors

CPU = torch.device("cpu")
SPEC = TaskSpec(input="tokens", num_classes=12, readout="token", max_length=24, vocab_size=12)
NAMES = ["s4d", "dss-softmax", "dss-exp", "h3", "mamba", "gla", "gsa", "attention", "transformer++", "hyena"]


def build(name, **options):
    torch.manual_seed(0)
    slots = {"num_slots": 8} if name == "gsa" else {}
    sizes = {"num_layers": 2, "d_model": 16, "init_std": 0.5, "tie_embeddings": False}
    config = MODELS.load(name)(**sizes, **slots, **options)
    return config.build(SPEC).eval()


def draw(model, num_rows, length, first, seed, **options):
    """`generate` behind a prompt of one token."""
    return generate(model, torch.full((num_rows, 1), first), length, seed=seed, **options)


class Fixed(torch.nn.Module):
    """A model with a constant distribution, whose state counts the steps."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def init_state(self, batch_size, capacity=None):
        return (torch.zeros(batch_size, dtype=torch.long),)

    def restart(self, state):
        state[0].zero_()

    def prefill(self, inputs, lengths=None, *, state=None, capacity=None):
        seen = torch.full((len(inputs),), inputs.shape[1]) if lengths is None else lengths
        return self.logits.expand(len(inputs), -1), (seen,)

    def step(self, token, state):
        return self.logits.expand(len(token), -1), (state[0] + 1,)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_coldest_sequence_is_the_likeliest_next_token_of_the_parallel_form(name):
    model = build(name)
    made = draw(model, 5, 24, 3, 0, temperature=1e-4)
    seen = torch.cat([torch.full((5, 1), 3), made[:, :-1]], dim=1)
    assert torch.equal(model(seen).argmax(-1), made)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_token_is_as_likely_as_the_model_says(name):
    # log p of a drawn token is -entropy on average, where the draw follows p
    model = build(name)
    made = draw(model, 400, 24, 3, 0)
    seen = torch.cat([torch.full((400, 1), 3), made[:, :-1]], dim=1)
    log_p = model(seen).double().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    surprise = -log_p.gather(-1, made[..., None])[..., 0]
    error = (surprise - entropy).mean() / ((surprise - entropy).std() / len(surprise.flatten()) ** 0.5)
    assert abs(error) < 4
    assert made.unique().numel() > 6


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_frequencies_are_those_of_the_distribution_at_that_temperature(temperature):
    logits = torch.tensor([0.0, 1.0, 2.0, -50.0])
    made = draw(Fixed(logits), 500, 40, 0, 0, temperature=temperature)
    frequencies = made.flatten().bincount(minlength=4) / made.numel()
    torch.testing.assert_close(frequencies, torch.softmax(logits / temperature, 0), atol=0.015, rtol=0)


def test_the_seed_decides_and_the_global_generator_is_left_alone():
    model = build("s4d")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (draw(model, 3, 24, 0, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_of_a_batch_are_drawn_apart():
    made = draw(build("s4d"), 8, 24, 0, 0)
    assert len({tuple(row.tolist()) for row in made}) == 8


def test_the_tensors_of_a_nested_state_are_found_in_order():
    model = build("h3")
    state = model.init_state(2)
    parts = list(tensors(state))
    assert len(parts) == sum(len(mixer) for mixer in state.mixers) + 1
    assert parts[-1] is state.time


def test_somebody_may_interrupt():
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw(build("s4d"), 1, 24, 0, 0, callback=stop)


def test_a_model_that_reads_the_future_has_no_step():
    with pytest.raises(ValueError, match="reads the future and has no step"):
        draw(build("s4d", bidirectional=True), 1, 24, 0, 0)


@pytest.mark.parametrize("name", ["mamba", "attention", "hyena", "dss-softmax"])
@torch.no_grad()
def test_prompts_of_unlike_length_are_continued_as_they_would_be_alone(name):
    model = build(name)
    prompts, lengths = torch.randint(12, (3, 9), generator=torch.Generator().manual_seed(1)), torch.tensor([9, 4, 1])
    made = generate(model, prompts, 12, lengths=lengths, temperature=0)
    for row, length in enumerate(lengths.tolist()):
        alone = generate(model, prompts[row : row + 1, 9 - length :], 12, temperature=0)
        assert torch.equal(made[row], alone[0])
    seen = torch.cat([prompts[:1], made[:1, :-1]], dim=1)
    assert torch.equal(model(seen)[0, 8:].argmax(-1), made[0])


@torch.no_grad()
def test_a_decoder_can_start_again():
    model, prompts = build("transformer++"), torch.randint(12, (2, 3, 7), generator=torch.Generator().manual_seed(1))
    decoder = Decoder(model, 3, 12, CPU, sampling=Sampling(temperature=0))
    for prompt in (prompts[0], prompts[1], prompts[0][:, :1]):
        drawn, made = decoder.start(prompt), []
        for t in range(5):
            if t or not drawn:
                decoder.advance()
            made.append(decoder.token.clone())
        assert torch.equal(torch.stack(made, dim=1), generate(model, prompt, 5, temperature=0))


def test_a_row_repeats_the_token_that_stops_it():
    model, prompt = build("mamba"), torch.tensor([[3, 1], [5, 7], [0, 2]])
    free = generate(model, prompt, 20, seed=1)
    stop = int(free[0, 4])
    made = generate(model, prompt, 20, seed=1, stop=[stop], every=3)
    lengths = lengths_until(free, [stop])
    assert lengths[0] <= 5
    assert free[0, lengths[0] - 1] == stop
    assert made.shape[1] == lengths.max()
    assert torch.equal(lengths_until(made, [stop]), lengths)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(made[row, :length], free[row, :length])
        assert (made[row, length:] == stop).all()


def test_new_tokens_arrive_in_parts():
    parts = []
    made = generate(build("gla"), torch.tensor([[3, 1]]), 10, callback=parts.append, every=4)
    assert [part.shape[1] for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat(parts, dim=1), made)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.6}, {2}),
        ({"top_p": 0.7}, {1, 2}),
        ({"temperature": 0}, {2}),
        ({"top_k": 9}, {0, 1, 2, 3}),
    ],
)
def test_only_the_likeliest_tokens_are_drawn(options, allowed):
    # probabilities 0.03, 0.24, 0.64, 0.09
    made = draw(Fixed(torch.tensor([0.0, 2.0, 3.0, 1.0])), 100, 40, 0, 0, **options)
    frequencies = made.flatten().bincount(minlength=4) / made.numel()
    assert set(frequencies.nonzero().flatten().tolist()) == allowed
    kept = torch.zeros(4)
    kept[list(allowed)] = torch.tensor([0.0, 2.0, 3.0, 1.0]).exp()[list(allowed)]
    torch.testing.assert_close(frequencies, kept / kept.sum(), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or at least 1e-06, got -1.0"),
        ({"temperature": 1e-40}, "temperature must be 0 or at least 1e-06, got 1e-40"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (
            {"prompts": torch.zeros(2, 0, dtype=torch.long)},
            r"prompts must be tokens \[B, P\] with P >= 1, got \[2, 0\]",
        ),
        ({"lengths": torch.tensor([0, 2])}, r"lengths must be \[2\] with values from 1 to 3, got \[0, 2\]"),
        ({"max_new_tokens": 30}, "max_length=24"),
    ],
)
def test_what_cannot_be_generated_is_refused(options, message):
    options = {"prompts": torch.zeros(2, 3, dtype=torch.long), "max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        generate(build("transformer++"), **options)


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.9}])
def test_logits_that_are_not_numbers_end_generation_before_a_token_of_theirs_is_given(options):
    """Comparisons with NaN are false, so each way to draw would give some token."""
    model = Fixed(torch.zeros(2, 4))
    parts = []

    def callback(part):
        parts.append(part)
        model.logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, torch.nan, 0.0, 0.0]])

    with pytest.raises(ValueError, match="logits that are NaN in row 1"):
        draw(model, 2, 40, 0, 0, callback=callback, every=10, **options)
    assert len(parts) == 1
    with pytest.raises(ValueError, match="logits that are NaN in row 1"):
        draw(model, 2, 40, 0, 0, **options)
