"""Generation with a step that is recorded as a CUDA graph."""

import dataclasses

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec
from subquad.suite.generate import Decoder, Sampling, generate
from subquad.suite.state import copy_into, tensors
from subquad.suite.training.capture import record

pytestmark = pytest.mark.gpu
SPEC = TaskSpec(input="tokens", num_classes=12, readout="token", max_length=64, vocab_size=12)


@pytest.mark.parametrize(
    "name",
    [
        "s4d",
        "dss-softmax",
        "dss-exp",
        "mamba",
        "h3",
        "linear-attention",
        "based",
        "pythia",
        "rwkv7",
        "retnet",
        "gla",
        "hgrn2",
        "abc",
        "gsa",
        "attention",
        "transformer++",
        "hyena",
    ],
)
@torch.no_grad()
def test_the_recorded_step_generates_the_likeliest_sequence_of_forward(name):
    torch.manual_seed(0)
    config = MODELS.load(name)(num_layers=2, d_model=32, init_std=0.5, tie_embeddings=False)
    model = config.build(SPEC).cuda().eval()
    made = generate(model, torch.full((5, 1), 3, device="cuda"), 64, temperature=1e-4)
    seen = torch.cat([torch.full((5, 1), 3, device="cuda"), made[:, :-1]], dim=1)
    logits = model(seen).float()
    # rounding may decide between two tokens that are almost equally likely
    best = logits.amax(-1)
    chosen = logits.gather(-1, made[..., None])[..., 0]
    assert (best - chosen).max() < 1e-2 * (best - logits.amin(-1)).max()


@pytest.mark.parametrize("name", ["mamba", "transformer++", "h3", "gsa", "retnet"])
@torch.no_grad()
def test_prompts_are_read_alike_whether_recorded_or_not(name):
    torch.manual_seed(0)
    model = MODELS.load(name)(num_layers=2, d_model=64, init_std=0.5).build(SPEC).cuda().eval()
    device = torch.device("cuda")
    recorded = Decoder(model, 3, 64, device, sampling=Sampling(temperature=0), prompt_length=40)
    plain = Decoder(model, 3, 64, device, sampling=Sampling(temperature=0))
    for seed in (1, 2):
        prompts = torch.randint(12, (3, 40), generator=torch.Generator().manual_seed(seed)).cuda()
        made = []
        for decoder in (recorded, plain):
            decoder.start(prompts)
            tokens = [decoder.token.clone()]
            for _ in range(10):
                decoder.advance()
                tokens.append(decoder.token.clone())
            made.append((torch.stack(tokens), [part.clone() for part in tensors(decoder.state)]))
        assert torch.equal(made[0][0], made[1][0])
        for first, second in zip(made[0][1], made[1][1], strict=True):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_every_replay_draws_anew_and_the_seed_decides():
    torch.manual_seed(0)
    model = MODELS.load("s4d")(num_layers=1, d_model=16).build(SPEC).cuda().eval()
    prompt = torch.full((64, 1), 3, device="cuda")
    first, again, other = (generate(model, prompt, 64, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique(dim=0)) == 64
    # an untrained network gives all tokens similar probabilities
    counts = first.flatten().bincount(minlength=12)
    assert counts.min() > 0.5 * counts.float().mean()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.no_grad()
def test_prefill_then_recorded_steps_stay_near_the_parallel_form(name, precision):
    length, cut = 640, 128
    spec = dataclasses.replace(SPEC, max_length=length)
    torch.manual_seed(0)
    options = {"num_layers": 2, "d_model": 128, "init_std": 0.05}
    exact = MODELS.load(name)(**options).build(spec).double().eval()
    model = MODELS.load(name)(**options).build(spec).cuda().eval()
    model.load_state_dict(exact.state_dict())
    inputs = torch.randint(12, (3, length), generator=torch.Generator().manual_seed(1)).cuda()
    # batches of one size and lengths that are multiples of 16 share their compiled kernels
    lengths = torch.tensor([cut, 112, 48]).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
        wanted = exact.cuda()(inputs[:1]).double()[0, cut - 1 :] if precision == "fp32" else None
        parallel = model(inputs).double()[0, cut - 1 :]
        logits, state = model.prefill(inputs[:, :cut], lengths, capacity=length)
        token, out = inputs[:, 0].clone(), torch.empty_like(logits)

        def step():
            found, after = model.step(token, state)
            copy_into(state, after)
            out.copy_(found)

        advance = record(step, lambda: tensors(state), torch.device("cuda"), None)
        got = [logits]
        for t in range(cut, length):
            token.copy_(inputs[:, t])
            advance()
            got.append(out.clone())
        alone = [model(inputs[[row] * 3, cut - own :])[0, own - 1 :] for row, own in ((1, 112), (2, 48))]
    made = torch.stack(got, dim=1).double()
    scale = parallel.square().mean().sqrt()
    floor = {"fp32": 1e-4, "bf16": 2e-2}[precision]

    def error(x, y):
        return (x.double() - y.double()).square().mean().sqrt() / scale

    assert error(made[0], parallel) < floor
    assert max(error(made[1], alone[0]), error(made[2], alone[1])) < floor
    if wanted is not None:
        assert error(made[0], wanted) < 2 * error(parallel, wanted) + floor / 10


def test_one_token_behind_a_prompt_of_one_needs_no_more_room():
    model = MODELS.load("attention")(num_layers=1, d_model=16).build(SPEC).cuda().eval()
    made = generate(model, torch.full((2, 1), 3, device="cuda"), 1)
    assert made.shape == (2, 1)
