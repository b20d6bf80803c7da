"""Image folders: pictures and classes as `datasets` reads them, splits, and faults that name the file."""

import numpy as np
import pytest
import torch
from PIL import Image

from subquad.suite.training.trainer import Trainer
from subquad.tasks.data.faults import DataError, NoDataError
from subquad.tasks.image_folder import ImageFolder
from tests.runs import one_run

pytest.importorskip("datasets")

CLASSES = ("ant", "bee", "cow")


@pytest.fixture
def folder(tmp_path):
    """Ten training and two test pictures of every class, each with its own grey level, in a folder with an odd name."""
    base = tmp_path / "my [odd] *pictures*"
    level = 0
    for split, count in (("train", 10), ("test", 2)):
        for name in CLASSES:
            (base / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (level,) * 3).save(base / split / name / f"{i:02}.png")
                level += 1
    return base


def load(folder, split, **options):
    (segment,) = ImageFolder(data=folder, size=8, pixels="tokens", **options).segments(split, 0)
    return segment


def test_pictures_come_in_the_order_of_their_names_with_the_class_of_their_folder(folder):
    segment = load(folder, "test")
    assert segment.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert segment.inputs[:, 0].tolist() == list(range(30, 36))
    assert (segment.inputs == segment.inputs[:, :1]).all()
    spec = ImageFolder(data=folder, size=8).spec
    assert (spec.input, spec.num_classes, spec.max_length, spec.channels) == ("signal", 3, 64, 1)
    assert ImageFolder(data=folder, size=8).stand_in == "36 pictures of the user's own"


def test_a_tenth_of_train_is_held_out_unless_there_is_a_validation_folder(folder):
    train, valid = (set(load(folder, split).inputs[:, 0].tolist()) for split in ("train", "valid"))
    assert len(valid) == 3
    assert train | valid == set(range(30))
    assert not train & valid
    (folder / "test").rename(folder / "validation")
    (folder / "test" / "bee").mkdir(parents=True)
    Image.new("L", (8, 8), 99).save(folder / "test" / "bee" / "0.png")
    assert load(folder, "valid").inputs[:, 0].tolist() == list(range(30, 36))
    assert load(folder, "train").inputs[:, 0].tolist() == list(range(30))
    # if a split lacks some classes, the indices of the others do not change
    assert load(folder, "test").targets.tolist() == [1]


def test_a_validation_folder_may_have_its_shorter_name(folder):
    (folder / "val" / "bee").mkdir(parents=True)
    Image.new("L", (8, 8), 99).save(folder / "val" / "bee" / "0.png")
    assert load(folder, "valid").inputs[:, 0].tolist() == [99]
    assert len(load(folder, "train").inputs) == 30


def test_reading_order_is_row_after_row(folder):
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(pixels).save(folder / "test" / "ant" / "00.png")
    assert load(folder, "test").inputs[0].tolist() == list(range(64))


def test_other_sizes_are_refused_unless_resized(folder):
    Image.new("L", (9, 8), 7).save(folder / "train" / "bee" / "03.png")
    with pytest.raises(DataError, match=r"train.bee.03.png: has 9 x 8 pixels, needs 8 x 8; set size, or resize=true"):
        ImageFolder(data=folder, size=8).fingerprint()
    assert (load(folder, "train", resize=True).inputs == 7).all(dim=1).sum() == 2


def test_a_name_that_the_reader_takes_for_an_address_is_refused(folder):
    (folder / "train" / "bee" / "03.png").rename(folder / "train" / "bee" / "a::b.png")
    with pytest.raises(DataError, match=r"a::b.png: a name with '::'.*rename it"):
        ImageFolder(data=folder, size=8).fingerprint()


def test_a_broken_picture_is_named_before_any_run(folder):
    path = folder / "train" / "cow" / "04.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"train.cow.04.png: not a readable picture"):
        ImageFolder(data=folder, size=8).fingerprint()


def test_missing_pictures_say_what_to_do(folder, tmp_path):
    with pytest.raises(NoDataError, match="give --data DIR, a folder of pictures"):
        ImageFolder().fingerprint()
    (folder / "test").rename(folder / "tests")
    with pytest.raises(DataError, match=r"no pictures in .*/test/<class>/"):
        ImageFolder(data=folder).fingerprint()
    for name in CLASSES[1:]:
        for split in ("train", "tests"):
            (folder / split / name).rename(folder / f"{split}-{name}")
    (folder / "tests").rename(folder / "test")
    with pytest.raises(DataError, match="has one class only"):
        ImageFolder(data=folder).fingerprint()


def test_a_class_without_training_pictures_is_named(folder):
    (folder / "test" / "bee").rename(folder / "test" / "Bee")
    with pytest.raises(DataError, match=r"test/Bee: no training picture has this class.*they have ant, bee, cow\)"):
        ImageFolder(data=folder, size=8).fingerprint()


def test_a_run_trains_on_a_folder_and_is_known_by_its_content(folder):
    run = one_run(
        {"name": "image-folder", "data": str(folder), "size": 8},
        {"name": "linear-attention", "d_model": 16, "num_layers": 1, "num_heads": 1},
        {"steps": 3, "batch_size": 8, "lr": 0.01},
    )
    rows = Trainer(run, torch.device("cpu"))().rows
    assert {"valid", "test"} <= {row["split"] for row in rows if row["metric"] == "accuracy"}
    assert run.resolved["data"] == ImageFolder(data=folder, size=8).fingerprint()


def test_sixteen_bits_keep_their_levels(folder):
    levels = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    path = folder / "test" / "ant" / "00.png"
    Image.fromarray(levels).save(path)
    assert Image.open(path).mode.startswith("I")
    wanted = np.round(levels.reshape(-1) / 257).astype(int)
    assert load(folder, "test").inputs[0].tolist() == wanted.tolist()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "LA", "RGBA"])
def test_every_mode_of_a_png_has_the_grey_of_its_colour(folder, mode):
    Image.new("L", (8, 8), 255).convert(mode).save(folder / "test" / "ant" / "00.png")
    assert set(load(folder, "test").inputs[0].tolist()) == {255}


def test_transparent_pixels_are_refused_because_they_have_no_colour(folder):
    Image.new("RGBA", (8, 8), (255, 255, 255, 0)).save(folder / "test" / "ant" / "00.png")
    with pytest.raises(DataError, match=r"00\.png: .*transparent pixels, which have no colour; flatten it"):
        load(folder, "test")


def test_hidden_folders_and_files_are_no_data(folder):
    before = load(folder, "train")
    for hidden in (".ipynb_checkpoints", "__MACOSX"):
        for split in ("train", "test"):
            (folder / split / hidden).mkdir()
            Image.new("L", (8, 8), 7).save(folder / split / hidden / "0.png")
    (folder / "train" / "bee" / "._00.png").write_bytes(b"a resource fork of macOS")
    after = load(folder, "train")
    assert ImageFolder(data=folder, size=8).spec.num_classes == 3
    assert after.targets.tolist() == before.targets.tolist()
    assert after.inputs.tolist() == before.inputs.tolist()
