"""Pathfinder and Path-X: the layout of the release, the splits of S4 and DSS, and generated pictures."""

import hashlib
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from subquad.tasks.data.faults import DataError
from subquad.tasks.lra import contours
from subquad.tasks.lra.contours import STYLES, draw
from subquad.tasks.lra.image import read_pictures
from subquad.tasks.lra.pathfinder import LRAPathfinder, LRAPathX
from tests.drawn import only


@pytest.fixture
def folder(tmp_path):
    """Twenty pictures in two folders; picture i has the grey level i and is joined if i is odd."""
    level = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (level / "metadata").mkdir(parents=True)
    for part, numbers in (("10", range(10, 20)), ("2", range(10))):
        (level / "imgs" / part).mkdir(parents=True)
        lines = []
        for i in numbers:
            Image.new("L", (32, 32), i).save(level / "imgs" / part / f"sample_{i}.png")
            lines.append(f"imgs/{part} sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1\n")
        (level / "metadata" / f"{part}.npy").write_text("".join(lines))
    return tmp_path


def test_the_release_is_split_as_in_the_source(folder):
    found = {split: only(LRAPathfinder(data=folder, pixels="tokens"), split) for split in ("train", "valid", "test")}
    # metadata are read in the order of their numbers, 2 before 10, so the pictures come as 0, 1, 2, ...
    parts = torch.utils.data.random_split(range(20), [16, 2, 2], generator=torch.Generator().manual_seed(42))
    for segment, part in zip(found.values(), parts, strict=True):
        assert segment.inputs[:, 0].tolist() == list(part)
        assert segment.targets.tolist() == [i % 2 for i in part]


def test_pixels_lie_in_the_named_range(folder):
    raw = only(LRAPathfinder(data=folder, pixels="tokens"), "train").inputs.float()
    centered, unit = (only(LRAPathfinder(data=folder, pixels=p), "train").inputs for p in ("centered", "unit"))
    assert centered.shape == (16, 1024, 1)
    assert torch.allclose(unit[..., 0], raw / 255)
    assert torch.allclose(centered, 2 * unit - 1)


@pytest.mark.parametrize("below", ["", "pathfinder32"])
def test_the_folder_may_be_the_one_above(folder, below):
    assert LRAPathfinder(data=folder / below).counts() == {"train": 16, "valid": 2, "test": 2}


def test_pictures_of_the_other_size_are_not_taken(folder):
    with pytest.raises(DataError, match=r"does not hold pathfinder128/curv_contour_length_14"):
        LRAPathX(data=folder).fingerprint()


def test_few_pictures_and_generated_ones_are_stand_in_data(folder):
    assert LRAPathfinder(data=folder).stand_in == "20 pictures; the release has 200000"
    assert LRAPathfinder(pictures="generated").stand_in == "200000 pictures of our own generator"


def nine(metadata):
    """Leaves nine of the pictures, of which a tenth is none."""
    (metadata / "10.npy").unlink()
    lines = (metadata / "2.npy").read_text().splitlines()
    (metadata / "2.npy").write_text("\n".join(lines[:9]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda level: (level / "imgs" / "2" / "sample_3.png").write_bytes(b""),
            r"sample_3.png: not a readable picture",
        ),
        (lambda level: (level / "imgs" / "2" / "sample_3.png").unlink(), r"sample_3.png: cannot be read"),
        (lambda level: (level / "metadata" / "2.npy").write_text("imgs/2 sample_0.png 0\n"), r"2.npy: line 1 names no"),
        (lambda level: (level / "metadata" / "2.npy").write_bytes(b"imgs/2 \0 0 1\n"), r"2.npy: line 1 names no"),
        (lambda level: (level / "metadata" / "2.npy").write_bytes(b"imgs/2 \xff 0 1\n"), r"cannot be read"),
        (lambda level: [path.unlink() for path in (level / "metadata").iterdir()], r"no metadata in"),
        (lambda level: nine(level / "metadata"), r"leaves no row for the valid split; add data"),
    ],
)
def test_damage_is_named(folder, damage, message):
    damage(folder / "pathfinder32" / "curv_contour_length_14")
    with pytest.raises(DataError, match=message):
        LRAPathfinder(data=folder).fingerprint()


def test_missing_data_say_what_to_do():
    with pytest.raises(DataError, match="data prepare lra-pathx"):
        LRAPathX().fingerprint()


@pytest.mark.slow
def test_any_number_of_workers_draws_the_same_bytes():
    task = LRAPathfinder(pictures="generated", num_pictures=100)
    alone, together = task.generate(1), task.generate(2)
    assert (alone["inputs"] == together["inputs"]).all()
    assert (alone["targets"] == together["targets"]).all()
    more = LRAPathfinder(pictures="generated", num_pictures=130).generate(1)
    assert (more["inputs"][:100] == alone["inputs"]).all()
    other = LRAPathfinder(pictures="generated", num_pictures=100, data_seed=1).generate(1)
    assert (other["inputs"] != alone["inputs"]).any(axis=1).mean() > 0.99


# a change here changes the data: raise `reader` and the version of the tasks, and say so in CHANGELOG.md
PINNED = {(32, 1): "742e19c2b2c26fce", (128, 2): "e72e64646eb72984"}


@pytest.mark.parametrize(("size", "margin"), [(32, 1), pytest.param(128, 2, marks=pytest.mark.slow)])
def test_pictures_are_pinned(size, margin):
    pictures, labels = draw(0, size, margin, 0)
    assert pictures.shape == (len(labels), size**2)
    assert hashlib.sha256(pictures.tobytes() + labels.tobytes()).hexdigest()[:16] == PINNED[size, margin]


