"""`run_suite.py data` as a user meets it: list, prepare, verify, where; every fault one line and exit code 2."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.processes import with_subquad

HOME = Path(__file__).resolve().parents[2]


@pytest.fixture
def call(tmp_path, monkeypatch, command_line):
    """The command line with a cache of its own; settings are environment variables."""

    def run(*arguments, **settings):
        monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path / "cache"))
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        return command_line(*arguments)

    return run


@pytest.fixture
def reviews(tmp_path):
    """An archive in the official layout with ten reviews a folder."""
    path = tmp_path / "reviews.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for split in ("train", "test"):
            for name in ("pos", "neg"):
                for i in range(10):
                    text = f"{name} {'review' if i else 'repeated'} {split if i else ''} {i}".encode()
                    member = tarfile.TarInfo(f"aclImdb/{split}/{name}/{i}_7.txt")
                    member.size = len(text)
                    tar.addfile(member, io.BytesIO(text))
    return path


def test_list_names_every_source_without_torch(call):
    done = call("data", "list")
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines[0] == ["source", "tasks", "bytes", "sha256", "cache", "licence"]
    table = {line[0]: line for line in lines[1:]}
    assert table["imdb"][1:5] == ["lra-text", "84,125,825", "c40f74a18d3b", "no"]
    hub = table["imdb --from hub (stanfordnlp/imdb@e6281661ce1c)"]
    assert hub[1:5] == ["lra-text", "20,979,968 + 20,470,363", "db47d16b5c29 + b52e26e2f872", "no"]
    assert table["lra-release"][3] == "unknown, recorded on first download"
    code = "import sys, tasks.data; assert not {'torch', 'pandas', 'requests', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=HOME, env=with_subquad(), check=True)


def test_prepare_verify_and_run_from_an_archive(call, reviews, tmp_path):
    done = call("data", "prepare", "lra-text", "--from", reviews, "--set", "length=64")
    assert done.returncode == 0, done.stderr
    assert "Licence: no formal licence" in done.stdout
    assert "another edition than the manifest's" in done.stdout
    assert "train 18, valid 2, test 20" in done.stdout
    assert "stand-in data, marked in every row: 40 reviews" in done.stdout
    (array,) = (tmp_path / "cache").rglob("prepared/*/test.inputs.npy")
    whole = array.read_bytes()
    array.write_bytes(whole[:-9])
    done = call("data", "prepare", "lra-text", "--from", reviews, "--set", "length=64", "--force")
    assert done.returncode == 0, done.stderr
    assert array.read_bytes() == whole
    done = call("data", "verify", "lra-text", "--set", "length=64", "--set", "split_policy=paper")
    assert done.returncode == 0, done.stderr
    assert "identical inputs, train & test: 2" in done.stdout
    assert "identical inputs, repeats in train: 0" in done.stdout
    assert "from a copy" in call("data", "list").stdout
    where = call("data", "where").stdout.splitlines()
    assert where[0] == str(tmp_path / "cache")
    assert any(line.startswith("v1/unpacked/imdb-") for line in where)
    # image has no data, and everything is checked before the first run starts
    started = call("run", "dss/table1-lra", "--scale", "tiny")
    assert started.returncode == 2
    assert "lra-image: no data" in started.stderr
    # a task that is left out by name needs no data
    planned = call("run", "dss/table1-lra", "--only", "task.name=lra-text", "--scale", "tiny", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "5 runs, 5 to do" in planned.stdout
    wrong = call("run", "dss/table1-lra", "--only", "task.name=lra-txt", "--scale", "tiny", "--dry-run")
    assert wrong.returncode == 2
    assert "did you mean 'lra-text'" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prepare", "lra-txt"), ["unknown task 'lra-txt'", "did you mean 'lra-text'"]),
        (("prepare", "mqar"), ["mqar makes its data as it runs"]),
        (("prepare", "lra-text", "--from", "nowhere.tar"), ["nowhere.tar", "no such file"]),
        (("prepare", "lra-text", "--set", "lenght=3"), ["lenght", "did you mean 'length'"]),
        (("prepare", "lra-listops", "--from", "x.tar"), ["--from", "no source"]),
        (("prepare", "lra-image", "--data", "nowhere"), ["nowhere does not hold data_batch_1"]),
        (("prepare", "lra-text"), ["SUBQUAD_OFFLINE forbids the network"]),
        (("prepare", "hg38", "--from", "hub"), ["--from hub: the manifest knows no place of hg38 on the hub"]),
        (("verify", "lra-pathfinder"), ["data prepare lra-pathfinder"]),
    ],
)
def test_a_fault_is_one_line_and_exit_code_2(call, arguments, words):
    done = call("data", *arguments, SUBQUAD_OFFLINE="1")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in line


def test_a_damaged_archive_is_one_line_and_leaves_nothing(call, reviews, tmp_path):
    reviews.write_bytes(reviews.read_bytes()[:200])
    done = call("data", "prepare", "lra-text", "--from", reviews)
    assert done.returncode == 2
    assert "reviews.tar.gz: damaged or no archive" in done.stderr
    assert not list((tmp_path / "cache").rglob("aclImdb"))


def test_generated_rows_are_prepared_too(call):
    options = ["max_depth=3", "min_length=5", "max_length=60", "length=64", "num_train=90", "num_valid=5", "num_test=5"]
    arguments = [word for option in options for word in ("--set", option)]
    done = call("data", "prepare", "lra-listops", "--workers", 1, *arguments)
    assert done.returncode == 0, done.stderr
    assert "train 90, valid 5, test 5" in done.stdout
    verified = call("data", "verify", "lra-listops", "--workers", 1, *arguments).stdout
    assert "stand-in data: expressions generated here" in verified
