"""LRA ListOps: the language, its distribution compared with rows of LRA's own generator, and files of the release."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from subquad.tasks.data.faults import DataError
from subquad.tasks.lra import expressions
from subquad.tasks.lra.expressions import CHUNK, CLOSE, DIGIT, END, OPERATOR, PAD, TOKENS, Language, draw, evaluate
from subquad.tasks.lra.listops import LRAListOps

SMALL = {"max_depth": 4, "min_length": 5, "max_length": 60, "length": 64}
FEW = {"num_train": 300, "num_valid": 40, "num_test": 50}


def numbers(expression):
    return np.array([TOKENS.index(word) for word in expression.split()])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[SM 8 9 [MED 1 2 ] ]", 8),
        ("[MED 3 4 ]", 3),
        ("[MED 9 1 5 ]", 5),
        ("[MED 0 9 8 1 ]", 4),
        ("[MIN [SM 9 9 9 ] 8 ]", 7),
    ],
)
def test_expressions_have_the_values_of_the_language(expression, value):
    assert evaluate(numbers(expression)) == value


def depth_and_args(tokens):
    """The greatest depth of an expression, and the number of arguments of each of its operators."""
    deepest, open_lists, args = 0, [], []
    for token in tokens:
        if open_lists and token != CLOSE:
            open_lists[-1] += 1
        if OPERATOR <= token < CLOSE:
            open_lists.append(0)
        deepest = max(deepest, len(open_lists) + (token < OPERATOR))
        if token == CLOSE:
            args.append(open_lists.pop())
    assert not open_lists
    return deepest, args


def test_generated_expressions_are_of_the_language_and_right():
    tokens, lengths, values = draw(0, 0, Language())
    assert len(tokens) > 400
    assert lengths.min() > 500
    assert lengths.max() < 2000
    for row, length, value in zip(tokens[:150], lengths[:150], values[:150], strict=True):
        assert (row[:length] >= DIGIT).all()
        assert (row[length:] == PAD).all()
        assert evaluate(row[:length]) == value
        deepest, args = depth_and_args(row[:length])
        assert deepest <= 10
        assert min(args) >= 2
        assert max(args) <= 10


def test_a_chunk_is_pinned():
    # a change here changes the data: raise `reader` and the task's version, and say so in CHANGELOG.md
    digest = hashlib.sha256()
    for array in draw(0, 3, Language()):
        digest.update(np.ascontiguousarray(array).astype(np.int64).tobytes())
    assert digest.hexdigest()[:16] == "8616a0e7d640f659"


def test_any_number_of_workers_makes_the_same_bytes():
    task = LRAListOps(**SMALL, **FEW)
    alone, together = task.generate(1), task.generate(2)
    for name, array in alone.items():
        assert array.dtype == together[name].dtype
        assert (array == together[name]).all()


def test_splits_have_their_sizes_and_share_nothing():
    task = LRAListOps(**SMALL, **FEW)
    rows = {split: next(iter(task.segments(split, 0))) for split in ("train", "valid", "test")}
    assert [len(segment) for segment in rows.values()] == [300, 40, 50]
    everything = [row.numpy().tobytes() for segment in rows.values() for row in segment.inputs]
    assert len(set(everything)) == 390
    for segment in rows.values():
        assert segment.inputs.dtype == torch.uint8
        for row, end, target in zip(segment.inputs, segment.positions[:, 0], segment.targets, strict=True):
            assert row[end] == END
            assert (row[end + 1 :] == PAD).all()
            assert evaluate(row[:end].numpy()) == target


def test_the_seed_of_the_data_changes_them_and_that_of_a_run_does_not():
    task, other = LRAListOps(**SMALL, **FEW), LRAListOps(**SMALL, **FEW, data_seed=1)
    first = next(iter(task.segments("test", 0))).inputs
    assert torch.equal(first, next(iter(task.segments("test", 5))).inputs)
    assert not torch.equal(first, next(iter(other.segments("test", 0))).inputs)
    assert task.fingerprint() == "generated"


@pytest.mark.parametrize(
    ("changes", "stand_in"),
    [
        ({}, ""),
        ({"length": 4000}, ""),
        ({"num_train": 2000}, "6000 expressions; the release has 100000"),
        ({"max_depth": 9}, "expressions generated here, of other depths, arguments or lengths than the release's"),
        ({"length": 512}, "expressions generated here, of other depths, arguments or lengths than the release's"),
    ],
)
def test_generated_rows_stand_in_only_where_they_are_not_drawn_as_the_release(changes, stand_in):
    assert LRAListOps(**changes).stand_in == stand_in


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match=r"no length lies between min_length=50 and max_length=51"):
        LRAListOps(min_length=50, max_length=51)
    with pytest.raises(ValueError, match=r"none has between 400 and 500 tokens"):
        LRAListOps(max_depth=2, min_length=400, max_length=500, **FEW).generate(1)


def table(shared, name):
    frame = pd.read_csv(shared(f"listops/{name}.tsv.xz"), sep="\t")
    return frame["Source"].str.replace("[()]", "", regex=True).str.split(), frame["Target"].to_numpy()


def properties(tokens, value):
    """Properties of one expression that do not depend on each other's definition, each as a small whole number."""
    is_operator = (tokens >= OPERATOR) & (tokens < CLOSE)
    is_node = tokens != CLOSE
    open_lists = np.cumsum(is_operator.astype(int) - (tokens == CLOSE))
    depth = open_lists + ~is_operator
    below_root = is_node & (depth == 2)
    return {
        "value": value,
        "operator of the root": tokens[0] - OPERATOR,
        "operator of the root and value": 10 * (tokens[0] - OPERATOR) + value,
        "hundreds of tokens": (len(tokens) - 500) // 100,
        "arguments of the root": below_root.sum(),
        "operators below the root": (below_root & is_operator).sum(),
        "greatest depth": depth[is_node].max(),
        "twenties of operators": is_operator.sum() // 20,
        "25s of nodes at depth 10": (is_node & (depth == 10)).sum() // 25,
        "tens of medians": (tokens == OPERATOR + 2).sum() // 10,
        "tens of zeros": (tokens == DIGIT).sum() // 10,
    }


