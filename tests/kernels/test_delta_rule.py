"""The delta rule against its recurrence."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.delta_rule import delta_rule, delta_rule_reference
from subquad.kernels.gated_linear_attention import gated_linear_attention_reference
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference, relative_error

B, H, K, V = 2, 2, 8, 5
DECAYS = ["none", "head", "key", "write", "plain"]
"""`write`: a decay of every key channel, and other keys for writing than for reading; `plain`: besides, values that are
added under keys of their own."""
ALONG_TIME = ("q", "k", "v", "beta", "log_decay", "write", "plain")
KEEP = ("beta", "log_decay", "initial_state")
every_decay = pytest.mark.parametrize("decay", DECAYS)


def make_inputs(length: int, decay: str, *, state: bool = True, B: int = B) -> dict:
    """Unit keys, beta between 0 and 2 (eigenvalues between -1 and 1), log-decays of mean -0.3."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    uniform = partial(torch.rand, generator=generator, dtype=torch.float64)
    channels = {"none": None, "head": ()}.get(decay, (K,))
    return {
        "q": normal(B, length, H, K),
        "k": F.normalize(normal(B, length, H, K), dim=-1),
        "v": normal(B, length, H, V),
        "beta": 2 * uniform(B, length, H),
        "log_decay": None if channels is None else 0.3 * uniform(B, length, H, *channels).log(),
        "write": F.normalize(normal(B, length, H, K), dim=-1) if decay in ("write", "plain") else None,
        "plain": normal(B, length, H, K) / K**0.5 if decay == "plain" else None,
        "initial_state": normal(B, H, K, V) if state else None,
        "return_final_state": True,
    }


def cut(inputs: dict, time: slice) -> dict:
    return {name: x[:, time] if name in ALONG_TIME and x is not None else x for name, x in inputs.items()}


@pytest.mark.parametrize("decay", ["head", "key"])
def test_where_beta_is_zero_the_state_decays_and_nothing_else(decay):
    inputs = make_inputs(70, decay)
    inputs["beta"].zero_()
    o, final = delta_rule(**inputs)
    total = inputs["log_decay"].cumsum(1)
    total = total if decay == "key" else total.unsqueeze(-1)
    states = total.exp().unsqueeze(-1) * inputs["initial_state"].unsqueeze(1)
    assert_close(final, states[:, -1], torch.float64, what="state")
    assert_close(o, K**-0.5 * (inputs["q"].unsqueeze(-2) @ states).squeeze(-2), torch.float64, what="output")


def test_a_unit_key_with_beta_one_reads_back_the_value_written_last():
    inputs = make_inputs(70, "none")
    inputs["beta"].fill_(1.0)
    o, _ = delta_rule(**inputs | {"q": inputs["k"], "scale": 1.0})
    assert_close(o, inputs["v"], torch.float64, what="values")
    # a value of zero projects the state on the plane that is orthogonal to the key
    one = cut(inputs, slice(1)) | {"v": torch.zeros(B, 1, H, V, dtype=torch.float64)}
    _, projected = delta_rule(**one)
    k = inputs["k"][:, 0]
    projection = torch.eye(K, dtype=torch.float64) - k.unsqueeze(-1) * k.unsqueeze(-2)
    assert_close(projected, projection @ inputs["initial_state"], torch.float64, what="state")


def test_orthogonal_keys_make_it_gated_linear_attention():
    """Nothing is held for a key that is orthogonal to all before, so there is nothing to replace."""
    inputs = make_inputs(K, "head", state=False)
    inputs["k"] = torch.eye(K, dtype=torch.float64)[:, None].expand(B, K, H, K)
    beta = inputs.pop("beta")
    del inputs["write"], inputs["plain"]
    expected, _ = gated_linear_attention_reference(**inputs | {"v": beta.unsqueeze(-1) * inputs["v"]})
    assert_close(delta_rule(**inputs, beta=beta)[0], expected, torch.float64, what="output")


@pytest.mark.parametrize("decay", ["head", "key"])
def test_extreme_decays_neither_overflow_nor_lose_the_near_terms(decay):
    """Steps that keep exp(-50) stand next to steps that keep all but 1e-4, in float32."""
    inputs = make_inputs(300, decay)
    hard = torch.rand(inputs["log_decay"].shape, generator=torch.Generator().manual_seed(3)) < 0.2
    inputs["log_decay"] = torch.where(hard, -50.0, -1e-4).double()
    assert_matches_reference(delta_rule, delta_rule_reference, inputs, dtype=torch.float32, keep=KEEP)


def test_equal_keys_and_full_reflections_stay_bounded():
    """beta = 2 with one key everywhere is the worst case of the triangular system; the README says what is lost."""
    inputs = make_inputs(300, "none")
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs["beta"].fill_(2.0)
    exact = delta_rule_reference(**inputs)
    actual = delta_rule(**{n: x.float() if isinstance(x, Tensor) else x for n, x in inputs.items()})
    for got, wanted in zip(actual, exact, strict=True):
        assert relative_error(got, wanted)[0] < 5e-5


@every_decay
def test_packed_sequences_do_not_see_each_other_and_may_be_empty(decay):
    ends = [0, 0, 3, 70, 70, 90]
    inputs = make_inputs(90, decay, B=1)
    states = torch.randn(5, H, K, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    o, final = delta_rule(**inputs | {"initial_state": states, "cu_seqlens": torch.tensor(ends)})
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            assert torch.equal(final[i], states[i])
            continue
        alone = delta_rule(**cut(inputs, slice(start, end)) | {"initial_state": states[i : i + 1]})
        assert_close(o[:, start:end], alone[0], torch.float64, what=f"sequence {i}")
        assert_close(final[i : i + 1], alone[1], torch.float64, what=f"state {i}")
