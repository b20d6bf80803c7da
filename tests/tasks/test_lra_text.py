"""LRA Text: bytes, cuts and ends; splits; the official layout; and real reviews where they are available."""

import tarfile

import pytest
import torch

from subquad.tasks.data import cache, obtain, stored
from subquad.tasks.data.faults import DataError
from subquad.tasks.data.stored import leakage
from subquad.tasks.lra.text import END, PAD, LRAText, pack


@pytest.fixture
def folder(tmp_path):
    """Forty reviews, ten in each folder."""
    for split in ("train", "test"):
        for name, word in (("pos", "good"), ("neg", "bad")):
            (tmp_path / "aclImdb" / split / name).mkdir(parents=True)
            for i in range(10):
                text = f"{split} {i}: a {word} film<br />caf\u00e9"
                (tmp_path / "aclImdb" / split / name / f"{i}_{7 if name == 'pos' else 2}.txt").write_text(text)
    return tmp_path


def texts(segment):
    return [
        bytes(row[:end].tolist()).decode()
        for row, end in zip(segment.inputs, segment.positions[:, 0].tolist(), strict=True)
    ]


def load(folder, split, task=LRAText, **options):
    (segment,) = task(data=folder, **options).segments(split, 0)
    return segment


def test_texts_are_cut_ended_and_padded():
    rows, ends = pack([b"abc", b"abcdefgh", b""], 6)
    assert rows.tolist() == [[97, 98, 99, END, PAD, PAD], [97, 98, 99, 100, 101, END], [END, PAD, PAD, PAD, PAD, PAD]]
    assert ends.tolist() == [3, 5, 0]


def test_reviews_come_back_byte_by_byte_with_their_labels(folder):
    segment = load(folder, "test", length=64)
    assert segment.inputs.dtype == torch.uint8
    assert segment.inputs.shape == (20, 64)
    assert segment.positions.shape == (20, 1)
    for text, target in zip(texts(segment), segment.targets.tolist(), strict=True):
        assert ("good" in text) == (target == 1)
        assert text.endswith("film<br />café")
        assert text.startswith("test")
    spec = LRAText(length=64).spec
    assert (spec.input, spec.readout, spec.num_classes, spec.vocab_size, spec.max_length) == (
        "tokens",
        "sequence",
        2,
        256,
        64,
    )


def test_policy_paper_validates_on_test_and_trains_on_everything(folder):
    train, valid, test = (set(texts(load(folder, split, split_policy="paper"))) for split in ("train", "valid", "test"))
    assert len(train) == 20
    assert valid == test


def test_clean_holds_out_a_tenth_of_train_for_every_seed(folder):
    train, valid, test = (set(texts(load(folder, split))) for split in ("train", "valid", "test"))
    assert len(train) == 18
    assert len(valid) == 2
    assert not train & valid
    assert not (train | valid) & test
    task = LRAText(data=folder)
    assert torch.equal(next(iter(task.segments("valid", 0))).inputs, next(iter(task.segments("valid", 1))).inputs)


def test_reviews_that_leave_no_row_for_a_split_are_refused_while_a_run_is_planned(folder):
    for path in (folder / "aclImdb" / "train").rglob("[4-9]_*.txt"):
        path.unlink()
    with pytest.raises(DataError, match=r"lra-text: .*aclImdb leaves no row for the valid split; add data\."):
        LRAText(data=folder).fingerprint()
    LRAText(data=folder, split_policy="paper").fingerprint()


def test_few_reviews_stand_in_for_the_set(folder):
    assert LRAText(data=folder).stand_in == "40 reviews; the full set has 50000"


@pytest.mark.parametrize("below", ["", "aclImdb"])
def test_the_folder_may_be_the_one_above(folder, below):
    assert len(load(folder / below, "test")) == 20
    assert LRAText(data=folder / below).fingerprint() == LRAText(data=folder).fingerprint()


