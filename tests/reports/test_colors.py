"""A model has one colour in all figures, and rows of one family are told apart."""

import re

import pytest

from subquad.models import MODELS
from subquad.reports.render.figure import FAMILIES, colors_of


def test_a_model_has_the_same_colour_whatever_stands_beside_it():
    alone, among = colors_of(["Mamba"]), colors_of(["H3", "Hyena", "Attention", "Mamba", "GSA"])
    assert alone["Mamba"] == among["Mamba"]
    assert len(set(among.values())) == len(among)
    # the plain name has the family's own colour, wherever it stands
    assert colors_of(["GSA, 32 slots", "GSA"])["GSA"] == colors_of(["GSA"])["GSA"]


@pytest.mark.parametrize(
    ("label", "other"),
    [
        ("Hybrid H3-1.3B", "H3"),
        ("Transformer++", "FlashAttention"),
        ("Mamba with S4D", "Mamba"),
        ("Gated State Spaces", "GSS"),
        ("w/o decay (i.e., ABC)", "ABC"),
    ],
)
def test_a_label_has_the_colour_of_the_model_that_it_names_first(label, other):
    assert colors_of([label])[label] == colors_of([other])[other]


def test_rows_of_one_family_have_different_shades():
    colors = colors_of(["MHA-Abs", "MHA-RoPE", "MHA-xPos"])
    assert len(set(colors.values())) == 3
    assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in colors.values())


def test_linear_attention_is_not_attention():
    colors = colors_of(["Linear attention", "Attention"])
    assert colors["Linear attention"] == FAMILIES[r"linear attention|linear-attention|lightning|based"]
    assert len(set(colors.values())) == 2


def test_every_registered_model_but_the_mixture_belongs_to_a_family():
    colors = {name: colors_of([name])[name] for name in MODELS if name != "hybrid"}
    assert set(colors.values()) <= set(FAMILIES.values())
