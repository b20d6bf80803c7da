"""The library `datasets`: files of the hub at one commit, compared with their hashes, and local tables offline."""

import hashlib
import http.server
import io
import re
import socket
import sys
import threading

import pytest

from subquad.tasks import data
from subquad.tasks.data import cache, manifest, tables
from subquad.tasks.data.download import fetch
from subquad.tasks.data.faults import DataError
from subquad.tasks.lra.text import LRAText

datasets = pytest.importorskip("datasets")
pd = pytest.importorskip("pandas")

COMMIT = "0123456789abcdef" * 2 + "01234567"
PATH = f"datasets/owner/reviews/resolve/{COMMIT}/plain_text"


def parquet(split):
    content = io.BytesIO()
    texts = [f"{split} {number}" for number in range(20)]
    pd.DataFrame({"text": texts, "label": [number % 2 for number in range(20)]}).to_parquet(content)
    return content.getvalue()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the two requests that the hub's client makes for a file: its version and its bytes."""

    def answer(self):
        content = self.server.contents.get(self.path)
        self.server.asked.append((self.command, self.path))
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return b""
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return content

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.wfile.write(self.answer())

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine with one data set of two tables."""
    from huggingface_hub import constants

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.contents = {f"/{PATH}/{split}-00000-of-00001.parquet": parquet(split) for split in ("train", "test")}
    running.asked = []
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    endpoint = f"http://127.0.0.1:{running.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def imdb(hub, use_manifest):
    """A manifest in which this data set replaces the hub's reviews; train has a hash there and test has none."""
    files = []
    for path, content in hub.contents.items():
        digest = hashlib.sha256(content).hexdigest() if "train" in path else None
        url = f"hf://datasets/owner/reviews@{COMMIT}/plain_text/{path.rpartition('/')[2]}"
        files.append(manifest.File(url=url, bytes=len(content), sha256=digest))
    source = manifest.source("imdb").model_copy(update={"hub": tuple(files)})
    use_manifest({"imdb": source})
    return source


def test_a_set_of_the_hub_comes_through_the_cache_and_is_read(hub, imdb, cache_root):
    folder, kept = data.obtain("imdb", [data.HUB])
    assert [path.name for path in sorted(folder.iterdir())] == [
        "test-00000-of-00001.parquet",
        "train-00000-of-00001.parquet",
    ]
    assert [COMMIT in record["url"] for record in kept["files"]] == [True, True]
    assert data.taken_from("imdb", kept) == imdb.hub
    task = LRAText(length=32)
    assert task.counts() == {"train": 18, "valid": 2, "test": 20}
    # the hash of test is not published; recording it does not make the file official
    assert task.stand_in == "test-00000-of-00001.parquet: other than the hub's imdb"
    assert data.verify_source("imdb") == [
        "train-00000-of-00001.parquet: size and hash are those of the manifest",
        "test-00000-of-00001.parquet: size and hash are those of the first download",
    ]
    assert not list(cache_root.rglob(".hub"))
    # nothing is requested again
    count = len(hub.asked)
    assert data.obtain("imdb")[0] == folder
    data.obtain("imdb", [data.HUB])
    assert len(hub.asked) == count


def test_the_command_line_names_repository_and_commit(hub, imdb, monkeypatch, capsys):
    from subquad import run_suite

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["run_suite.py", "data", *arguments])
        with pytest.raises(SystemExit) as end:
            run_suite.main()
        return end.value.code or 0, capsys.readouterr().out

    code, out = call("prepare", "lra-text", "--from", "hub", "--set", "length=32")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("owner/reviews@")]
    assert [COMMIT in line for line in lines] == [True, True]
    assert "(as in the manifest)" in lines[0]
    assert "(recorded; the manifest has none)" in lines[1]
    _, out = call("list")
    states = {line.split("\t")[0]: line.split("\t")[4] for line in out.splitlines()[1:]}
    assert states == {"imdb": "no", f"imdb --from hub (owner/reviews@{COMMIT[:12]})": "yes"}
    code, out = call("verify", "lra-text", "--set", "length=32")
    assert code == 0
    assert "test-00000-of-00001.parquet: size and hash are those of the first download" in out


def test_other_bytes_than_the_manifests_are_refused(hub, imdb):
    path = f"/{PATH}/train-00000-of-00001.parquet"
    hub.contents[path] = hub.contents[path][:-1] + b"?"
    with pytest.raises(DataError, match=r"train-00000-of-00001.parquet .*sha256 is .*the manifest says"):
        data.obtain("imdb", [data.HUB])
    assert data.state("imdb") == {}
    assert not list(cache.place("files", "imdb").glob("*.parquet"))


def test_a_file_that_the_hub_does_not_have_says_what_to_do(hub, imdb):
    del hub.contents[f"/{PATH}/test-00000-of-00001.parquet"]
    with pytest.raises(DataError, match=r"hf://datasets/owner/reviews@\w+/.*test-.*cannot be fetched .*--data DIR"):
        data.obtain("imdb", [data.HUB])
    assert data.state("imdb") == {}


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_offline_nothing_is_requested(hub, imdb, monkeypatch, whose):
    if whose == "ours":
        monkeypatch.setenv("SUBQUAD_OFFLINE", "1")
    else:
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"OFFLINE.* forbids the network"):
        data.obtain("imdb", [data.HUB])
    assert hub.asked == []


def test_without_the_package_the_message_names_the_extra(tmp_path, imdb, monkeypatch):
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").write_bytes(parquet(split))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"fetching from the hub needs datasets .*pip install -e '\.\[datasets\]'"):
        data.obtain("imdb", [data.HUB])
    with pytest.raises(DataError, match=r"reading train.parquet needs datasets .*pip install -e '\.\[datasets\]'"):
        LRAText(data=tmp_path).fingerprint()


def test_a_source_that_is_on_no_hub_names_those_that_are():
    with pytest.raises(DataError, match=r"knows no place of hg38 on the hub; it does of imdb, cifar10, wikitext-2"):
        data.obtain("hg38", [data.HUB])


def test_the_manifest_takes_no_revision_that_may_move():
    for revision in ("main", "v1.0", COMMIT[:12]):
        with pytest.raises(ValueError, match="url"):
            manifest.File(url=f"hf://datasets/owner/reviews@{revision}/a.parquet", bytes=None, sha256=None)
    for source in manifest.sources().values():
        for file in source.hub:
            assert re.fullmatch(manifest.HUB, file.url)
            assert file.bytes
            assert bool(file.hash_source) == bool(file.sha256)


def test_local_tables_are_read_without_a_network_or_a_copy(tmp_path, cache_root, monkeypatch):
    def refuse(*args):
        raise AssertionError("something asked the network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    path = tmp_path / "set [1].parquet"
    path.write_bytes(parquet("train"))
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", elsewhere)
    found = list(tables.rows([path, path], ("label", "text")))
    assert found == [(number % 2, f"train {number}") for number in range(20)] * 2
    assert not elsewhere.exists()
    assert not [path for path in cache_root.rglob("*") if path.is_file() and path.stat().st_size]


def test_a_fetched_file_has_its_final_name_only_when_whole(hub, imdb, tmp_path, monkeypatch):
    import huggingface_hub

    def broken(*args, local_dir, **options):
        local_dir.mkdir(parents=True)
        (local_dir / "half").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    with pytest.raises(DataError, match="no space left on the disk; free some, or set SUBQUAD_DATA"):
        fetch(imdb.hub[0], tmp_path / "files" / "train.parquet")
    assert not list(tmp_path.rglob("train.parquet"))
