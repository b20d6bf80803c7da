"""LRA Image: official pickles, folders of pictures, the grey of Pillow, and the split of S4 and DSS."""

import io
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from subquad.suite.identity import file_digest
from subquad.tasks.data import source
from subquad.tasks.data.faults import DataError
from subquad.tasks.lra.image import BATCHES, CLASSES, LRAImage, _Batch, _bytes_in, grey, read_pictures


@pytest.fixture
def official(tmp_path):
    """Six official batches of 20 pictures each."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in BATCHES:
        labels = (np.arange(20) % 10).tolist()
        batch = {b"data": rng.integers(0, 256, (20, 3072), dtype=np.uint8), b"labels": labels, b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return tmp_path


@pytest.fixture
def pictures(tmp_path):
    """Four pictures of every class in either split; those of class c have the grey level 20 c."""
    for split in ("train", "test"):
        for number, name in enumerate(CLASSES):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (32, 32), (20 * number,) * 3).save(tmp_path / split / name / f"{i:04}.png")
    return tmp_path


def load(folder, split, **options):
    (segment,) = LRAImage(data=folder, **options).segments(split, 0)
    return segment


def test_grey_is_that_of_pillow():
    colours = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert (grey(colours) == np.asarray(Image.fromarray(colours).convert("L"))).all()


def test_official_batches_give_pixels_in_reading_order(official):
    batch = pickle.loads((official / "cifar-10-batches-py" / "test_batch").read_bytes(), encoding="bytes")
    segment = load(official, "test", pixels="tokens")
    assert segment.inputs.dtype == torch.uint8
    assert segment.targets.tolist() == batch[b"labels"]
    for row in range(20):
        picture = batch[b"data"][row].reshape(3, 32, 32).transpose(1, 2, 0)
        expected = np.asarray(Image.fromarray(picture).convert("L")).reshape(-1)
        assert (segment.inputs[row].numpy() == expected).all()


def test_the_validation_split_is_that_of_random_split_with_seed_42(official):
    train, valid = load(official, "train", pixels="tokens"), load(official, "valid", pixels="tokens")
    assert (len(train), len(valid)) == (90, 10)
    parts = torch.utils.data.random_split(range(100), [90, 10], generator=torch.Generator().manual_seed(42))
    everything = LRAImage(data=official).arrays()["train.inputs"]
    assert (train.inputs.numpy() == everything[list(parts[0])]).all()
    assert (valid.inputs.numpy() == everything[list(parts[1])]).all()
    assert torch.equal(load(official, "valid", pixels="tokens", split_policy="paper").inputs, valid.inputs)


@pytest.mark.parametrize(
    ("pixels", "low", "high"), [("unit", 0, 1), ("centered", -1, 1), ("standard", -122.6 / 61, (255 - 122.6) / 61)]
)
def test_pixel_ranges_are_named_options(official, pixels, low, high):
    raw = load(official, "test", pixels="tokens").inputs.double()
    signal = load(official, "test", pixels=pixels)
    assert signal.inputs.shape == (20, 1024, 1)
    assert signal.inputs.dtype == torch.float32
    assert torch.allclose(signal.inputs[..., 0].double(), low + raw / 255 * (high - low), atol=1e-5)
    spec = LRAImage(pixels=pixels).spec
    assert (spec.input, spec.channels, spec.num_classes, spec.max_length) == ("signal", 1, 10, 1024)
    assert LRAImage(pixels="tokens").spec.vocab_size == 256


def test_a_batch_that_is_not_the_published_one_is_stand_in_data(official):
    assert LRAImage(data=official).stand_in == "data_batch_1 is not the official file"


class Evil:
    def __reduce__(self):
        return os.system, ("touch escaped",)


def test_a_pickle_that_would_run_code_is_refused(official, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (official / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps({b"data": Evil(), b"labels": []}))
    with pytest.raises(DataError, match=r"data_batch_2: not an official CIFAR-10 batch .*asks for posix.system"):
        load(official, "train")
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-300],
        lambda content: b"",
        lambda content: b"no pickle",
        lambda content: pickle.dumps({b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [0]}),
        lambda content: pickle.dumps({b"data": np.zeros((1, 3072), dtype=np.uint8), b"labels": [10]}),
    ],
)
def test_a_damaged_batch_is_named(official, damage):
    path = official / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"data_batch_3: not an official CIFAR-10 batch .*fetch it again"):
        load(official, "train")


def test_a_wrong_byte_in_the_description_of_an_array_changes_no_picture():
    pictures = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    content = pickle.dumps({b"data": pictures}, protocol=2)
    for place in range(content.index(b"numpy"), content.index(bytes(range(32)))):
        # the codes of an object, and of a place in the unpickler's memory that is far away, crash NumPy and pickle
        for byte in (0, 1, 4, ord("O"), ord("r"), 255, content[place] ^ 1):
            damaged = io.BytesIO(content[:place] + bytes([byte]) + content[place + 1 :])
            try:
                found = _bytes_in(_Batch(damaged, encoding="bytes").load()[b"data"])
            except Exception:
                continue
            assert found.tobytes() == pictures.tobytes()


def test_tables_as_the_hubs_give_the_arrays_of_the_batches_they_were_made_of(official, tmp_path_factory, use_manifest):
    datasets = pytest.importorskip("datasets")
    hub = tmp_path_factory.mktemp("cifar10") / "plain_text"
    hub.mkdir()
    names = {"train": list(BATCHES)[:5], "test": ["test_batch"]}
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    for split, parts in names.items():
        batches = [
            pickle.loads((official / "cifar-10-batches-py" / name).read_bytes(), encoding="bytes") for name in parts
        ]
        colours = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = [label for batch in batches for label in batch[b"labels"]]
        rows = {"img": [Image.fromarray(picture) for picture in colours], "label": labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(hub / f"{split}-00000-of-00001.parquet")
    one, two = LRAImage(data=official).arrays(), LRAImage(data=hub.parent).arrays()
    assert set(one) == set(two)
    assert all((one[name] == two[name]).all() for name in one)
    assert LRAImage(data=hub).stand_in.endswith("other than the hub's cifar10")
    known = [file.model_copy(update={"sha256": file_digest(hub / file.filename)}) for file in source("cifar10").hub]
    edition = source("cifar10").model_copy(update={"hub": tuple(known)})
    use_manifest({"cifar10": edition})
    assert LRAImage(data=hub).stand_in == ""


def test_pictures_of_16_bits_in_tables_are_scaled_and_transparent_ones_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    deep = Image.fromarray(np.full((32, 32), 257 * 100, dtype=np.uint16))
    for split in ("train", "test"):
        rows = {"img": [deep] * 10, "label": [0] * 10}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{split}.parquet")
    assert (LRAImage(data=tmp_path).arrays()["test.inputs"] == 100).all()
    rows = {"img": [Image.new("RGBA", (32, 32))], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(DataError, match=r"test\.parquet: the picture of row 1 cannot be read \(it has transparent"):
        LRAImage(data=tmp_path).arrays()


def test_a_missing_batch_is_named(official):
    (official / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(DataError, match="data_batch_4 is not in"):
        LRAImage(data=official).fingerprint()


def test_pictures_in_folders_are_read_and_marked(pictures):
    segment = load(pictures, "test", pixels="tokens")
    assert len(segment) == 40
    for row, target in zip(segment.inputs, segment.targets.tolist(), strict=True):
        assert (row == 20 * target).all()
    assert LRAImage(data=pictures).stand_in == "80 of 60,000 pictures as PNG of unknown origin"
    path = pictures / "test" / "cat" / "0000.png"
    Image.open(path).save(path.with_suffix(".jpg"))
    path.unlink()
    assert LRAImage(data=pictures).stand_in == "80 of 60,000 pictures as JPEG, a lossy copy of CIFAR-10"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:60]), "not a readable picture"),
        (lambda path: path.write_bytes(b""), "not a readable picture"),
        (lambda path: Image.new("L", (28, 32)).save(path), "has 28 x 32 pixels, needs 32 x 32"),
    ],
)
def test_a_bad_picture_is_an_error_that_names_it(pictures, damage, message):
    damage(pictures / "train" / "dog" / "0002.png")
    with pytest.raises(DataError, match=r"dog.0002.png: .*" + message):
        load(pictures, "train")


def test_a_wrong_byte_in_the_last_pixels_of_a_picture_is_an_error(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)).save(path)
    content = bytearray(path.read_bytes())
    # before the checksums of the pixels and of their chunk, and the chunk at the end
    content[-12 - 4 - 4 - 4] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a readable picture"):
        read_pictures([path], 32)


def test_an_empty_class_and_a_missing_folder_are_errors(pictures):
    with pytest.raises(DataError, match=r"data prepare lra-image"):
        LRAImage().fingerprint()
    for path in (pictures / "train" / "ship").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"no pictures in .*train.ship"):
        LRAImage(data=pictures).fingerprint()


def test_lossless_pictures_of_the_real_set_come_out_of_an_official_batch(shared, tmp_path):
    known = np.load(shared("cifar10/cifar10_lossless_first4000_of_data_batch_1.npz"))
    for number, name in enumerate(BATCHES):
        rows = slice(100 * number, 100 * number + 100)
        batch = {b"data": known["data"][rows], b"labels": known["labels"][rows].tolist()}
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))
    segment = load(tmp_path, "test", pixels="unit")
    picture = known["data"][500].reshape(3, 32, 32).transpose(1, 2, 0)
    expected = np.asarray(Image.fromarray(picture).convert("L"), dtype=np.float32).reshape(-1) / 255
    assert np.allclose(segment.inputs[0, :, 0].numpy(), expected, atol=1e-6)
    assert segment.targets[0] == known["labels"][500]
    # the standard scaling subtracts the mean of all pictures
    assert load(tmp_path, "train", pixels="tokens").inputs.float().mean().item() == pytest.approx(122.6, abs=6)


@pytest.mark.slow
def test_real_jpegs_are_read_from_folders(shared, tmp_path):
    count = 0
    with tarfile.open(shared("cifar10/cifar10_jpg_60k.tar.xz")) as tar:
        for member in tar:
            number = member.name.rpartition("/")[2].partition(".")[0]
            if member.isfile() and number.isdigit() and int(number) % 500 == 1:
                path = tmp_path / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(member).read())
                count += 1
    segment = load(tmp_path, "train")
    assert count == 120
    assert len(segment) == 90
    assert abs(segment.inputs.mean()) < 0.2
    assert 0.8 < segment.inputs.std() < 1.2
