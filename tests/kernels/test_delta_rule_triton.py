"""The Triton kernels of the delta rule against its recurrence."""

from __future__ import annotations

import inspect
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.delta_rule import delta_rule, delta_rule_reference
from subquad.suite.laws.accuracy import assert_matches_reference, relative_error
from tests.kernels.gated import (
    DEVICE,
    calls_of_all_kinds,
    in_chunks,
    kept_plans_give_the_same,
    make_planner,
    on_device,
    on_kernels,
    packed_sequences_are_separate_ones,
    quick,
    scaled,
)

DECAYS = ["none", "head", "key", "write", "plain", "shared"]
"""`write`: a decay of every key channel, and other keys for writing than for reading; `plain`: besides, values that are
added under keys of their own; `shared`: a decay of a head, and every two heads share queries and keys."""
KEEP = ("beta", "log_decay", "initial_state")
every_decay = pytest.mark.parametrize("decay", DECAYS)
one_decay = pytest.mark.parametrize("decay", quick(DECAYS, "head", "shared"))


def tuning(**changes) -> dict:
    impl = pytest.importorskip("subquad.kernels.delta_rule.triton.plan")
    return impl.default_tuning() | changes


run_triton = on_kernels("delta_rule", lambda: make_planner(**tuning()))


def in_triton(**changes):
    return partial(run_triton, make_planner(**tuning(**changes)))


def make_inputs(length: int, decay: str, *, state: bool = True, H: int = 2, K: int = 16, V: int = 16) -> dict:
    """Unit keys, beta between 0 and 2 (eigenvalues between -1 and 1), log-decays of mean -0.3.

    Between unrelated keys beta is at most 1: the README says what bfloat16 loses beyond.
    """
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    uniform = partial(torch.rand, generator=generator, dtype=torch.float64)
    channels = {"none": None, "head": (), "shared": ()}.get(decay, (K,))
    groups = max(1, H // 2) if decay == "shared" else H
    return {
        "q": normal(1, length, groups, K),
        "k": F.normalize(normal(1, length, groups, K), dim=-1),
        "v": normal(1, length, H, V),
        "beta": (1 if decay in ("write", "plain") else 2) * uniform(1, length, H),
        "log_decay": None if channels is None else 0.3 * uniform(1, length, H, *channels).log(),
        "write": F.normalize(normal(1, length, H, K), dim=-1) if decay in ("write", "plain") else None,
        "plain": normal(1, length, H, K) / K**0.5 if decay == "plain" else None,
        "initial_state": normal(1, H, K, V) if state else None,
        "return_final_state": True,
    }


def equals_the_loop(inputs, dtype=torch.float32, keep=KEEP, **changes):
    op = in_triton(**changes)
    assert_matches_reference(op, delta_rule_reference, inputs, dtype=dtype, keep=keep, device=DEVICE)


@in_chunks
@every_decay
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("length", [33, pytest.param(1, marks=pytest.mark.slow)])
def test_the_kernels_equal_the_loop(length, dtype, decay, chunk):
    # a single step has one gradient for each head, so more heads are needed to sample the rounding errors
    options = {"H": 16} if length == 1 else {}
    inputs = make_inputs(length if chunk == 16 else 4 * length - 3, decay, K=32, **options)
    equals_the_loop(inputs, dtype, chunk=chunk)


@in_chunks
@one_decay
def test_the_kernels_in_blocks_that_do_not_divide_the_sizes_equal_the_loop(decay, chunk):
    names = {"scores", "walk", "grads"}
    narrow = {n: {key: tile._replace(block_v=16) for key, tile in tuning()[n].items()} for n in names}
    narrow |= {n: {key: tile._replace(block_k=16) for key, tile in narrow[n].items()} for n in ("scores", "grads")}
    equals_the_loop(make_inputs(scaled(70, chunk), decay, K=20, V=36), torch.float16, chunk=chunk, **narrow)


@every_decay
def test_sizes_that_tiles_divide_equal_the_loop(decay):
    """Nothing is outside of chunks and tiles, so that kernels without a decay of a channel mask nothing."""
    equals_the_loop(make_inputs(48, decay, K=32, V=32), torch.bfloat16, chunk=16)


@pytest.mark.parametrize(
    ("keys", "options", "stages"),
    [
        (256, {"by_rows": True}, 2),
        (128, {"by_rows": False}, 2),
        (256, {"by_rows": False}, 1),
        (128, {"by_rows": False, "plain": True}, 1),
    ],
)
def test_a_walk_loads_ahead_only_what_shared_memory_holds(keys, options, stages):
    impl = pytest.importorskip("subquad.kernels.delta_rule.triton.plan")
    x = torch.zeros(1, 64, 1, keys, dtype=torch.bfloat16)
    assert impl.walk_tile(impl.PLANNER(1.0, x, x, x), keys, 64, **options).options.num_stages == stages


@pytest.mark.parametrize(
    ("heads", "by_rows", "values"), [(33, 0, 128), (34, 0, 64), (66, 0, 64), (67, 0, 128), (64, 1, 128)]
)
def test_a_walk_takes_half_of_the_values_where_that_occupies_the_multiprocessors(heads, by_rows, values):
    impl = pytest.importorskip("subquad.kernels.delta_rule.triton.plan")
    x = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16)
    plan = impl.PLANNER(1.0, x, x, x)
    assert impl.walk_tile(plan, 128, 128, by_rows=bool(by_rows), num_heads=heads).block_v == values


