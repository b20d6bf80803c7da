"""Based's linear attention equals softmax attention with a series in place of the exponential, over all pairs."""

from __future__ import annotations

import pytest
import torch

from subquad.models import MODELS
from subquad.models.based import TaylorFeatures
from subquad.suite.laws.models import build


@torch.no_grad()
def test_the_mixer_is_attention_with_the_series_of_the_exponential():
    mixer = build(MODELS.load("based"), num_layers=1, d_model=12, num_heads=3, feature_dim=5).mixers[0]
    x = 3 * torch.randn(2, 70, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key, value = mixer.qkv.weight.split((15, 15, 12))
    o = torch.empty_like(x)
    for h in range(3):
        at, out = slice(5 * h, 5 * h + 5), slice(4 * h, 4 * h + 4)
        scores = (x @ query[at].T) @ (x @ key[at].T).mT / 5**0.5
        weights = (1 + scores + scores**2 / 2).tril()
        o[..., out] = weights @ (x @ value[out].T) / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(mixer(x), o @ mixer.out.weight.T, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [1, 2, 16])
def test_products_of_features_are_those_of_all_ordered_pairs(width):
    features = build(MODELS.load("based"), num_layers=1, feature_dim=width).mixers[0].features
    q, k = torch.randn(2, 9, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def ordered_pairs(x):
        pairs = (x[:, :, None] * x[:, None, :]).flatten(1) / (2 * width) ** 0.5
        return torch.cat([torch.ones_like(x[:, :1]), x / width**0.25, pairs], dim=-1)

    wanted = ordered_pairs(q) @ ordered_pairs(k).T
    torch.testing.assert_close(features(q) @ features(k).T, wanted, rtol=1e-12, atol=1e-12)
    assert features.width == features(q).shape[-1] == 1 + width + width * (width + 1) // 2


@torch.no_grad()
def test_opposite_queries_and_keys_stay_finite_in_half_precision():
    # a term of the normaliser is smallest, a half, where the score is -1
    features = TaylorFeatures(16).bfloat16()
    scores = torch.linspace(-40, 40, 4001)
    unit = torch.ones(len(scores), 16) / 2
    q, k = unit.bfloat16(), (unit * scores[:, None]).bfloat16()
    terms = (features(q).float() * features(k).float()).sum(-1)
    assert terms.min() > 0.3
