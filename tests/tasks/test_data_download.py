"""Downloads from a server on this machine: they are resumed and checked, and get their final name only when
complete."""

import errno
import hashlib
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from subquad.tasks.data import cache, download
from subquad.tasks.data.faults import DataError
from subquad.tasks.data.manifest import File
from tests.file_server import serving

pytest.importorskip("requests")

CONTENT = np.random.default_rng(0).bytes(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


fetch = partial(download.fetch, delay_s=0.0)


@pytest.fixture
def server():
    with serving(CONTENT) as running:
        yield running


def file_of(server, **facts):
    facts = {"bytes": len(CONTENT), "sha256": SHA256} | facts
    return File(url=f"http://127.0.0.1:{server.server_port}/set.tar", **facts)


def leftovers(target):
    return sorted(
        path.name for path in target.parent.iterdir() if path.name not in (target.name, f"{target.name}.json")
    )


def test_a_download_has_the_right_bytes_and_a_record(server, tmp_path):
    target = tmp_path / "set.tar"
    seen = []
    record = fetch(file_of(server), target, lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert record["sha256"] == SHA256
    assert record == cache.read_json(tmp_path / "set.tar.json")
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert leftovers(target) == []
    fetch(file_of(server), target)
    assert len(server.asked) == 1, "a file that is there was fetched again"


@pytest.mark.parametrize("facts", [{}, {"sha256": None}, {"sha256": None, "bytes": None}])
def test_a_broken_connection_is_continued_where_it_broke(server, tmp_path, facts):
    server.breaks_after = [2**20, 2**19]
    fetch(file_of(server, **facts), tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={2**20}-", f"bytes={2**20 + 2**19}-"]


def test_an_address_that_nobody_answers_is_named_once(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/set.tar"
        with pytest.raises(DataError) as refused:
            fetch(File(url=address, bytes=None, sha256=None), tmp_path / "set.tar")
    assert str(refused.value).startswith(f"{address}: cannot be reached or broke off 5 times (")
    assert "Connection refused" in str(refused.value)
    assert "Max retries" not in str(refused.value)


def test_a_server_without_ranges_sends_all_again(server, tmp_path):
    server.ranges, server.breaks_after = False, [1_000_000]
    fetch(file_of(server), tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT


def test_a_killed_download_is_continued_by_the_next_call(server, tmp_path):
    target = tmp_path / "set.tar"
    code = (
        "import os, sys; from pathlib import Path; from subquad.tasks.data.download import fetch\n"
        "from subquad.tasks.data.manifest import File\n"
        "def kill(done, total):\n    if done >= 2**20: os._exit(9)\n"
        f"fetch(File(url={file_of(server).url!r}, bytes=None, sha256=None), Path({str(target)!r}), kill)"
    )
    path = os.pathsep.join(sys.path)
    killed = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert killed.returncode == 9
    assert not target.exists()
    fetch(file_of(server), target)
    assert target.read_bytes() == CONTENT
    assert server.asked[1] == f"bytes={2**20}-"


def test_a_file_that_changed_meanwhile_is_fetched_from_the_start(server, tmp_path):
    server.content, server.tag, server.breaks_after = CONTENT[::-1], '"old"', [2**17] * download.ATTEMPTS
    with pytest.raises(DataError, match="broke off"):
        fetch(file_of(server, sha256=None), tmp_path / "set.tar")
    assert (tmp_path / "set.tar.part").stat().st_size == download.ATTEMPTS * 2**17
    server.content, server.tag, server.breaks_after = CONTENT, '"new"', []
    fetch(file_of(server, sha256=None), tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT


def test_without_a_version_or_hash_a_part_is_not_trusted(server, tmp_path):
    server.tag, server.breaks_after = "", [1_000_000]
    fetch(file_of(server, sha256=None), tmp_path / "set.tar")
    assert server.asked == [None, None]


def test_a_complete_part_is_recognised(server, tmp_path):
    (tmp_path / "set.tar.part").write_bytes(CONTENT)
    fetch(file_of(server), tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT)}-"]


def test_a_wrong_hash_is_an_error_and_leaves_nothing(server, tmp_path):
    target = tmp_path / "set.tar"
    with pytest.raises(DataError, match=r"set.tar from http.*sha256 is .* the manifest says 0000.*removed"):
        fetch(file_of(server, sha256="0" * 64), target)
    assert not target.exists()
    assert leftovers(target) == []


def test_an_md5_is_checked_where_that_is_what_is_published(server, tmp_path):
    md5 = hashlib.md5(CONTENT).hexdigest()
    fetch(file_of(server, sha256=None, md5=md5), tmp_path / "good.tar")
    with pytest.raises(DataError, match="md5"):
        fetch(file_of(server, sha256=None, md5="0" * 32), tmp_path / "bad.tar")


def test_an_unknown_hash_is_recorded_and_held_against_the_next_download(server, tmp_path):
    target = tmp_path / "set.tar"
    fetch(file_of(server, sha256=None), target)
    target.unlink()
    server.content, server.tag = CONTENT[::-1], '"second"'
    with pytest.raises(DataError, match="first download says"):
        fetch(file_of(server, sha256=None), target)
    assert not target.exists()


def test_another_size_is_refused_before_anything_is_fetched(server, tmp_path):
    with pytest.raises(DataError, match=r"offers 3,000,000 bytes, the manifest says 12"):
        fetch(file_of(server, bytes=12), tmp_path / "set.tar")
    assert not list(tmp_path.iterdir())


def test_a_refusal_says_what_to_do(server, tmp_path):
    server.status = 403
    with pytest.raises(DataError, match=r"^http\S+: the server answered 403 .*--from FILE\.$"):
        fetch(file_of(server), tmp_path / "set.tar")
    assert len(server.asked) == 1


def test_a_busy_server_is_asked_again_and_then_given_up(server, tmp_path):
    server.status = 503
    with pytest.raises(DataError, match=r"broke off 5 times.*answered 503"):
        fetch(file_of(server), tmp_path / "set.tar")
    assert len(server.asked) == download.ATTEMPTS


def test_offline_never_asks_and_still_finds_what_is_there(server, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_OFFLINE", "1")
    with pytest.raises(DataError, match="SUBQUAD_OFFLINE forbids the network"):
        fetch(file_of(server), tmp_path / "set.tar")
    assert server.asked == []
    monkeypatch.setenv("SUBQUAD_OFFLINE", "0")
    fetch(file_of(server), tmp_path / "set.tar")
    monkeypatch.setenv("SUBQUAD_OFFLINE", "1")
    assert fetch(file_of(server), tmp_path / "set.tar")["sha256"] == SHA256


def refuse_offline(server, monkeypatch):
    monkeypatch.setenv("SUBQUAD_OFFLINE", "1")


def refuse_by_status(server, monkeypatch):
    server.status = 403


def break_off(server, monkeypatch):
    server.breaks_after = [2**16] * download.ATTEMPTS


def serve_other_bytes(server, monkeypatch):
    server.content = CONTENT[::-1]


def fill_the_disk(server, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1_000_000))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (refuse_offline, r"set.tar: --force downloads it again, and SUBQUAD_OFFLINE forbids the network"),
        (refuse_by_status, r"answered 403"),
        (break_off, r"broke off 5 times"),
        (serve_other_bytes, r"the manifest says"),
        (fill_the_disk, r"3,000,000 bytes are missing"),
    ],
)
def test_a_forced_download_that_fails_leaves_the_old_file(server, tmp_path, monkeypatch, fault, message):
    target = tmp_path / "set.tar"
    record = fetch(file_of(server), target)
    fault(server, monkeypatch)
    with pytest.raises(DataError, match=message):
        fetch(file_of(server), target, force=True)
    assert target.read_bytes() == CONTENT
    assert fetch(file_of(server), target) == record


def test_a_forced_download_continues_nothing_and_takes_the_place_of_the_old_file(server, tmp_path):
    target = tmp_path / "set.tar"
    fetch(file_of(server), target)
    target.write_bytes(b"damaged since")
    (tmp_path / "set.tar.part").write_bytes(b"of an earlier call")
    fetch(file_of(server), target, force=True)
    assert target.read_bytes() == CONTENT
    assert server.asked == [None, None]
    assert leftovers(target) == []


def test_a_disk_without_room_is_found_before_the_download(server, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1_000_000))
    with pytest.raises(DataError, match=r"3,000,000 bytes are missing .* has 1,000,000 free.*SUBQUAD_DATA"):
        fetch(file_of(server), tmp_path / "set.tar")
    assert server.asked == []


def test_a_disk_that_fills_up_meanwhile_leaves_no_whole_file(server, tmp_path, monkeypatch):
    opened = Path.open

    def full(path, mode="r", *rest, **options):
        file = opened(path, mode, *rest, **options)
        if path.name.endswith(".part") and mode in ("ab", "wb"):
            file.close()
            return FullDisk()
        return file

    class FullDisk:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

        def write(self, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DataError, match=r"no space left .*SUBQUAD_DATA"):
        fetch(file_of(server), tmp_path / "set.tar")
    assert not (tmp_path / "set.tar").exists()


class Raw(http.server.ThreadingHTTPServer):
    """Answers every request with the same bytes, whatever they are."""

    answer = b""
    blocks = 1

    def handle_error(self, request, client_address):
        pass


class RawHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.wfile.write(self.server.answer)
        for _ in range(self.server.blocks):
            self.wfile.write(b"x" * 65536)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def raw():
    running = Raw(("127.0.0.1", 0), RawHandler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


OK = b"HTTP/1.1 200 OK\r\n"
HOSTILE = {
    "a loop": b"HTTP/1.1 302 Found\r\nLocation: /set.tar\r\nContent-Length: 0\r\n\r\n",
    "nowhere": b"HTTP/1.1 302 Found\r\nLocation: http://\r\nContent-Length: 0\r\n\r\n",
    "another scheme": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
    "no address": b"HTTP/1.1 302 Found\r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n",
    "a length of words": OK + b"Content-Length: many\r\n\r\n",
    "a negative length": OK + b"Content-Length: -5\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n",
    "a page": OK + b"Content-Type: text/html; charset=utf-8\r\n\r\n",
    "packed": OK + b"Content-Encoding: gzip\r\n\r\n",
    "bad chunks": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "no http": b"hello\r\n",
    "an odd status": b"HTTP/1.1 999 What\r\n\r\n",
    "a range of nothing": b"HTTP/1.1 206 Partial\r\nContent-Range: bytes x\r\n\r\n",
    "nothing": OK + b"\r\n",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("known", [True, False])
def test_a_hostile_answer_is_one_line_and_no_file(raw, tmp_path, name, known):
    raw.answer, raw.blocks = HOSTILE[name], int(name != "nothing")
    facts = {} if known else {"bytes": None, "sha256": None}
    target = tmp_path / "set.tar"
    if not known and name in ("a length of words", "a negative length"):
        # a length that is none is no length, and the body ends with the connection
        fetch(File(url=f"http://127.0.0.1:{raw.server_port}/set.tar", **facts), target)
        return
    with pytest.raises(DataError) as caught:
        fetch(file_of_raw(raw, **facts), target)
    assert "\n" not in str(caught.value)
    assert not target.exists()


def file_of_raw(raw, **facts):
    facts = {"bytes": len(CONTENT), "sha256": SHA256} | facts
    return File(url=f"http://127.0.0.1:{raw.server_port}/set.tar", **facts)


def test_a_body_without_end_is_not_written_until_the_disk_is_full(raw, tmp_path, monkeypatch):
    raw.answer, raw.blocks = OK + b"\r\n", 5000
    with pytest.raises(DataError, match="sends more than the 3,000,000 bytes of the file"):
        fetch(file_of_raw(raw), tmp_path / "set.tar")
    assert not (tmp_path / "set.tar.part").exists()
    monkeypatch.setattr(download, "SPARE", 1 << 62)
    with pytest.raises(DataError, match=r"their end is not known, and .* has less than"):
        fetch(file_of_raw(raw, bytes=None), tmp_path / "set.tar")
    assert (tmp_path / "set.tar.part").stat().st_size < 1 << 27