def test_generated_pictures_fill_the_splits():
    task = LRAPathfinder(pictures="generated", num_pictures=120)
    assert task.counts() == {"train": 96, "valid": 12, "test": 12}
    assert task.fingerprint() == "generated"
    train = only(task, "train").inputs
    assert len({row.numpy().tobytes() for row in train}) == 96


@pytest.fixture(scope="module")
def ours():
    return tuple(np.concatenate(parts) for parts in zip(*(draw(3, 32, 1, index) for index in range(12)), strict=True))


def dots(pictures):
    """The two brightest places of 2 x 2 pixels of every 32 x 32 picture: [R, 2, 2]."""
    wide = pictures.reshape(-1, 32, 32).astype(int)
    block = np.minimum.reduce([wide[:, :-1, :-1], wide[:, 1:, :-1], wide[:, :-1, 1:], wide[:, 1:, 1:]])
    found = np.zeros((len(block), 2, 2), dtype=int)
    for row, field in enumerate(block):
        for k in range(2):
            y, x = np.unravel_index(field.argmax(), field.shape)
            found[row, k] = y, x
            field[max(0, y - 3) : y + 4, max(0, x - 3) : x + 4] = 0
    return found


@pytest.mark.slow
def test_dots_are_connected_in_a_joined_picture_and_not_always_in_others():
    ndimage = pytest.importorskip("scipy.ndimage")
    pictures, labels = (np.concatenate(p) for p in zip(*(draw(3, 128, 2, index) for index in range(3)), strict=True))
    # the dashes of a contour are four pixels apart, so thickening them by three pixels joins them
    y, x = np.mgrid[-3:4, -3:4]
    connected, known = [], []
    for picture, label in zip(pictures.reshape(-1, 128, 128), labels, strict=True):
        # only a dot is four pixels wide
        found, count = ndimage.label(ndimage.minimum_filter(picture, 4) > 200)
        if count == 2:
            at = np.round(ndimage.center_of_mass(found > 0, found, [1, 2])).astype(int)
            parts, _ = ndimage.label(ndimage.binary_dilation(picture > 100, x**2 + y**2 <= 9))
            connected.append(parts[tuple(at[0])] == parts[tuple(at[1])])
            known.append(label == 1)
    connected, known = np.array(connected), np.array(known)
    assert len(known) > 30
    assert connected[known].all()
    assert not connected[~known].all()


def test_labels_are_balanced_and_pictures_have_two_dots(ours):
    pictures, labels = ours
    assert 0.45 < labels.mean() < 0.55
    assert (pictures.max(axis=1) == 255).all()
    apart = np.abs(np.diff(dots(pictures), axis=1)).max(axis=(1, 2))
    assert (apart >= 3).mean() > 0.95


def statistics(pictures):
    """Statistics of every picture: its mean, and the shares of pixels above three levels of grey."""
    values = pictures.astype(float)
    return np.stack([values.mean(1), (values > 0).mean(1), (values > 100).mean(1), (values > 200).mean(1)], axis=1)


def original(shared, tmp_path, size):
    with tarfile.open(shared("pathfinder/pathfinder.tar.xz")) as tar:
        members = [member for member in tar.getmembers() if f"pathfinder{size}/" in member.name]
        tar.extractall(tmp_path, members=members, filter="data")
    return tmp_path


def test_the_original_pictures_are_read(shared, tmp_path):
    task = LRAPathX(data=original(shared, tmp_path, 128))
    assert task.counts() == {"train": 160, "valid": 20, "test": 20}
    segment = only(task, "train")
    assert segment.inputs.shape == (160, 16384, 1)
    assert segment.inputs.min() == -1
    assert segment.inputs.max() == 1
    assert 0.3 < segment.targets.float().mean() < 0.7


def test_our_pictures_are_distributed_as_the_originals(shared, tmp_path, ours):
    task = LRAPathfinder(data=original(shared, tmp_path, 32))
    theirs = task.arrays()["inputs"]
    assert len(theirs) == 2500
    ours = ours[0]
    expected, found = statistics(theirs), statistics(ours)
    # four standard errors for the means of 2,500 and about 550 pictures, and 15 % for their standard deviations
    error = np.sqrt(expected.var(0) / len(expected) + found.var(0) / len(found))
    assert (np.abs(found.mean(0) - expected.mean(0)) < 4 * error).all(), (found.mean(0), expected.mean(0), error)
    assert np.abs(found.std(0) / expected.std(0) - 1).max() < 0.15
    for profile in ((2, 0), (2, 1)):
        wide = [(pictures.reshape(-1, 32, 32) > 100).mean(axis=(0, profile[1] + 1)) for pictures in (theirs, ours)]
        assert np.corrcoef(*wide)[0, 1] > 0.95, "contours lie elsewhere"
    # contours start near the middle, so one of the dots is there
    near = [(np.abs(dots(pictures[:600]) - 14.5).max(axis=2).min(axis=1) <= 2.5).mean() for pictures in (theirs, ours)]
    assert near[1] == pytest.approx(near[0], abs=0.12)


def test_a_dash_reaches_as_far_as_it_says():
    for style in STYLES.values():
        for margin in style.margins:
            tables = contours._tables(style, margin)
            assert tables.dashes.shape[1:] == tables.masks.shape[1:]
            assert (tables.dashes.max(axis=(1, 2)) > 60).all()
            # the mask of a dash covers the dash
            assert (tables.masks[tables.dashes > 60] > 60).all()
            assert (tables.weights >= 0).all()
            assert (tables.weights.sum(axis=1) > 0).all()


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "x.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"x.png: not a readable picture"):
        read_pictures([tmp_path / "x.png"], 32)
