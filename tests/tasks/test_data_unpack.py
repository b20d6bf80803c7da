"""Archives: wanted members are unpacked, members that would leave the folder are refused, and damage is named."""

import errno
import gzip
import io
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest

from subquad.tasks.data.faults import DataError
from subquad.tasks.data.unpack import unpack

FILES = {"set/a.txt": b"a" * 5000, "set/sub/b.txt": b"b", "other/c.txt": b"c"}


def make_tar(path, mode="w:gz", files=FILES, extra=()):
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member)
    return path


def make_zip(path, files=FILES):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make(kind, path):
    return make_zip(path) if kind == "zip" else make_tar(path, f"w:{kind}")


@pytest.mark.parametrize("kind", ["", "gz", "bz2", "xz", "zip"])
def test_wanted_members_are_unpacked(tmp_path, kind):
    archive = make(kind, tmp_path / "archive")
    assert unpack(archive, tmp_path / "all") == 3
    assert tree(tmp_path / "all") == FILES
    unpack(archive, tmp_path / "some", ["set/sub", "other"])
    assert set(tree(tmp_path / "some")) == {"set/sub/b.txt", "other/c.txt"}
    with pytest.raises(DataError, match="holds none of se; it is another archive"):
        unpack(archive, tmp_path / "none", ["se"])


def test_a_single_compressed_file_is_unpacked(tmp_path):
    with gzip.open(tmp_path / "genome.fa.gz", "wb") as file:
        file.write(b">chr1\nACGT\n")
    unpack(tmp_path / "genome.fa.gz", tmp_path / "out")
    assert tree(tmp_path / "out") == {"genome.fa": b">chr1\nACGT\n"}


BAD_NAMES = ["../escaped.txt", "/tmp/escaped.txt", "set/../../escaped.txt", "..\\escaped.txt", "C:\\escaped.txt"]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_path_that_leads_out_is_refused_and_nothing_is_written(tmp_path, name, kind):
    files = {"set/a.txt": b"a", name: b"evil"}
    make_it = make_zip if kind == "zip" else make_tar
    archive = make_it(tmp_path / "archive", files=files)
    # the archive is also refused where this member is not wanted
    for wanted in ([""], ["set"]):
        with pytest.raises(DataError, match="leads out of its folder"):
            unpack(archive, tmp_path / "in" / "out", wanted)
    assert not list((tmp_path / "in").iterdir())
    assert not (tmp_path / "escaped.txt").exists()


def member(kind, name, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (member(tarfile.SYMTYPE, "set/link", "/etc/passwd"), "link"),
        (member(tarfile.SYMTYPE, "set/link", "a.txt"), "link"),
        (member(tarfile.LNKTYPE, "set/link", "../../x"), "link"),
        (member(tarfile.CHRTYPE, "set/null"), "device"),
        (member(tarfile.FIFOTYPE, "set/pipe"), "device"),
    ],
)
def test_links_and_devices_are_refused(tmp_path, extra, word):
    archive = make_tar(tmp_path / "archive", extra=[extra])
    with pytest.raises(DataError, match=f"is a {word}, which is refused"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_link_in_a_zip_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "archive", "w") as packed:
        info = zipfile.ZipInfo("set/link")
        info.create_system, info.external_attr = 3, 0o120777 << 16
        packed.writestr(info, "/etc/passwd")
    with pytest.raises(DataError, match="link or device"):
        unpack(tmp_path / "archive", tmp_path / "out")


def test_a_name_that_stands_twice_is_refused(tmp_path):
    archive = make_tar(tmp_path / "archive", extra=[tarfile.TarInfo("set/a.txt")])
    with pytest.raises(DataError, match="twice"):
        unpack(archive, tmp_path / "out")


