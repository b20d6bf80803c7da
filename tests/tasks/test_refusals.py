"""Options of tasks that cannot work are refused in one sentence: one table, to which a new refusal is a line."""

import pytest

from subquad.tasks import TASKS
from subquad.tasks.data.faults import DataError

REFUSED = {
    "associative-recall": [
        (r"vocab_size=5 leaves 1 keys", {"vocab_size": 5}),
        (r"length=21 does not hold whole pairs", {"length": 21}),
        (r"length=7 does not hold whole pairs", {"test_lengths": (20, 7)}),
    ],
    "brain-activity": [
        ("num_points=1; needs 2 or more", {"num_points": 1}),
        ("num_levels=1; needs 2 or more", {"num_levels": 1}),
    ],
    "compression": [
        ("needs >= 3", {"vocab_size": 2}),
        ("needs >= 2", {"length": 1}),
    ],
    "copying": [
        ("needs length >= 403, got 220", {"max_string": 200}),
        ("min_string=60 is above max_string=50", {"min_string": 60}),
        ("needs two letters", {"vocab_size": 1}),
    ],
    "fuzzy-in-context-recall": [
        ("has 2 key tokens and 3 value tokens, too few", {"vocab_size": 6}),
        ("needs >= 19", {"length": 18}),
    ],
    "in-context-recall": [
        ("does not hold whole pairs", {"length": 31}),
        ("leaves fewer than 4 keys and values; raise vocab_size to 20", {"num_noise": 16}),
        ("num_noise=0 and frac_noise=0.2; give both, or neither", {"frac_noise": 0.2}),
    ],
    "induction-heads": [
        (r"vocab_size=3 leaves 1 ordinary", {"vocab_size": 3}),
        (r"length=2 has no room", {"length": 2}),
    ],
    "induction-heads-extrapolation": [
        (r"vocab_size=2 leaves 1 ordinary", {"vocab_size": 2}),
        (r"length=3 has no room", {"test_lengths": (3,)}),
        (r"test_lengths is empty", {"test_lengths": ()}),
        (r"above max_test_tokens=1000", {"max_test_tokens": 1000}),
    ],
    "memorization": [
        ("length=3 is odd", {"length": 3}),
        ("needs >= 5", {"vocab_size": 4}),
    ],
    "modular-arithmetic": [
        (r"greater than or equal to 2", {"modulus": 1}),
        (r"length=2 has no room for an expression; needs >= 3", {"length": 2}),
        (r"length=4 has no room for an expression; needs >= 5", {"brackets": True, "length": 4}),
        (r"min_length=2 has no room for a digit", {"min_length": 2}),
        (r"min_length=41 is above length=40", {"min_length": 41}),
        (r"min_test_length=300 is above test_length=256", {"min_test_length": 300}),
    ],
    "mqar": [
        (
            r"mqar: num_kv_pairs=64 needs length >= 256 \(4 tokens a pair\), got 128; raise length or lower",
            {"length": 128, "num_kv_pairs": 64},
        ),
        (r"length=511 is odd", {"length": 511}),
        (r"num_kv_pairs=64 needs vocab_size >= 130 .* got 64", {"vocab_size": 64}),
        (r"length=64 has no meaning with protocol=based-fig2", {"protocol": "based-fig2", "length": 64}),
        (r"needs at least one shape", {"protocol": "based-fig2", "test": []}),
        (r"protocol=zoology-fig2 has one shape", {"train": [{"length": 64, "num_kv_pairs": 4, "num_examples": 10}]}),
        (r"needs num_test", {"num_test": None}),
        (r"zoology-fig2", {"protocol": "zoology"}),
        (r"power_a", {"power_a": 0}),
        (r"train_power_a", {"train_power_a": 0.1}),
    ],
    "needle": [
        ("raise num_names", {"num_distractors": 32}),
        ("needs >= 18", {"length": 17}),
    ],
    "seizures": [
        ("2.5 s; a rhythm needs four, raise length to 800", {"length": 500}),
    ],
    "selective-copying": [
        ("a context of 15 tokens", {"length": 32, "length_rule": "total", "marker": "before"}),
        (r"vocab_size=3 with marker=in-vocabulary leaves 1 data symbols; needs vocab_size >= 4", {"vocab_size": 3}),
        (r"needs vocab_size >= 3", {"vocab_size": 2, "marker": "none"}),
        (r"num_data=16 does not fit into a context of 8", {"length": 8}),
        (r"context of 8 tokens \(length=24, length_rule=total\)", {"length": 24, "length_rule": "total"}),
        (r"in-vocabulary", {"marker": "appended"}),
    ],
    "word-problem": [
        (r"group='D4' is none; write Zm, Sm or Am", {"group": "D4"}),
        (r"group=S7 has 5040 elements; choose one with 2 to 720", {"group": "S7"}),
        (r"group=A2 has 1 elements", {"group": "A2"}),
        (r"max_moved counts moved points", {"group": "Z3", "max_moved": 2}),
        (r"leaves 1 elements to draw", {"max_moved": 1}),
        (r"min_length has no meaning with labels=every", {"min_length": 8}),
        (r"min_length=200 is above length=128", {"labels": "end", "min_length": 200}),
        (r"min_test_length has no meaning with labels=every", {"min_test_length": 8}),
        (r"min_test_length=40 is above a test length of 32", {"labels": "end", "min_test_length": 40}),
        (r"repeats needs a label at every position", {"labels": "end", "repeats": True}),
        (r"at least 1 item", {"test_lengths": ()}),
    ],
}


@pytest.mark.parametrize(("name", "words", "options"), [(name, *row) for name, rows in REFUSED.items() for row in rows])
def test_what_cannot_work_is_refused(name, words, options):
    with pytest.raises(ValueError, match=words):
        TASKS.load(name)(**options)


EMPTY = [
    ("lra-listops", "basic_{}.tsv", ("train", "val", "test"), "Source\tTarget\n", "no row for the train split; add"),
    ("lra-retrieval", "new_aan_pairs.{}.tsv", ("train", "eval", "test"), "", "train.tsv: .*; fetch it again"),
]


@pytest.mark.parametrize(("name", "file", "parts", "text", "words"), EMPTY)
def test_tables_without_rows_are_refused_while_a_run_is_planned(tmp_path, name, file, parts, text, words):
    for part in parts:
        (tmp_path / file.format(part)).write_text(text)
    options = {"rows": "files"} if name == "lra-listops" else {}
    with pytest.raises(DataError, match=words):
        TASKS.load(name)(data=tmp_path, **options).fingerprint()
