"""Words that the context has shown are apart from the others, and together they are the whole text."""

import numpy as np
import pytest
import torch

from subquad.suite.contracts import IGNORE
from subquad.tasks.language import TextFile
from subquad.tasks.text_recall import TextRecall, repeated

SENTENCE = b"Mister Brandt laughs. Mister Brandt sees Mister Brandt, and so on. "


def marked(text, length, max_count=30):
    marks = repeated(text, length, max_count)
    return "".join(chr(byte) if mark else "_" for byte, mark in zip(text, marks, strict=True))


def test_the_second_word_of_a_pair_counts_from_its_second_time_on():
    assert marked(
        SENTENCE, 100
    ) == "____________________________" + "_Brandt_____" + "________Brandt____________ ".replace(" ", "_")


def test_a_pair_that_was_in_an_earlier_row_does_not_count():
    assert "Brandt" not in marked(SENTENCE, 24)[24:40]
    # the word is cut where its row ends: byte 40 is the last that a row of 40 bytes predicts
    assert marked(SENTENCE, 40).count("Brandt") == 1


def test_frequent_pairs_do_not_count():
    assert "Brandt" not in marked(SENTENCE, 100, max_count=2)
    assert "Brandt" in marked(SENTENCE, 100, max_count=3)


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / "cache"))
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_bytes(SENTENCE * 9)
    return TextRecall(data=tmp_path, length=64, test_lengths=(128,))


def test_slices_are_disjoint_and_together_the_whole_text(task):
    recall, other, longer = task.segments("test", 0)
    assert [segment.slice for segment in (recall, other, longer)] == ["recall", "other", "length=128"]
    (whole,) = TextFile(data=task.data, length=64).segments("test", 0)
    assert torch.equal(recall.inputs, whole.inputs)
    labelled = [segment.targets != IGNORE for segment in (recall, other)]
    assert labelled[0].any()
    assert not (labelled[0] & labelled[1]).any()
    assert torch.equal(torch.where(labelled[0], recall.targets, other.targets), whole.targets)
    text = np.frombuffer(SENTENCE * 9, dtype=np.uint8)
    assert longer.inputs.shape[1] == 128
    assert (longer.targets[longer.targets != IGNORE].numpy() == text[1:]).all()


def test_training_rows_are_those_of_the_plain_text(task):
    for split in ("train", "valid"):
        (mine,), (plain,) = task.segments(split, 0), TextFile(data=task.data, length=64).segments(split, 0)
        assert torch.equal(mine.inputs, plain.inputs)
        assert torch.equal(mine.targets, plain.targets)
        assert mine.slice == ""


def test_models_are_built_for_the_longest_row_and_bytes_alone(task):
    assert task.spec.max_length == 128
    with pytest.raises(ValueError, match="words are found in bytes"):
        _ = TextRecall(data=task.data, vocabulary="bpe", vocab_size=300).spec
    with pytest.raises(ValueError, match="test_lengths has 64"):
        _ = TextRecall(data=task.data, length=64, test_lengths=(64,)).spec