@pytest.mark.parametrize("kind", ["", "gz", "bz2", "xz", "zip"])
@pytest.mark.parametrize("damage", ["half", "flipped", "empty"])
def test_a_damaged_archive_is_named_and_nothing_is_written(tmp_path, kind, damage):
    archive = make(kind, tmp_path / "archive")
    content = bytearray(archive.read_bytes())
    middle = 600 if kind == "" else len(content) // 3
    if damage == "half":
        content = content[:middle]
    elif damage == "empty":
        content = bytearray()
    elif kind == "":
        # a plain tar has checksums of its headers only
        content[100:120] = b"\xff" * 20
    else:
        content[middle : middle + 40] = b"\xff" * 40
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"archive: damaged or no archive"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["", "gz"])
@pytest.mark.parametrize("header", range(1, 80, 13))
@pytest.mark.parametrize("damage", [bytes(512), b"\xff" * 512, b"set/x"])
def test_a_tar_with_a_damaged_header_in_the_middle_is_refused(tmp_path, kind, header, damage):
    files = {f"set/{number}.txt": b"x" * 600 for number in range(80)}
    content = bytearray(make_tar(tmp_path / "whole", "w:", files).read_bytes())
    # a header and two blocks of content for every member
    content[header * 1536 : header * 1536 + len(damage)] = damage
    (tmp_path / "archive").write_bytes(gzip.compress(content, 1) if kind else content)
    with pytest.raises(DataError, match=r"archive: damaged or no archive"):
        unpack(tmp_path / "archive", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("blocks", [40 * 3, 40 * 3 + 1, 240])
def test_a_tar_without_its_end_is_refused(tmp_path, blocks):
    files = {f"set/{number}.txt": b"x" * 600 for number in range(80)}
    content = make_tar(tmp_path / "whole", "w:", files).read_bytes()
    (tmp_path / "archive").write_bytes(content[: 512 * blocks])
    with pytest.raises(DataError, match=r"archive: damaged or no archive"):
        unpack(tmp_path / "archive", tmp_path / "out")


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    for make_it in (make_zip, make_tar):
        archive = make_it(tmp_path / "archive", files={"set/a.txt": b"a", f"set/{'x' * 256}": b"b"})
        with pytest.raises(DataError, match="is no name of a file here"):
            unpack(archive, tmp_path / "out")
        archive = make_it(tmp_path / "archive", files={"set/a": b"a", "set/a/b": b"b"})
        with pytest.raises(DataError, match="twice or below a file"):
            unpack(archive, tmp_path / "out")


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(DataError, match=r"out: no space left on the disk; .*SUBQUAD_DATA"):
        unpack(make_tar(tmp_path / "archive"), tmp_path / "in" / "out")
    assert not list((tmp_path / "in").iterdir())


def test_a_missing_archive_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        unpack(tmp_path / "nowhere.tar", tmp_path / "out")


def test_a_gz_whose_packed_bytes_have_the_checksum_of_a_tar_is_no_tar(tmp_path):
    archive = tmp_path / "letters.gz"
    for seconds in range(256):
        # the time stands among the first bytes: at one of these times, their sum is the one that a tar would have
        archive.write_bytes(gzip.compress(b"a" * (1 << 20), mtime=seconds))
        if tarfile.is_tarfile(archive):
            break
    else:
        pytest.skip("this zlib packs the letters into other bytes")
    assert unpack(archive, tmp_path / "out") == 1


def test_a_sparse_member_is_refused_whatever_size_it_says(tmp_path):
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 40)
    archive = tmp_path / "archive.tar"
    done = subprocess.run(
        ["tar", "--sparse", "-cf", archive, "-C", tmp_path, "holes"], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("there is no GNU tar")
    assert archive.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="'holes' has holes, which is refused"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zip", "single"])
def test_an_archive_that_holds_far_more_than_its_size_is_refused(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(sys.modules[unpack.__module__], "MOST_FREE", 1 << 20)
    files = {"letters": b"a" * (8 << 20)}
    archive = tmp_path / "archive.gz"
    if kind == "single":
        archive.write_bytes(gzip.compress(files["letters"]))
    elif kind == "zip":
        make_zip(archive, files)
    else:
        make_tar(archive, f"w:{kind}", files)
    with pytest.raises(DataError, match="holds more than 200 times its own size"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()
