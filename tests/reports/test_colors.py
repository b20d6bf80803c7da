"""A model has one colour in all figures, and rows of one family are told apart."""

import re
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from subquad.models import MODELS
from subquad.reports.render import page
from subquad.reports.render.changes import MARKS
from subquad.reports.render.draw import CLAIM_COLORS, PLAIN_COLORS, VERDICT_COLORS
from subquad.reports.render.figure import FAMILIES, MARKERS, colors_of, looks_of
from subquad.reports.render.frontier import KINDS
from subquad.reports.render.lines import MOST_LINES
from subquad.reports.render.seeds import ALL, NONE, PLAIN, SOME
from subquad.reports.render.tiles import SHADES
from tests.reports.committed import CONFIGS


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


DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
"""The map of linear sRGB to what an eye without green cones sees (Machado, Oliveira and Fernandes 2009, severity 1)."""
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def lab(color):
    """CIE L*a*b* of a colour as it looks under deuteranopia."""
    parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    scaled = XYZ @ np.clip(DEUTERANOPIA @ linear, 0, 1) / (0.95047, 1.0, 1.08883)
    x, y, z = np.where(scaled > 216 / 24389, np.cbrt(scaled), (24389 / 27 * scaled + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def themes():
    """The colours of verdicts and of their bars on the page, in the light and in the dark theme."""
    css = Path(page.__file__).with_name("page.css").read_text()
    names = ("agree", "better", "worse", "unsure", "unstable", "chance")
    for line in css.splitlines():
        if "--agree:" in line:
            yield [re.search(rf"--{name}: (#[0-9a-f]{{6}})", line)[1] for name in names]
        elif "--bar-agree:" in line:
            yield re.findall(r"#[0-9a-f]{6}", line)


PALETTES = {
    "scoreboard": [*VERDICT_COLORS.values(), *set(PLAIN_COLORS.values())],
    "claims": list(CLAIM_COLORS.values()),
    "seeds": [ALL, SOME, NONE, PLAIN],
    "kinds of mixers": [color for _, _, color, _ in KINDS],
    "changes": [color for _, color in MARKS.values()],
    **{f"page {i}": colors for i, colors in enumerate(themes())},
}


@pytest.mark.parametrize("name", PALETTES)
def test_colours_differ_for_people_without_green_cones(name):
    """Worse and unclear had a distance of 4.8 on the page, which nobody tells apart."""
    near = {pair: np.linalg.norm(lab(pair[0]) - lab(pair[1])) for pair in combinations(PALETTES[name], 2)}
    assert {pair: round(float(distance), 1) for pair, distance in near.items() if distance < 20} == {}


ROWS = {name: list(config.table.rows) for name, config in CONFIGS.items() if config.table and config.table.rows}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_one_mark_have_colours_that_anybody_tells_apart(name):
    """KDA and Gated DeltaNet-2 had one colour, in figures of 15 and more mixers, and on the page no mark."""
    looks = looks_of(ROWS[name])
    alike = [
        (one, other)
        for one, other in combinations(looks, 2)
        if looks[one][1] == looks[other][1] and np.linalg.norm(lab(looks[one][0]) - lab(looks[other][0])) < 20
    ]
    assert not alike


def test_the_page_draws_the_marks_that_rows_have():
    script = page.script()
    marks = script[script.index("const MARKS = {") :].split("};")[0]
    assert re.findall(r'^  "?(.)"?: "M', marks, re.MULTILINE) == list(MARKERS)


def test_shades_of_fields_grow_darker_step_by_step():
    """So that a print in black and white has the same order."""
    lightness = [lab(to_hex(SHADES(i / 10)))[0] for i in range(11)]
    assert all(a - b > 3 for a, b in pairwise(lightness))


def test_lines_and_kinds_have_marks_of_their_own():
    assert len(set(MARKERS)) == len(MARKERS) >= MOST_LINES
    assert len({mark for _, _, _, mark in KINDS}) == len(KINDS)
    assert len({mark for mark, _ in MARKS.values()}) == len(MARKS)
