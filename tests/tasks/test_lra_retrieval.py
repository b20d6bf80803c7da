"""LRA Retrieval: two texts per row, the five columns of the release, and faults that name file and line."""

import shutil

import pytest
import torch

from subquad.tasks.data.faults import DataError
from subquad.tasks.lra.retrieval import LRARetrieval
from subquad.tasks.lra.text import END, PAD

NAMES = ("train", "eval", "test")


def write(folder, lines, names=NAMES):
    for name in names:
        (folder / f"new_aan_pairs.{name}.tsv").write_text("".join(f"{line}\n" for line in lines))


LINES = ['1.0\tP1\tP2\tone "paper\tanother', "0.0\tP3\tP4\tcaf\u00e9\tthe fourth paper"]


def load(folder, split, **options):
    (segment,) = LRARetrieval(data=folder, **options).segments(split, 0)
    return segment


def test_two_texts_stand_side_by_side_with_their_ends(tmp_path):
    write(tmp_path, LINES)
    segment = load(tmp_path, "valid", length=12)
    assert segment.inputs.shape == (2, 24)
    assert segment.targets.tolist() == [1, 0]
    assert segment.positions.tolist() == [[10, 7], [5, 11]]
    first, second = segment.inputs[0, :12].tolist(), segment.inputs[0, 12:].tolist()
    assert bytes(first) == b'one "paper' + bytes([END, PAD])
    assert bytes(second) == b"another" + bytes([END, PAD, PAD, PAD, PAD])
    assert bytes(segment.inputs[1, 12:].tolist()) == b"the fourth " + bytes([END])
    spec = LRARetrieval(length=12).spec
    assert (spec.towers, spec.max_length, spec.num_classes, spec.readout) == (2, 12, 2, "sequence")


def test_both_policies_use_the_validation_split_of_the_release(tmp_path):
    write(tmp_path, LINES)
    write(tmp_path, LINES[:1], ["eval"])
    assert len(load(tmp_path, "valid")) == len(load(tmp_path, "valid", split_policy="paper")) == 1


def test_control_characters_become_spaces(tmp_path):
    write(tmp_path, ["1\tP1\tP2\ta\x00b\tc\x01d"])
    segment = load(tmp_path, "test", length=8)
    assert bytes(segment.inputs[0, :3].tolist()) == b"a b"
    assert bytes(segment.inputs[0, 8:11].tolist()) == b"c d"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES, "2.0\tP\tP\tx\ty"], "line 3 has the label '2.0'"),
        ([*LINES, "1.0\tP\tP\tx"], "cannot be read as five columns"),
        ([*LINES, "1.0\tP\tP\tx\ty\tz"], "cannot be read as five columns"),
        ([*LINES, "label\tP\tP\tx\ty"], "line 3 has the label 'label'"),
    ],
)
def test_a_bad_line_is_an_error_that_names_it(tmp_path, lines, message):
    write(tmp_path, lines)
    with pytest.raises(DataError, match=r"new_aan_pairs.train.tsv: .*" + message):
        load(tmp_path, "train")


def test_missing_and_empty_files_are_errors(tmp_path):
    with pytest.raises(DataError, match="data prepare lra-retrieval"):
        LRARetrieval().fingerprint()
    write(tmp_path, LINES, ["train", "test"])
    with pytest.raises(DataError, match=r"new_aan_pairs.eval.tsv is not in"):
        LRARetrieval(data=tmp_path).fingerprint()
    write(tmp_path, [], ["eval"])
    with pytest.raises(DataError, match=r"eval.tsv: cannot be read"):
        load(tmp_path, "valid")


def test_real_pairs_are_read_compressed(shared, tmp_path):
    for name in NAMES:
        shutil.copy(shared(f"aan/lra_format.{name}.tsv.gz"), tmp_path / f"new_aan_pairs.{name}.tsv.gz")
    task = LRARetrieval(data=tmp_path)
    assert task.counts() == {"train": 800, "valid": 200, "test": 200}
    assert task.stand_in == "1200 pairs; the release has 182613"
    segment = load(tmp_path, "test")
    assert segment.inputs.shape == (200, 8000)
    assert segment.inputs.dtype == torch.uint8
    assert 80 < segment.targets.sum() < 120
    assert segment.positions.float().mean() > 3000
    assert (segment.inputs.gather(1, segment.positions[:, :1].long()) == END).all()
    assert (segment.inputs[:, 4000:].gather(1, segment.positions[:, 1:].long()) == END).all()