def test_arrays_are_made_once_for_each_content_and_length(folder):
    made = []

    class Counted(LRAText):
        def read(self, folder):
            made.append(self.length)
            return super().read(folder)

    load(folder, "train", Counted, length=64)
    load(folder, "test", Counted, length=64, split_policy="paper")
    assert made == [64]
    load(folder, "test", Counted, length=32)
    assert made == [64, 32]
    (folder / "aclImdb" / "test" / "pos" / "0_7.txt").write_text("another text")
    assert "another text" in texts(load(folder, "test", Counted, length=64))
    assert made == [64, 32, 64]


def test_a_damaged_array_in_the_cache_is_an_error(folder):
    task = LRAText(data=folder, length=64)
    task.verify()
    (array,) = cache.place("prepared").glob("*/test.inputs.npy")
    content = array.read_bytes()
    facts = array.with_name("facts.json")
    for damage in (content[:-1] + bytes([content[-1] ^ 1]), content[:40]):
        array.write_bytes(damage)
        with pytest.raises(DataError, match=r"damaged \(the arrays are not .*call `data prepare --force`"):
            task.arrays()
    array.unlink()
    with pytest.raises(DataError, match=r"damaged \(the arrays are not"):
        task.arrays()
    array.write_bytes(content)
    task.arrays()
    facts.write_bytes(b"{")
    with pytest.raises(DataError, match=r"damaged \(the arrays are not"):
        task.arrays()


def test_arrays_of_before_they_had_a_digest_are_read_and_compared_by_verify(folder):
    task = LRAText(data=folder, length=64)
    task.verify()
    (array,) = cache.place("prepared").glob("*/test.inputs.npy")
    known = cache.read_json(array.with_name("facts.json"))
    cache.write_json(array.with_name("facts.json"), {key: known[key] for key in known if key != "arrays"})
    content = array.read_bytes()
    array.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"test.inputs in the cache differs"):
        task.verify()
    array.write_bytes(content[:40])
    with pytest.raises(DataError, match=r"damaged .*call `data prepare --force`"):
        task.arrays()


def test_forced_arrays_are_made_again_and_the_old_ones_stay_until_then(folder, monkeypatch):
    task = LRAText(data=folder, length=64)
    whole = {name: array.tolist() for name, array in task.arrays().items()}
    (kept,) = cache.place("prepared").glob("*/test.inputs.npy")
    damaged = kept.read_bytes()[:40]
    kept.write_bytes(damaged)
    monkeypatch.setattr(stored, "_planned", set())

    def broken(self, folder):
        raise DataError("planted fault")

    with monkeypatch.context() as patch:
        patch.setattr(LRAText, "read", broken)
        with pytest.raises(DataError, match="planted fault"):
            task.arrays(force=True)
    assert kept.read_bytes() == damaged
    assert {name: array.tolist() for name, array in task.arrays(force=True).items()} == whole
    assert list(cache.place("prepared").glob("*/test.inputs.npy")) == [kept]


def test_leakage_counts_rows_of_the_later_split(folder):
    base = folder / "aclImdb"
    clean = leakage(LRAText(data=folder))
    assert set(clean.values()) == {0}
    same = (base / "train" / "pos" / "3_7.txt").read_text()
    (base / "test" / "neg" / "1_2.txt").write_text(same)
    (base / "test" / "neg" / "2_2.txt").write_text(same)
    found = leakage(LRAText(data=folder, split_policy="paper"))
    assert found["train & test"] == 2
    assert found["repeats in train"] == 0


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_tables_of_reviews_give_the_same_rows_as_their_files(folder, tmp_path_factory, ending):
    pytest.importorskip("datasets")
    import pandas as pd

    other = tmp_path_factory.mktemp("tables")
    for split in ("train", "test"):
        rows = [
            {"text": path.read_text(), "label": label}
            for label, name in enumerate(("neg", "pos"))
            for path in sorted((folder / "aclImdb" / split / name).iterdir())
        ]
        frame = pd.DataFrame(rows)
        if ending == "parquet":
            # in two parts, as the hub stores larger data sets
            frame[:11].to_parquet(other / f"{split}-00000-of-00002.parquet")
            frame[11:].to_parquet(other / f"{split}-00001-of-00002.parquet")
        elif ending == "csv":
            frame.to_csv(other / f"{split}.csv", index=False)
        else:
            frame.to_json(other / f"{split}.jsonl", orient="records", lines=True)
    one, two = LRAText(data=folder).arrays(), LRAText(data=other).arrays()
    assert all((one[name] == two[name]).all() for name in one)
    assert "train" in LRAText(data=other).stand_in
    assert LRAText(data=other).stand_in.endswith("other than the hub's imdb")


