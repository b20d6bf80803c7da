"""Committed rows of an installation: one archive, fetched into the cache by `results pull`, and found there."""

import os
import shutil
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from subquad.run_suite import HOME, REPOSITORY
from subquad.suite.environment import release
from subquad.suite.notebook import Notebook
from subquad.suite.packaging import archive, named
from subquad.tasks.data import committed
from tests.file_server import serving
from tests.stored import store


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Committed rows of two runs, whose archive is larger than what a download writes at a time, and a submission."""
    folder = tmp_path_factory.mktemp("checkout") / "results" / "reference"
    (folder.parents[1] / "submissions" / "one").mkdir(parents=True)
    (folder.parents[1] / "submissions" / "one" / "manifest.json").write_text("{}")
    for seed in range(2):
        curve = {"metric": "kernel", "slice": "layer=0", "samples": np.random.default_rng(seed).random(10_000).tolist()}
        rows = [{"metric": "accuracy", "value": 0.5, "split": "test"}, {**curve, "value": 0.5}, {"metric": "run"}]
        settings = {"task": {"name": "mqar", "version": 1}, "model": {"name": "gla", "version": 1}, "seed": seed}
        store(
            folder, rows, settings, experiment="quickstart", device="one", commit="c", started_at="2026-01-01T00:00:00"
        )
    return folder


@pytest.fixture(scope="module")
def content(reference):
    return archive(reference.parents[1])


@pytest.fixture
def server(content):
    with serving(content) as running:
        yield running


@pytest.fixture
def installed(server, content, tmp_path, monkeypatch):
    """The repository of an installation whose rows a server has, called in an empty folder with an empty cache."""
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return installation(content, f"http://127.0.0.1:{server.server_port}/rows.tar")


def installation(content, url):
    found = committed.Archive(**{**named(content, HOME), "url": url})
    reference, submissions = found.folder() / "results" / "reference", found.folder() / "submissions"
    return replace(REPOSITORY, reference=reference, submissions=submissions, pull=partial(committed.pull, found))


def files(folder):
    """The content of every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_rows_give_the_same_archive_whoever_wrote_them(reference, content, tmp_path):
    for seconds, (name, part) in enumerate(sorted(files(reference.parents[1]).items(), reverse=True)):
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(part)
        place.chmod(0o600)
        os.utime(place, (seconds, seconds))
    (tmp_path / "results" / "reference" / "notes.txt").write_text("no row")
    assert archive(tmp_path) == content
    (tmp_path / "submissions" / "two.json").write_text("{}")
    assert archive(tmp_path) != content


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("https://host/owner/subquad", "https://host/owner/subquad/releases/download"),
        ("https://host/owner/subquad.git", "https://host/owner/subquad/releases/download"),
        ("https://name:secret@host/owner/subquad.git/", "https://host/owner/subquad/releases/download"),
        ("git@host:owner/subquad.git", ""),
        ("../subquad", ""),
    ],
)
def test_a_wheel_names_the_release_of_its_repository_and_no_password(content, remote, url, monkeypatch):
    monkeypatch.setenv("SUBQUAD_REPOSITORY_URL", remote)
    facts = named(content, HOME)
    assert facts["url"] == (f"{url}/{release()}/{facts['name']}" if url else "")


def test_rows_are_fetched_once_and_found(server, reference, installed, command_line):
    done = command_line("results", "pull", repository=installed)
    assert (done.returncode, str(installed.reference) in done.stdout) == (0, True), done.stderr
    assert files(installed.reference) == files(reference)
    assert files(installed.submissions) == {"one/manifest.json": b"{}"}
    # the rows are what counts, and not the archive of which they were made
    (kept,) = committed.cache.place("files", "rows").glob("*.tar")
    kept.unlink()
    assert command_line("results", "pull", repository=installed).returncode == 0
    assert server.asked == [None]
    report = command_line("report", "quickstart", repository=installed)
    assert report.stdout == command_line("report", "quickstart", "--results", reference).stdout
    assert len(Notebook(installed).results("quickstart")) > 0
    compared = command_line("compare", release(), reference, "--all", repository=installed)
    assert "identical" in compared.stdout, compared.stderr


@pytest.mark.parametrize(
    "line",
    [
        "report quickstart",
        "report kernels",
        "report h3",
        "report --all",
        "report tables",
        "export quickstart",
        "show 0373a9",
        "generate 0373a9 --prompt 3",
        "weights export 0373a9 --out model",
        f"compare {release()} .",
        "results verify",
    ],
)
def test_what_needs_the_rows_says_how_to_get_them(installed, command_line, line):
    done = command_line(*line.split(), repository=installed)
    assert done.returncode == 2, done.stdout
    assert "`subquad results pull` fetches them" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("call", [lambda one: one.results("quickstart"), lambda one: one.load("0373a9")])