def test_masks_are_left_out_only_where_nothing_is_outside():
    impl = pytest.importorskip("subquad.kernels.delta_rule.triton.plan")
    x = torch.zeros(1, 48, 1, 32, device=DEVICE, dtype=torch.bfloat16)
    planner = make_planner(**tuning(chunk=16))
    plan, near = planner(1.0, x, x, x), [x.stride()]
    assert impl.is_whole(plan, 48, (32, 32), (64, 32), strides=near)
    assert not impl.is_whole(plan, 47, (32, 32), strides=near)
    assert not impl.is_whole(plan, 48, (32, 32), (40, 32), strides=near)
    assert not impl.is_whole(planner(1.0, x, x, x, sequence_ends=[0, 16, 48]), 48, (32, 32), strides=near)
    assert not impl.is_whole(planner(1.0, x.float(), x, x), 48, (32, 32), strides=near)


def test_masks_are_kept_where_the_positions_of_a_chunk_lie_2_to_the_31_elements_apart():
    """Without masks, offsets within a chunk are int32."""
    impl = pytest.importorskip("subquad.kernels.delta_rule.triton.plan")
    near = torch.zeros(1, 48, 1, 32, device=DEVICE, dtype=torch.bfloat16)
    far = torch.empty(0, device="meta", dtype=torch.bfloat16).as_strided((1, 48, 1, 32), (0, 2**27, 32, 1))
    plan = make_planner(**tuning(chunk=16))(1.0, near, near, near)
    assert impl.is_whole(plan, 48, (32, 32), strides=(near.stride(),))
    assert not impl.is_whole(plan, 48, (32, 32), strides=(near.stride(), far.stride()))


def test_the_two_kernels_of_the_gradients_take_the_same_arguments():
    """One launch serves both; only what the tree needs, or only the other chunks, are arguments of one alone."""
    pytest.importorskip("triton")
    from subquad.kernels.delta_rule.triton.grads import _grads_kernel
    from subquad.kernels.delta_rule.triton.mild_grads import _mild_grads_kernel

    tree, mild = (inspect.signature(kernel.fn).parameters for kernel in (_grads_kernel, _mild_grads_kernel))
    assert set(tree) - set(mild) == {"diagonals", "end_v", "LEVELS"}
    assert set(mild) - set(tree) == {"PARTS", "WHOLE"}
    shared = [(name, parameter.annotation) for name, parameter in tree.items() if name in mild]
    assert shared == [(name, parameter.annotation) for name, parameter in mild.items() if name in tree]


