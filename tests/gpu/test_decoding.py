"""Decoding on a GPU: the fused kernels at sizes of real use, and whole models step by step."""

import pytest
import torch

from subquad.kernels.attention import attention_step
from subquad.kernels.attention.reference import attention_step_reference
from subquad.kernels.skinny_linear import Norm, skinny_linear
from subquad.kernels.skinny_linear.reference import skinny_linear_reference
from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec
from subquad.suite.laws.accuracy import assert_matches_reference
from subquad.suite.state import copy_into, tensors
from subquad.suite.training.capture import record

ROWS = (1, 4, 16, 33)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "outputs"), [(2048, 8192), (4096, 160), (5464, 2048), (100, 50)])
@pytest.mark.parametrize("form", ["rms", "layer", "groups", "plain"])
def test_linear_maps_equal_the_map_as_written(rows, width, outputs, form):
    if form == "groups" and width % 256:
        pytest.skip("groups of 256 channels")
    if rows > 1 and form != "plain":
        pytest.skip("norms of one row only")
    g = torch.Generator().manual_seed(width)
    inputs = {"x": torch.randn(rows, width, generator=g) + 0.3, "residual": torch.randn(rows, outputs, generator=g)}
    inputs["weight"] = torch.randn(outputs, width, generator=g) * width**-0.5
    if rows == 1 and form in ("groups", "plain"):
        inputs["gate"] = torch.randn(rows, width, generator=g)
    if form != "plain":
        inputs["norm_weight"] = torch.rand(256 if form == "groups" else width, generator=g) + 0.5

    def with_norm(op):
        def run(norm_weight=None, **rest):
            kind = "layer" if form == "layer" else "rms"
            return op(**rest, norm=None if norm_weight is None else Norm(kind, norm_weight, None, 1e-5))

        return run

    assert_matches_reference(
        with_norm(lambda **rest: skinny_linear(**rest, backend="triton")),
        with_norm(skinny_linear_reference),
        {name: x.double() for name, x in inputs.items()},
        dtype=torch.bfloat16,
        keep=("norm_weight",),
        device="cuda",
        reference_device="cuda",
        grad=False,
    )


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 16, 128), (5, 3, 48), (64, 4, 64)])
def test_a_step_of_attention_equals_the_step_as_written(rows, heads, size, windows):
    g = torch.Generator().manual_seed(size)
    capacity = 700
    inputs = {name: torch.randn(rows, heads, size, generator=g).double() for name in "qkv"}
    inputs |= {name: torch.randn(rows, capacity, heads, size, generator=g).double() for name in ("keys", "values")}
    angle = torch.arange(capacity)[:, None] * 1000.0 ** -(torch.arange(size // 2) / size * 2)
    inputs |= {"cos": angle.cos().double(), "sin": angle.sin().double()}
    count = torch.randint(capacity, (rows,), generator=g)
    if windows:
        inputs["window"] = torch.tensor([1, 2, 100, 2**40] * heads)[:heads]

    def step(keys, values, **rest):
        now = count.cuda()
        o = attention_step(keys=keys, values=values, count=now, **rest, backend="triton")
        assert torch.equal(now.cpu(), count + 1)
        return o, keys, values

    assert_matches_reference(
        step,
        lambda **given: attention_step_reference(**given, count=count),
        inputs,
        dtype=torch.bfloat16,
        keep=("cos", "sin"),
        device="cuda",
        grad=False,
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "transformer++", "gla"])
def test_recorded_steps_whose_kernels_overlap_give_the_same_bits(name):
    """With one row, kernels of a step start while the one before them still runs."""
    spec = TaskSpec(input="tokens", readout="token", vocab_size=64, num_classes=64, max_length=64)
    torch.manual_seed(0)
    model = MODELS.load(name)(num_layers=4, d_model=512).build(spec).cuda().eval()
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.bfloat16()
    tokens, token = torch.randint(64, (40,), device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
    held, logits = model.init_state(1), torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            found, after = model.step(token, held)
        copy_into(held, after)
        logits.copy_(found)

    def run(advance):
        model.restart(held)
        rows = []
        for t in range(len(tokens)):
            token.copy_(tokens[t : t + 1])
            advance()
            torch.cuda.synchronize()
            rows.append(logits.clone())
        return torch.stack(rows)

    one_by_one = run(step)
    replay = record(step, lambda: (*tensors(held), logits), token.device, None)
    assert torch.equal(run(replay), one_by_one)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", ["mamba", "transformer++", "attention", "gla", "gsa", "retnet", "hgrn2", "h3", "abc"])
def test_512_steps_of_a_model_in_bfloat16_equal_the_parallel_pass(name, rows):
    """The steps may err twice as much as the parallel pass in the same precision does against float64."""
    length, vocabulary = 512, 64
    spec = TaskSpec(input="tokens", readout="token", vocab_size=vocabulary, num_classes=vocabulary, max_length=length)
    torch.manual_seed(0)
    model = MODELS.load(name)(num_layers=2, d_model=256).build(spec).cuda().eval()
    for parameter in model.parameters():
        # all paths see weights that bfloat16 can hold
        parameter.data.copy_(parameter.data.bfloat16())
    tokens = torch.randint(vocabulary, (rows, length), device="cuda")
    with torch.no_grad():
        exact = model.double()(tokens)
        model.float()
        with torch.autocast("cuda", torch.bfloat16):
            parallel = model(tokens).double()
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.bfloat16()
        state, logits = model.init_state(rows), []
        with torch.autocast("cuda", torch.bfloat16):
            for t in range(length):
                logits_t, state = model.step(tokens[:, t], state)
                logits.append(logits_t.double())
    steps = torch.stack(logits, dim=1)
    granted = (parallel - exact).square().mean().sqrt()
    # the residual stream of a step has the dtype of the embedding, that of the parallel pass float32
    assert (steps - exact).square().mean().sqrt() < 2 * granted + 2**-8 * exact.square().mean().sqrt()