def count_properties(expressions):
    """Counts the expressions (tokens, value) with each property: a column `count` by property and number."""
    rows = pd.DataFrame([properties(np.asarray(tokens, dtype=int), int(value)) for tokens, value in expressions])
    return rows.melt(var_name="property", value_name="number").value_counts(["property", "number"]).sort_index()


def unlike(theirs, ours):
    """The properties whose distribution differs between two counts, by Pearson's chi-squared test at 0.0001.

    Numbers that fewer than 20 expressions have are counted together.
    """
    # its import takes as long as that of the whole file of tests
    from scipy.stats import chi2_contingency

    found = []
    for name in theirs.index.unique("property"):
        counts = pd.DataFrame({"theirs": theirs[name], "ours": ours[name]}).fillna(0)
        rare = counts.sum(axis=1) < 20
        table = np.vstack([counts[~rare].to_numpy(), counts[rare].sum().to_numpy()])
        if len(table := table[table.sum(axis=1) > 0]) > 1 and chi2_contingency(table).pvalue < 1e-4:
            found.append(name)
    return found


ORACLE = Path(__file__).with_name("listops_oracle.csv")
"""The properties of 3,000 rows that LRA's own generator made (commit cd31e5c6 of google-research/long-range-arena)."""


@pytest.mark.parametrize(
    ("language", "rate", "differs"),
    [
        (Language(), 0.25, False),
        pytest.param(Language(), 0.24, True, marks=pytest.mark.slow),
        pytest.param(Language(max_args=9), 0.25, True, marks=pytest.mark.slow),
        pytest.param(Language(max_depth=9), 0.25, True, marks=pytest.mark.slow),
        pytest.param(Language(min_length=480), 0.25, True, marks=pytest.mark.slow),
    ],
)
def test_only_the_language_of_the_release_is_distributed_as_its_rows(monkeypatch, language, rate, differs):
    monkeypatch.setattr(expressions, "OPERATOR_RATE", rate)
    ours = count_properties(
        (row[:length], value)
        for index in range(8)
        for row, length, value in zip(*draw(1, index, language), strict=True)
    )
    theirs = pd.read_csv(ORACLE).set_index(["property", "number"])["count"]
    assert bool(found := unlike(theirs, ours)) == differs, found


@pytest.mark.slow
def test_the_table_of_lras_rows_is_that_of_the_rows(shared):
    numbers = {word: number for number, word in enumerate(TOKENS)}
    rows = []
    for name in ("basic_train", "basic_val", "basic_test"):
        words, targets = table(shared, name)
        rows += [([numbers[word] for word in row], target) for row, target in zip(words, targets, strict=True)]
    theirs = pd.read_csv(ORACLE).set_index(["property", "number"])["count"]
    assert count_properties(rows).to_dict() == theirs.to_dict()