@pytest.mark.parametrize(("chunk", "decay"), [(16, "none"), (32, "none"), (32, "key")])
def test_an_inverse_beyond_float16_equals_the_loop(chunk, decay):
    """One key with b |k|^2 = 4: the state triples at every step, up to 3^31 within a chunk."""
    inputs = make_inputs(32, decay, state=False)
    if decay == "key":
        inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    inputs["k"] = 2.0 * inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = torch.ones_like(inputs["beta"])
    rounded = {n: x.bfloat16() if isinstance(x, Tensor) else x for n, x in inputs.items()}
    exact = delta_rule_reference(**on_device(rounded, torch.float64))
    for got, wanted in zip(in_triton(chunk=chunk)(**on_device(rounded, torch.bfloat16)), exact, strict=True):
        assert relative_error(got, wanted)[0] < 0.02


@pytest.mark.parametrize("decay", ["none", "head"])
@pytest.mark.parametrize("length", [64, 70])
def test_short_chunks_equal_the_loop(length, decay):
    tuned = pytest.importorskip("subquad.kernels.delta_rule.triton.plan").short_chunks()
    equals_the_loop(make_inputs(length, decay, K=32, V=32), torch.bfloat16, **tuned)


@every_decay
def test_calls_without_a_gradient_and_other_gpus_take_short_chunks(decay, monkeypatch):
    impl = pytest.importorskip("subquad.kernels.delta_rule.triton.autograd")
    used = []
    for name in ("PLANNER", "SHORT_CHUNKS"):

        def planned(*inputs, name=name, **options):
            used.append(name)
            return make_planner(**tuning(chunk=16))(*inputs, **options)

        monkeypatch.setattr(impl, name, planned)
    inputs = on_device(make_inputs(20, decay), torch.bfloat16)
    impl.delta_rule_triton(**inputs)
    inputs["beta"].requires_grad_()
    impl.delta_rule_triton(**inputs)
    monkeypatch.setattr(impl, "interpreted", lambda: False)
    impl.delta_rule_triton(**inputs)
    short = "SHORT_CHUNKS" if decay in ("none", "head", "shared") else "PLANNER"
    hopper = DEVICE != "cpu" and impl.is_hopper()
    assert used == [short, short if DEVICE != "cpu" and not hopper else "PLANNER", "PLANNER" if hopper else short]


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernels_neither_overflow_nor_lose_the_near_terms(decay, dtype):
    """Steps that keep exp(-50), nothing at all, everything, or all but 1e-4, side by side."""
    inputs = make_inputs(33, decay, K=32)
    drawn = torch.rand(inputs["log_decay"].shape, generator=torch.Generator().manual_seed(3))
    steps = torch.tensor([-50.0, -torch.inf, 0.0, -1e-4], dtype=torch.float64)
    inputs["log_decay"] = steps[torch.bucketize(drawn, torch.tensor([0.1, 0.2, 0.5]))]
    equals_the_loop(inputs, dtype, chunk=16)


def test_factors_about_the_middle_of_a_chunk_and_the_tree_equal_the_loop():
    inputs = make_inputs(33, "key", K=32)
    for mild in (60.0, 0.0):
        equals_the_loop(inputs, torch.bfloat16, mild_half=mild, chunk=16)
    about_the_middle, by_the_tree = (
        run_triton(make_planner(**tuning(mild_float32=mild, chunk=16)), **on_device(inputs))[0] for mild in (60.0, 0.0)
    )
    assert not torch.equal(about_the_middle, by_the_tree)


def test_a_steep_chunk_between_mild_ones_equals_the_loop():
    """One key of the second tile makes one of three chunks of one of two heads steep, with all of its keys."""
    inputs = make_inputs(48, "key", K=32)
    inputs["log_decay"][:, 20:26, 1, 20] = -50.0
    narrow = {n: {key: tile._replace(block_k=16) for key, tile in tuning()[n].items()} for n in ("scores", "grads")}
    equals_the_loop(inputs, torch.bfloat16, chunk=16, **narrow)


def test_the_inverse_of_four_blocks_is_that_of_the_system():
    """The keys of one chunk are so close that powers of its system grow to 1e9 before they vanish."""
    plan, factors = (pytest.importorskip(f"subquad.kernels.delta_rule.triton.{name}") for name in ("plan", "factors"))
    generator = torch.Generator().manual_seed(0)
    k = F.normalize(0.3 * torch.randn(1, 64, 1, 16, generator=generator) + 1, dim=-1).to(DEVICE)
    beta = 2 * torch.rand(1, 64, 1, generator=generator).to(DEVICE)
    settings = make_planner(**plan.default_tuning())(1.0, k, k, k)
    found = factors.delta_factors(settings, k, k, beta, None).inverse[0, :, 0].double()
    system = (k[0, :, 0] @ k[0, :, 0].T).double().tril(-1) * beta[0, :, 0].double()
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64, device=k.device) + system)
    assert torch.equal(found, found.tril(-1))
    assert relative_error(found, exact - torch.eye(64, device=k.device))[0] < 1e-5


