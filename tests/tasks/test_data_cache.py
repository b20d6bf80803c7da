"""The cache: its place, complete or missing folders, parallel workers; the manifest; and sources in the cache."""

import hashlib
import io
import multiprocessing
import os
import tarfile
import time
from pathlib import Path

import pytest

from subquad.tasks import data
from subquad.tasks.data import cache, manifest
from subquad.tasks.data.faults import DataError, NoDataError
from subquad.tasks.data.parallel import in_order


def test_the_cache_is_where_the_user_says_or_by_the_xdg_rule(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / "named"))
    assert cache.root() == tmp_path / "named"
    monkeypatch.delenv("SUBQUAD_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.root() == tmp_path / "xdg" / "subquad"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.root() == tmp_path / "home" / ".cache" / "subquad"


def test_a_folder_is_whole_or_not_there(tmp_path):
    target = tmp_path / "set"

    def broken():
        with cache.new_folder(target) as temporary:
            (temporary / "half").write_text("half")
            assert not target.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert list(tmp_path.iterdir()) == []
    with cache.new_folder(target) as temporary:
        (temporary / "whole").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert (target / "whole").read_text() == "whole"
    cache.write_bytes(tmp_path / "file", b"")
    # other users of a shared cache may read what `mkdir` and `open` would let them read
    (tmp_path / "folder").mkdir()
    (tmp_path / "opened").touch()
    modes = [path.stat().st_mode for path in (target, tmp_path / "file")]
    assert modes == [path.stat().st_mode for path in (tmp_path / "folder", tmp_path / "opened")]


def test_what_a_killed_process_left_is_removed_and_never_used(tmp_path):
    (tmp_path / ".set.abc.tmp" / "half").mkdir(parents=True)
    (tmp_path / ".other.abc.tmp").mkdir()
    with cache.new_folder(tmp_path / "set") as temporary:
        (temporary / "whole").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.abc.tmp", "set"]
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["whole"]


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(DataError, match=r"cannot be written .*SUBQUAD_DATA"), cache.new_folder(tmp_path / "set"):
        pass


def test_a_file_in_place_of_the_folder_of_the_cache_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for named in ("file", "file/below"):
        monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / named))
        with pytest.raises(DataError, match=r"cannot be written .*SUBQUAD_DATA"), cache.lock("counter"):
            pass


def _count(root, path, rounds):
    os.environ["SUBQUAD_DATA"] = str(root)
    for _ in range(rounds):
        with cache.lock("counter"):
            number = int(Path(path).read_text())
            time.sleep(0.001)
            Path(path).write_text(str(number + 1))


def test_a_lock_holds_against_other_processes(tmp_path, cache_root):
    path = tmp_path / "number"
    path.write_text("0")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count, args=(cache_root, path, 20)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert path.read_text() == "80"


