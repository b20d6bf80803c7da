"""Generation draws one token after the other from the model's own distribution."""

import pytest
import torch

from models import MODELS
from suite.contracts import TaskSpec
from suite.generate import generate
from suite.state import tensors

CPU = torch.device("cpu")
SPEC = TaskSpec(input="tokens", num_classes=12, readout="token", max_length=24, vocab_size=12)
NAMES = ["s4d", "dss-softmax", "dss-exp", "h3", "mamba", "gla", "gsa", "attention", "transformer++", "hyena"]


def build(name, **options):
    torch.manual_seed(0)
    config = MODELS.load(name)(**{"num_layers": 2, "d_model": 16, "init_std": 0.5, "tie_embeddings": False, **options})
    return config.build(SPEC).eval()


class Fixed(torch.nn.Module):
    """A model with a constant distribution, whose state counts the steps."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def init_state(self, batch_size, capacity=None):
        return (torch.zeros(batch_size, dtype=torch.long),)

    def step(self, token, state):
        return self.logits.expand(len(token), -1), (state[0] + 1,)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_coldest_sequence_is_the_likeliest_next_token_of_the_parallel_form(name):
    model = build(name)
    made = generate(model, 5, 24, 3, CPU, 0, temperature=1e-4)
    seen = torch.cat([torch.full((5, 1), 3), made[:, :-1]], dim=1)
    assert torch.equal(model(seen).argmax(-1), made)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_token_is_as_likely_as_the_model_says(name):
    # log p of a drawn token is -entropy on average, where the draw follows p
    model = build(name)
    made = generate(model, 400, 24, 3, CPU, 0)
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
    made = generate(Fixed(logits), 500, 40, 0, CPU, 0, temperature=temperature)
    frequencies = made.flatten().bincount(minlength=4) / made.numel()
    torch.testing.assert_close(frequencies, torch.softmax(logits / temperature, 0), atol=0.015, rtol=0)


def test_the_seed_decides_and_the_global_generator_is_left_alone():
    model = build("s4d")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (generate(model, 3, 24, 0, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_of_a_batch_are_drawn_apart():
    made = generate(build("s4d"), 8, 24, 0, CPU, 0)
    assert len({tuple(row.tolist()) for row in made}) == 8


def test_the_tensors_of_a_nested_state_are_found_in_order():
    model = build("h3")
    state = model.init_state(2)
    parts = list(tensors(state))
    assert len(parts) == sum(len(mixer) for mixer in state.mixers) + 1
    assert parts[-1] is state.time


def test_somebody_may_interrupt():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(build("s4d"), 1, 24, 0, CPU, 0, between=stop)


def test_a_model_that_reads_the_future_has_no_step():
    with pytest.raises(ValueError, match="reads the future and has no step"):
        generate(build("s4d", bidirectional=True), 1, 24, 0, CPU, 0)