@pytest.mark.parametrize("decay", ["none", "key"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equal_keys_and_full_reflections_stay_bounded(dtype, decay):
    """beta = 2 with one key everywhere is the worst case of the triangular system; the README says what is lost."""
    inputs = make_inputs(200, decay, H=1)
    if decay == "key":
        inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs["beta"].fill_(2.0)
    rounded = {n: x.to(torch.float32 if n in KEEP else dtype) for n, x in inputs.items() if isinstance(x, Tensor)}
    rounded["return_final_state"] = True
    exact = delta_rule_reference(**on_device(rounded, torch.float64))
    actual = run_triton(**{n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in (inputs | rounded).items()})
    for got, wanted in zip(actual, exact, strict=True):
        assert relative_error(got, wanted)[0] < (5e-3 if dtype == torch.float32 else 0.05)


@in_chunks
@pytest.mark.parametrize(("count", "state"), [(2, True), (3, True), (5, False)])
@pytest.mark.parametrize("decay", quick(DECAYS, "none", "key", "shared"))
def test_segments_walked_side_by_side_equal_the_loop(decay, chunk, count, state, monkeypatch):
    """Five chunks in segments of three and two, of two, two and one, or of one; values and keys of several blocks.

    Without a decay a wrong matrix of a segment shows; with one of heads the state fades before it would.
    """
    segments = pytest.importorskip("subquad.kernels.delta_rule.triton.segments")
    for name in ("walk", "back", "autograd"):
        module = f"subquad.kernels.delta_rule.triton.{name}"
        monkeypatch.setattr(f"{module}.cut_time", lambda *_, **__: segments.Segments(count, -(-5 // count)))
    walk = {key: tile._replace(block_v=16) for key, tile in tuning()["walk"].items()}
    heads = 2 if decay == "shared" else 1
    equals_the_loop(make_inputs(scaled(290, chunk), decay, state=state, H=heads, K=20, V=20), chunk=chunk, walk=walk)


def fading_inputs() -> dict:
    """Twelve chunks of 16. States fade within two of them, and in the second head every fourth chunk keeps them."""
    inputs = make_inputs(12 * 16, "head", K=32, V=32)
    inputs["log_decay"] = 6 * inputs["log_decay"]
    inputs["log_decay"].unflatten(1, (3, 4, 16))[:, :, 3, :, 1] = 0.0
    return inputs


def all_fading_inputs() -> dict:
    """These, in float32, with a decay by which both heads fade everywhere."""
    inputs = {name: x.float() if isinstance(x, Tensor) else x for name, x in fading_inputs().items()}
    inputs["log_decay"] -= 0.5
    return inputs


@pytest.mark.parametrize("beta", [None, 2.5, -0.5])
def test_segments_leave_out_what_has_faded_and_only_that(beta, monkeypatch):
    """Three segments of four chunks equal one. States fade; or one key with b = 2.5 or b = -0.5, which multiplies what
    is held for it by -1.5 or 1.5, makes the state grow by as much as it decays.
    """
    impl = pytest.importorskip("subquad.kernels.delta_rule.triton.segments")
    inputs = fading_inputs()
    if beta is not None:
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
        inputs["beta"] = torch.full_like(inputs["beta"], beta)
        inputs["log_decay"] = torch.full_like(inputs["log_decay"], -0.4)
    found = []
    for cut in (impl.Segments(1, 12), impl.Segments(3, 4)):
        for name in ("walk", "back", "autograd"):
            monkeypatch.setattr(f"subquad.kernels.delta_rule.triton.{name}.cut_time", lambda *_, cut=cut: cut)
        leaves = {n: x.requires_grad_() for n, x in on_device(inputs).items() if isinstance(x, Tensor)}
        o, final = in_triton(chunk=16)(**leaves, return_final_state=True)
        (o.square().sum() + final.square().sum()).backward()
        found.append([o, final, *(x.grad for x in leaves.values())])
    for whole, in_segments in zip(*found, strict=True):
        assert relative_error(in_segments.detach(), whole.detach().double())[0] < 1e-4


@pytest.mark.parametrize(("value", "count"), [(math.nan, 2), (math.inf, 3)])
@pytest.mark.parametrize("name", ["k", "beta", "log_decay", "initial_state"])
def test_what_is_not_finite_does_not_fade(name, value, count, monkeypatch):
    """It reaches all later segments, though the end of its own one would not notice its chunk, nor they its state."""
    impl = pytest.importorskip("subquad.kernels.delta_rule.triton.segments")
    for module in ("walk", "back", "autograd"):
        cut = impl.Segments(count, 12 // count)
        monkeypatch.setattr(f"subquad.kernels.delta_rule.triton.{module}.cut_time", lambda *_, cut=cut: cut)
    inputs = all_fading_inputs()
    inputs[name][0, 0 if name == "initial_state" else 20, 0] = value
    found = in_triton(chunk=16)(**on_device(inputs))
    expected = delta_rule_reference(**inputs)
    for x, y in zip(found, expected, strict=True):
        assert y.isnan().any()
        assert x.cpu()[y.isnan()].isnan().all()
    assert not found[0][0, :, 1].isnan().any()


def test_a_gradient_that_is_nan_does_not_fade(monkeypatch):
    """A NaN in the final state's gradient reaches the first position, also through segments that fade."""
    impl = pytest.importorskip("subquad.kernels.delta_rule.triton.segments")
    for module in ("walk", "back", "autograd"):
        monkeypatch.setattr(f"subquad.kernels.delta_rule.triton.{module}.cut_time", lambda *_: impl.Segments(3, 4))
    inputs = on_device(all_fading_inputs())
    inputs["v"].requires_grad_()
    _, final = in_triton(chunk=16)(**inputs)
    gradient = torch.zeros_like(final)
    gradient[0, 0, 0, 3] = math.nan
    (dv,) = torch.autograd.grad(final, inputs["v"], gradient)
    assert torch.equal(dv.isnan().nonzero()[:, 2:].unique(dim=0).cpu(), torch.tensor([[0, 3]]))
    assert dv[0, :, 0, 3].isnan().all()


@pytest.mark.parametrize(
    ("heads", "most", "walks", "side_by_side", "expected"),
    [
        (4, 8, 16, 1000, (4, 8)),  # more than four segments would be walked in two rounds
        (4, 8, 1000, 20, (4, 8)),  # 4 (4 - 1) walks of values and 4 (4 - 2) of columns of the identity are 20
        (4, 8, 1000, 19, (6, 6)),  # two rounds of the walk to the ends, of fewer chunks
        (4, 8, 4, 1000, (1, 32)),
        (4, 0, 1000, 1000, (1, 32)),
        (4, 5, 1000, 1000, (5, 7)),
    ],
)
def test_time_is_cut_into_segments_that_run_side_by_side(heads, most, walks, side_by_side, expected):
    segments = pytest.importorskip("subquad.kernels.delta_rule.triton.segments")
    assert segments.best_segments(heads, 32, most, 1, walks, (1, 1), side_by_side) == expected


def test_long_sequences_of_few_heads_are_cut():
    """The shapes of `bench`, and a sequence of more keys than have room for a matrix."""
    segments = pytest.importorskip("subquad.kernels.delta_rule.triton.segments")
    plan = pytest.importorskip("subquad.kernels.delta_rule.triton.plan")

    def cut(planner, batch, length, key_dim=128, kind=plan.NONE, heads=16):
        x = torch.empty(batch, length, heads, key_dim, dtype=torch.bfloat16, device="meta")
        return segments.cut_time(planner(1.0, x, x, x), x.shape, 128, kind)

    assert cut(plan.PLANNER, 8, 2048) == (1, 32)
    assert cut(plan.SHORT_CHUNKS, 8, 2048) == (1, 64)
    assert cut(plan.PLANNER, 1, 16384) == (7, 37)
    assert cut(plan.SHORT_CHUNKS, 1, 16384) == (7, 74)
    assert cut(plan.PLANNER, 1, 16384, kind=plan.CHANNEL) == (8, 32)
    # a decay of a head is expected to let states fade, so that matrices cost nothing
    assert cut(plan.PLANNER, 1, 16384, kind=plan.HEAD) == (8, 32)
    assert cut(plan.SHORT_CHUNKS, 1, 16384, kind=plan.HEAD) == (8, 64)
    assert cut(plan.PLANNER, 1, 32768, kind=plan.HEAD, heads=32) == (4, 128)
    assert cut(plan.PLANNER, 1, 16384, key_dim=256) == (1, 256)


@in_chunks
@one_decay
def test_packed_sequences_equal_separate_ones(decay, chunk):
    ends = [0, 1, *(scaled(end, chunk) for end in (70, 110))]
    packed_sequences_are_separate_ones(in_triton(chunk=chunk), on_device(make_inputs(ends[-1], decay)), ends)


def test_an_empty_packed_sequence_ends_with_its_initial_state():
    inputs = on_device(make_inputs(9, "head", H=1))
    states = torch.linspace(-1, 1, 5 * 16 * 16, device=DEVICE).view(5, 1, 16, 16)
    op = partial(delta_rule, backend="triton")
    packed = op(**inputs | {"initial_state": states, "cu_seqlens": torch.tensor([0, 0, 5, 5, 9, 9])})
    filled = op(**inputs | {"initial_state": states[[1, 3]], "cu_seqlens": torch.tensor([0, 5, 9])})
    assert torch.equal(packed[0], filled[0])
    assert torch.equal(packed[1][[1, 3]], filled[1])
    assert torch.equal(packed[1][[0, 2, 4]], states[[0, 2, 4]])


@in_chunks
@one_decay
def test_the_kernels_do_without_states_and_take_a_scale(decay, chunk):
    inputs = make_inputs(scaled(70, chunk), decay, state=False) | {"scale": 0.1, "return_final_state": False}
    equals_the_loop(inputs, chunk=chunk)


@one_decay
def test_plans_that_are_kept_belong_to_calls_of_one_kind(decay):
    inputs = on_device(make_inputs(20, decay, H=1), torch.bfloat16)
    inputs["initial_state"] = inputs["initial_state"].float()

    kept_plans_give_the_same(
        lambda planner: calls_of_all_kinds(partial(run_triton, planner), inputs), **tuning(chunk=16)
    )


def test_log_decays_in_bfloat16_never_reach_the_gradients_of_plain_keys(monkeypatch):
    """Triton 3.6 makes wrong code for them (ptxas 12.8); the kernels are not started."""
    launch = pytest.importorskip("subquad.kernels.launch")
    read = {}

    def note(self, kernel, grid, /, **named):
        if "g" in named:
            read[kernel.__name__] = named["g"].dtype

    monkeypatch.setattr(launch.Launcher, "__call__", note)
    inputs = on_device(make_inputs(20, "key", H=1), torch.bfloat16)
    leaves = {n: x.requires_grad_() for n, x in inputs.items() if isinstance(x, Tensor)}
    o, _ = run_triton(**inputs | {"plain": leaves["k"].detach()})
    (dg,) = torch.autograd.grad(o.sum(), [leaves["log_decay"]])
    assert dg.dtype == torch.bfloat16
    assert read == dict.fromkeys(("_factors_kernel", "_grads_kernel", "_mild_grads_kernel"), torch.float32)


@pytest.mark.parametrize("decay", quick(DECAYS, "plain"))
@pytest.mark.parametrize(("K", "V"), [pytest.param(4, 4, marks=pytest.mark.slow), (40, 24)])
def test_float32_operands_have_a_tuning_of_their_own(decay, K, V):
    """Heads narrower than a tile, and keys of one tile and a part of a second, over more than two chunks."""
    planner = pytest.importorskip("subquad.kernels.delta_rule.triton.plan").PLANNER
    inputs = make_inputs(70, decay, H=2 if decay == "shared" else 1, K=K, V=V)
    assert_matches_reference(
        partial(run_triton, planner), delta_rule_reference, inputs, dtype=torch.float32, device=DEVICE
    )