def test_functions_for_python_say_so_too(installed, call):
    with pytest.raises(ValueError, match="`subquad results pull` fetches them"):
        call(Notebook(installed))


@pytest.mark.parametrize("line", ["status quickstart", "run quickstart --dry-run", "doctor"])
def test_what_does_without_the_rows_says_so_and_works(installed, command_line, line):
    done = command_line(*line.split(), repository=installed)
    assert done.returncode == 0, done.stderr
    assert "`subquad results pull` fetches them" in done.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("publish .", "an installation has no folder to commit"),
        ("report --update-docs", "the documents are those of a checkout"),
        ("compare main .", f"neither a folder of results nor {release()}"),
    ],
)
def test_what_belongs_to_a_checkout_is_refused(installed, command_line, line, words):
    done = command_line(*line.split(), repository=installed)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_half_a_download_is_continued_by_the_next_call(server, installed, command_line):
    server.breaks_after = [70_000, 0, 0, 0, 0]
    done = command_line("results", "pull", repository=installed)
    assert (done.returncode, "broke off 5 times" in done.stderr) == (2, True), done.stderr
    assert not installed.reference.exists()
    server.asked.clear()
    assert command_line("results", "pull", repository=installed).returncode == 0
    assert server.asked == ["bytes=65536-"]


def other_bytes(server, installed, content):
    server.content = bytes([content[0] ^ 1]) + content[1:]


def another_size(server, installed, content):
    server.content = content + b"more"


def not_published(server, installed, content):
    server.status = 404


@pytest.mark.parametrize(
    ("fault", "words"), [(other_bytes, "sha256 is"), (another_size, "offers"), (not_published, "answered 404")]
)
def test_another_archive_is_refused_and_leaves_nothing(server, installed, content, command_line, fault, words):
    fault(server, installed, content)
    done = command_line("results", "pull", repository=installed)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not installed.reference.exists()
    server.content, server.status = content, 200
    assert command_line("results", "pull", repository=installed).returncode == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"url": ""}', "\xff"])
def test_a_damaged_name_of_the_archive_is_refused_by_its_file(tmp_path, content):
    path = tmp_path / "ROWS.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(committed.DataError, match=f"^{path}: .*; install Subquad anew"):
        committed.archive_of(path)


def test_a_download_that_was_damaged_since_is_fetched_again(server, installed, content, command_line):
    assert command_line("results", "pull", repository=installed).returncode == 0
    (kept,) = committed.cache.place("files", "rows").glob("*.tar")
    kept.write_bytes(content[:-1])
    shutil.rmtree(installed.submissions.parent)
    done = command_line("results", "pull", repository=installed)
    assert (done.returncode, "give the command again" in done.stderr) == (2, True), done.stderr
    assert not installed.reference.exists()
    assert command_line("results", "pull", repository=installed).returncode == 0


def test_force_restores_rows_that_were_damaged(installed, command_line):
    assert command_line("results", "pull", repository=installed).returncode == 0
    part = next(installed.reference.rglob("*.parquet"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    assert command_line("results", "verify", repository=installed).returncode == 1
    assert command_line("results", "pull", "--force", repository=installed).returncode == 0
    assert part.read_bytes() == whole


def test_without_a_network_a_file_or_a_mirror_will_do(server, content, installed, command_line, tmp_path, monkeypatch):
    mirror = f"http://127.0.0.1:{server.server_port}/mirror.tar"
    file, other = tmp_path / "rows.tar", tmp_path / "other.tar"
    file.write_bytes(content)
    other.write_bytes(content[:-1])
    nowhere, unknown = (installation(content, url) for url in ("http://127.0.0.1:9/rows.tar", ""))
    monkeypatch.setenv("SUBQUAD_OFFLINE", "1")
    for arguments, repository, words in (
        ((), installed, "SUBQUAD_OFFLINE forbids the network"),
        ((), unknown, "give --from FILE_OR_URL"),
        (("--from", tmp_path / "none.tar"), unknown, "there is no such file"),
        (("--from", other), unknown, "get subquad-rows-"),
    ):
        done = command_line("results", "pull", *arguments, repository=repository)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
        assert done.stderr.count("\n") == 1
    monkeypatch.delenv("SUBQUAD_OFFLINE")
    done = command_line("results", "pull", repository=nowhere)
    assert (done.returncode, "cannot be reached" in done.stderr) == (2, True), done.stderr
    assert not unknown.reference.exists()
    for given in (file, mirror):
        assert command_line("results", "pull", "--from", given, repository=nowhere).returncode == 0
        assert files(unknown.reference)
        shutil.rmtree(unknown.submissions.parent)


def test_a_checkout_has_its_rows(command_line):
    done = command_line("results", "pull")
    assert (done.returncode, "nothing to fetch" in done.stdout) == (0, True)