def test_the_releases_files_are_read(shared, tmp_path):
    for name in ("basic_train", "basic_val", "basic_test"):
        (tmp_path / f"{name}.tsv.xz").symlink_to(shared(f"listops/{name}.tsv.xz"))
    task = LRAListOps(rows="files", data=tmp_path)
    assert task.stand_in == "3000 expressions; the release has 100000"
    assert len(task.fingerprint()) == 64
    for split, count in (("train", 2000), ("valid", 500), ("test", 500)):
        (segment,) = task.segments(split, 0)
        assert segment.inputs.shape == (count, 2000)
        for row in range(0, count, 50):
            end = int(segment.positions[row, 0])
            assert evaluate(segment.inputs[row, :end].numpy()) == segment.targets[row]


def write(folder, text, names=("basic_train", "basic_val", "basic_test")):
    for name in names:
        (folder / f"{name}.tsv").write_text(text)


def test_a_row_is_tokenized_without_parentheses(tmp_path):
    write(tmp_path, "Source\tTarget\r\n( ( ( [MAX 2 ) 9 ) ] )\t9\r\n")
    task = LRAListOps(rows="files", data=tmp_path, length=8)
    (segment,) = task.segments("valid", 0)
    assert segment.inputs[0].tolist() == [*numbers("[MAX 2 9 ]").tolist(), END, PAD, PAD, PAD]
    assert segment.targets.tolist() == [9]
    (segment,) = LRAListOps(rows="files", data=tmp_path, length=8, split_policy="paper").segments("valid", 0)
    assert segment.targets.tolist() == [9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Source\tTarget\n[MAX 2 9 ]\tnine\n", "not a table of Source and Target"),
        ("Source\tTarget\n[MAX 2 9 ]\t11\n", "a target is no digit"),
        ("Source\tTarget\n[MAX 2 x ]\t2\n", r"line 2 holds \['x'\]"),
        ("Text\tClass\n[MAX 2 9 ]\t9\n", "not a table of Source and Target"),
        ("", "not a table of Source and Target"),
    ],
)
def test_bad_files_are_errors_that_name_them(tmp_path, text, message):
    write(tmp_path, text)
    with pytest.raises(DataError, match=r"basic_train.tsv: .*" + message + r".*fetch it again"):
        next(iter(LRAListOps(rows="files", data=tmp_path).segments("train", 0)))


def test_missing_files_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"data prepare lra-listops --set rows=files`"):
        LRAListOps(rows="files").fingerprint()
    with pytest.raises(DataError, match=r"does not hold basic_\{train,val,test\}.tsv"):
        LRAListOps(rows="files", data=tmp_path).fingerprint()
    write(tmp_path, "Source\tTarget\n[MAX 2 9 ]\t9\n", ("basic_train", "basic_test"))
    with pytest.raises(DataError, match=r"basic_val.tsv is not in"):
        LRAListOps(rows="files", data=tmp_path).fingerprint()


def test_the_oracle_agrees_with_text_evaluated_by_python():
    tokens, lengths, _ = draw(2, 0, Language(max_depth=3, min_length=5, max_length=80))
    python = {"[MIN": "min(", "[MAX": "max(", "[SM": "total(", "[MED": "median(", "]": ")"}
    functions = {"total": lambda *a: sum(a) % 10, "median": lambda *a: int(np.median(a)), "min": min, "max": max}
    for row, length in zip(tokens[:50], lengths[:50], strict=True):
        text = ",".join(python.get(TOKENS[token], TOKENS[token]) for token in row[:length])
        text = re.sub(r"\(,", "(", text).replace(",)", ")")
        assert eval(text, {"__builtins__": {}}, functions) == evaluate(row[:length])


def test_a_row_met_before_is_drawn_again():
    task = LRAListOps(max_depth=2, min_length=3, max_length=6, length=8, num_train=200, num_valid=20, num_test=20)
    rows = np.concatenate([task.generate(1)[f"{split}.inputs"] for split in ("train", "valid", "test")])
    assert len(np.unique(rows, axis=0)) == 240
    assert CHUNK < 240 * 20, "the language is small enough that draws repeat"