def test_a_folders_hash_depends_on_names_and_contents_and_not_on_its_place(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub" / "a.txt").write_text("a")
        (tmp_path / place / "b.txt").write_text("b")

    def hash_of(place):
        base = tmp_path / place
        return cache.folder_hash(base, [path for path in base.rglob("*") if path.is_file()])

    first = hash_of("one")
    assert hash_of("one") == first == hash_of("two")
    (tmp_path / "one" / "b.txt").write_text("c")
    assert hash_of("one") != first
    (tmp_path / "two" / "b.txt").rename(tmp_path / "two" / "c.txt")
    assert hash_of("two") not in (first, hash_of("one"))


def test_contents_are_read_once_and_again_when_asked(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    first = cache.folder_hash(tmp_path, [tmp_path / "a.txt"])
    read = []

    def hash_of(path):
        read.append(path)
        return "0"

    monkeypatch.setattr(cache, "file_digest", hash_of)
    assert cache.folder_hash(tmp_path, [tmp_path / "a.txt"]) == first
    assert not read
    assert cache.folder_hash(tmp_path, [tmp_path / "a.txt"], fresh=True) != first
    assert read == [tmp_path / "a.txt"]


def test_every_source_has_a_licence_an_address_and_a_task():
    known = manifest.sources()
    assert {"lra-release", "imdb", "cifar10", "wikitext-2", "wikitext-103", "speech-commands", "hg38"} <= set(known)
    for source in known.values():
        assert source.licence
        assert source.homepage.startswith("https://")
        assert source.used_by
        for file in source.files:
            assert file.filename
            assert bool(file.hash_source) == bool(file.sha256 or file.md5), "a hash needs a source, and only a hash"


def test_every_stored_task_names_a_source_that_lists_it():
    from subquad.suite.contracts import PreparedTask
    from subquad.tasks import TASKS

    prepared = {name: task for name in TASKS if isinstance(task := TASKS.load(name)(), PreparedTask)}
    assert len(prepared) == 16
    for name, task in prepared.items():
        for source in task.sources:
            assert name in manifest.source(source).used_by


def test_every_task_without_its_data_says_so_by_an_error_of_its_own():
    """A grid can be planned without data, and tells by the kind of the error that they are missing."""
    from subquad.suite.contracts import PreparedTask
    from subquad.tasks import TASKS

    tasks = [task for name in TASKS if isinstance(task := TASKS.load(name)(), PreparedTask) and not task.generated]
    assert len(tasks) > 10
    for task in tasks:
        with pytest.raises(NoDataError, match=f"^{task.name}: "):
            task.fingerprint()


def test_an_unknown_source_names_the_nearest():
    with pytest.raises(DataError, match=r"unknown source 'imbd' \(did you mean 'imdb'\?\)"):
        manifest.source("imbd")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot be read as YAML \(No such file or directory\); name a manifest such as .*sources.yaml"),
        ("set: [", r"cannot be read as YAML \(.*line \d.*\); name a manifest"),
        (b"\xff", r"cannot be read as YAML \(.*can't decode.*\); name a manifest"),
        ("just a text", r"needs the name of every source with its options below it; name a manifest"),
        ("set: here", r"needs the name of every source with its options below it; name a manifest"),
        ("set: {about: a}", r"set: licence: missing; correct the file"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named_with_its_variable(tmp_path, monkeypatch, text, message):
    path = tmp_path / "mirror.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setenv("SUBQUAD_SOURCES", str(path))
    with pytest.raises(DataError, match=f"^SUBQUAD_SOURCES={path}: {message}") as raised:
        manifest.sources()
    assert "\n" not in str(raised.value)


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "set.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("set/train/a.txt", "set/test/b.txt", "set/extra/c.txt"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    return path


@pytest.fixture
def source(archive, use_manifest):
    content = archive.read_bytes()
    file = manifest.File(
        url="http://127.0.0.1:9/set.tar.gz",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        unpack=("set/train", "set/test"),
    )
    use_manifest({"set": manifest.Source(about="-", licence="-", homepage="-", used_by=("task",), files=(file,))})
    return file


def test_a_users_own_archive_is_taken_and_told_apart_from_another_edition(archive, source, tmp_path):
    folder, kept = data.obtain("set", [archive])
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.txt")) == [
        "set/test/b.txt",
        "set/train/a.txt",
    ]
    assert kept["files"][0]["official"]
    assert data.state("set") == kept
    other = tmp_path / "other.tar.gz"
    with tarfile.open(other, "w:gz") as tar:
        member = tarfile.TarInfo("pictures/d.txt")
        tar.addfile(member, io.BytesIO())
    folder, kept = data.obtain("set", [other])
    assert (folder / "pictures" / "d.txt").exists(), "a copy with another arrangement is unpacked whole"
    assert not kept["files"][0]["official"]


def test_what_is_prepared_is_not_fetched_again(archive, source):
    folder, _ = data.obtain("set", [archive])
    # no server answers at the address of the source, so a second download would fail
    assert data.obtain("set")[0] == folder


def test_preparing_anew_without_a_network_keeps_what_is_there(archive, source, monkeypatch):
    download = cache.place("files", "set", "set.tar.gz")
    download.parent.mkdir(parents=True)
    download.write_bytes(archive.read_bytes())
    cache.write_json(download.with_name("set.tar.gz.json"), {"url": source.url, "sha256": source.sha256})
    folder, kept = data.obtain("set")
    monkeypatch.setenv("SUBQUAD_OFFLINE", "1")
    with pytest.raises(DataError, match="SUBQUAD_OFFLINE forbids the network"):
        data.obtain("set", force=True)
    assert download.read_bytes() == archive.read_bytes()
    assert data.obtain("set") == (folder, kept)


def test_a_wrong_number_of_archives_or_a_missing_one_is_an_error(archive, source, tmp_path):
    with pytest.raises(DataError, match=r"2 given, this source has 1 \(set.tar.gz\)"):
        data.obtain("set", [archive, archive])
    with pytest.raises(DataError, match="there is no such file"):
        data.obtain("set", [tmp_path / "nowhere.tar"])
    assert data.state("set") == {}


def test_a_failed_unpacking_leaves_no_source(archive, source):
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="damaged"):
        data.obtain("set", [archive])
    assert data.state("set") == {}
    assert not cache.place("unpacked").exists() or not list(cache.place("unpacked").iterdir())


def test_a_folder_is_found_by_its_layout(tmp_path, source, archive):
    def look(folder):
        return data.find("task", folder, "set", ("inner",), lambda path: (path / "mark").exists(), "a mark")

    with pytest.raises(DataError, match=r"data prepare task.*--data DIR \(a mark\)"):
        look(None)
    (tmp_path / "have" / "inner").mkdir(parents=True)
    with pytest.raises(DataError, match=r"does not hold a mark, also not in inner"):
        look(tmp_path / "have")
    (tmp_path / "have" / "inner" / "mark").touch()
    assert look(tmp_path / "have") == tmp_path / "have" / "inner"
    data.obtain("set", [archive])
    with pytest.raises(DataError, match="does not hold a mark"):
        look(None)


def square(number):
    return number * number


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_whatever_the_number_of_workers(workers):
    endless = ((number,) for number in range(1 << 40))
    found = []
    for result in in_order(square, endless, workers):
        found.append(result)
        if len(found) == 10:
            break
    assert found == [number * number for number in range(10)]