def test_a_bad_table_of_reviews_is_an_error_before_any_run(tmp_path):
    pytest.importorskip("datasets")
    import pandas as pd

    def write(split, **columns):
        pd.DataFrame(columns).to_parquet(tmp_path / f"{split}.parquet")

    write("train", text=["a", "b"], label=[0, 1])
    write("test", text=["a", "b"], label=[0, 2])
    with pytest.raises(DataError, match=r"test.parquet: row 2 has the label 2 .*needs a string and 0 to 1"):
        LRAText(data=tmp_path).fingerprint()
    write("test", text=["a", None], label=[0, 1])
    with pytest.raises(DataError, match=r"test.parquet: row 2 .*text of type NoneType"):
        LRAText(data=tmp_path).fingerprint()
    write("test", text=["a", ""], label=[0, 1])
    with pytest.raises(DataError, match=r"test.parquet: row 2: empty"):
        LRAText(data=tmp_path).fingerprint()
    write("test", text=["a", "b"], stars=[0, 1])
    with pytest.raises(DataError, match=r"test.parquet: cannot be read as parquet with text, label as columns"):
        LRAText(data=tmp_path).fingerprint()
    (tmp_path / "test.parquet").rename(tmp_path / "test-00000-of-00002.parquet")
    with pytest.raises(DataError, match=r"1 of 00002 tables test-\*.parquet; restore the others"):
        LRAText(data=tmp_path).fingerprint()


@pytest.mark.parametrize(("content", "word"), [(b"", "empty"), (b"a\0b", "control characters")])
def test_a_bad_review_is_an_error_that_names_it(folder, content, word):
    path = folder / "aclImdb" / "train" / "neg" / "4_2.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"4_2.txt: .*{word}.*fetch it again"):
        load(folder, "train")


def test_missing_folders_say_what_to_do(folder, tmp_path):
    with pytest.raises(DataError, match=r"data prepare lra-text.*--data DIR"):
        LRAText().fingerprint()
    with pytest.raises(DataError, match=r"does not hold aclImdb"):
        LRAText(data=tmp_path / "aclImdb" / "train").fingerprint()
    for path in (folder / "aclImdb" / "test" / "neg").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"no reviews in .*test/neg"):
        LRAText(data=folder).fingerprint()


@pytest.fixture
def some_reviews(shared, tmp_path):
    """The first 300 files of the real archive."""
    small = tmp_path / "small.tar"
    with tarfile.open(shared("imdb/aclImdb_50k.tar.xz")) as tar, tarfile.open(small, "w") as out:
        count = {}
        for member in tar:
            folder = member.name.rpartition("/")[0]
            if not member.isfile() or not member.name.endswith(".txt") or folder.count("/") != 2:
                continue
            count[folder] = count.get(folder, 0) + 1
            if count[folder] <= 75:
                out.addfile(member, tar.extractfile(member))
            if len(count) == 4 and min(count.values()) >= 75:
                break
    return small


@pytest.mark.slow
def test_real_reviews_come_through_the_cache(some_reviews):
    obtain("imdb", [some_reviews])
    task = LRAText(split_policy="paper")
    assert task.counts() == {"train": 150, "valid": 150, "test": 150}
    (segment,) = task.segments("train", 0)
    assert segment.targets.float().mean() == 0.5
    assert 500 < segment.positions.float().mean() < 2047
