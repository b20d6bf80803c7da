"""A run is claimed by one process at a time, and a claim whose process is gone expires."""

import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from subquad.suite.store.claims import Claims, claim_path, find_claims, read_claim, sweep
from tests.processes import until, with_subquad
from tests.suite.toy import make_run


@pytest.fixture
def run():
    return make_run()


def path_of(run, root):
    return claim_path(root, run.experiment, run.scale, run.run_id)


def dead_claim(path, age_s=0.0, **changes):
    """A claim of a process of another machine, renewed so long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"host": "node7", "pid": 1, "process": "elsewhere", "token": "t", "since": "", "place": "", "expiry_s": 9}
    path.write_text(json.dumps({**values, **changes}))
    os.utime(path, (time.time() - age_s,) * 2)


def test_a_claim_says_who_holds_it_and_vanishes_at_the_end(tmp_path, run):
    with Claims(tmp_path) as claims:
        assert claims.take(run, place="cuda:1") is None
        (claim,) = find_claims(tmp_path, run.experiment)
        assert (claim.run_id, claim.scale, claim.pid, claim.place) == (run.run_id, run.scale, os.getpid(), "cuda:1")
        assert claim.live
        assert claim.age_s < 5
        with Claims(tmp_path) as others:
            assert others.take(run).token == claim.token
        # the others remove nothing that they do not hold
        assert path_of(run, tmp_path).exists()
    assert not list(tmp_path.rglob("*.claim*"))


def test_one_of_many_that_ask_at_once_gets_the_run(tmp_path, run):
    for expired in (False, True):
        if expired:
            dead_claim(path_of(run, tmp_path), age_s=10)
        ready, got = threading.Barrier(8), []

        def ask(ready=ready, got=got):
            claims = Claims(tmp_path)
            ready.wait()
            got.append(claims.take(run) is None)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == [False] * 7 + [True]
        path_of(run, tmp_path).unlink()
    assert not list(tmp_path.rglob("*.claim*"))


def test_a_claim_is_live_until_it_expires(tmp_path, run):
    path = path_of(run, tmp_path)
    with Claims(tmp_path) as claims:
        dead_claim(path, age_s=5)
        assert claims.take(run).holder == "node7, process 1"
        dead_claim(path, age_s=10)
        assert claims.take(run) is None
        assert read_claim(path).pid == os.getpid()


def test_expired_claims_are_swept_away_and_live_ones_stay(tmp_path, run):
    path = path_of(run, tmp_path)
    dead_claim(path, age_s=5)
    sweep(tmp_path, [run.experiment])
    assert path.exists()
    dead_claim(path, age_s=10)
    sweep(tmp_path, ["another/experiment"])
    assert path.exists()
    sweep(tmp_path, [run.experiment])
    assert not list(tmp_path.rglob("*.claim*"))


def test_the_clock_of_the_machine_does_not_matter(tmp_path, run, monkeypatch):
    dead_claim(path_of(run, tmp_path))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert Claims(tmp_path).take(run).host == "node7"


def grown_old(path, age_s):
    """Sets the time of a claim back."""
    os.utime(path, (time.time() - age_s,) * 2)


def test_a_claim_is_renewed_while_its_process_lives(tmp_path, run):
    path = path_of(run, tmp_path)
    # by the default, it would be renewed after 20 seconds
    with Claims(tmp_path, expiry_s=8.0) as claims:
        claims.take(run)
        grown_old(path, 7)
        assert until(lambda: read_claim(path).age_s < 7, seconds=15)
        assert Claims(tmp_path).take(run) is not None


@pytest.mark.parametrize("lives", [True, False])
def test_a_claim_is_renewed_only_while_its_run_gives_signs_of_life(tmp_path, run, lives, monkeypatch):
    path, now = path_of(run, tmp_path), [0.0]
    monkeypatch.setattr("subquad.suite.store.claims.time", SimpleNamespace(monotonic=lambda: now[0]))
    with Claims(tmp_path, expiry_s=0.4, silence_s=10) as claims:
        claims.take(run)
        now[0] = 9
        if lives:
            claims.alive(run)
        now[0] = 18
        grown_old(path, 1000)
        if lives:
            assert until(lambda: read_claim(path).age_s < 1000, seconds=15)
        else:
            # five times as long as between two renewals
            time.sleep(0.5)
            assert read_claim(path).age_s >= 1000


def test_a_claim_that_is_released_while_it_is_renewed_does_not_come_back(tmp_path, run, monkeypatch):
    path = path_of(run, tmp_path)
    releases, renewed = [], threading.Event()

    def renew(path):
        # on S3 a renewal writes the claim again, which takes time
        text = path.read_text()
        releases.append(threading.Thread(target=claims.release, args=(run,)))
        releases[-1].start()
        time.sleep(0.1)
        path.write_text(text)
        renewed.set()

    monkeypatch.setattr("subquad.suite.store.claims.renew", renew)
    with Claims(tmp_path, expiry_s=0.4) as claims:
        claims.take(run)
        assert renewed.wait(10)
        releases[0].join()
        assert not path.exists()


def test_a_claim_of_a_killed_process_of_this_machine_is_taken_over_at_once(tmp_path, run):
    script = (
        "import os, sys; from pathlib import Path; from types import SimpleNamespace\n"
        "from subquad.suite.store.claims import Claims\n"
        "run = SimpleNamespace(**dict(zip(('experiment', 'scale', 'run_id'), sys.argv[2:])))\n"
        "Claims(Path(sys.argv[1])).take(run); os.kill(os.getpid(), 9)"
    )
    names = run.experiment, run.scale, run.run_id
    subprocess.run([sys.executable, "-c", script, str(tmp_path), *names], env=with_subquad())
    path = path_of(run, tmp_path)
    assert not read_claim(path).live
    assert Claims(tmp_path).take(run) is None
    assert read_claim(path).pid == os.getpid()


def test_a_process_that_lost_its_claim_leaves_that_of_the_other(tmp_path, run):
    path = path_of(run, tmp_path)
    with Claims(tmp_path) as claims:
        claims.take(run)
        dead_claim(path)
        claims.release(run)
    assert read_claim(path).host == "node7"


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b'{"pid": "x"}'])
def test_a_file_that_holds_no_claim_counts_as_one_until_it_expires(tmp_path, run, content):
    path = path_of(run, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert Claims(tmp_path).take(run).host == "unknown host"
    os.utime(path, (time.time() - 1000,) * 2)
    assert Claims(tmp_path).take(run) is None


def make_pipe(path):
    os.mkfifo(path)


def make_dangling_link(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [make_pipe, make_dangling_link, os.mkdir])
def test_what_is_no_file_in_place_of_a_claim_does_not_hang(tmp_path, run, make):
    path = path_of(run, tmp_path)
    path.parent.mkdir(parents=True)
    make(path)
    assert Claims(tmp_path).take(run).host == "unknown host"


@pytest.mark.parametrize("make", [make_pipe, os.mkdir])
def test_what_is_no_file_in_place_of_an_old_claim_is_named_and_not_waited_for(tmp_path, run, make):
    path = path_of(run, tmp_path)
    path.parent.mkdir(parents=True)
    make(path)
    os.utime(path, (time.time() - 1000,) * 2)
    with pytest.raises(OSError, match=r"\.claim is no file, and so no claim; remove it"):
        Claims(tmp_path).take(run)
    sweep(tmp_path, [run.experiment])
    assert path.exists()
    # a link is replaced by the claim
    path.rmdir() if path.is_dir() else path.unlink()
    path.symlink_to("nowhere")
    os.utime(path, (time.time() - 1000,) * 2, follow_symlinks=False)
    assert Claims(tmp_path).take(run) is None
    assert path.is_file()


def test_temporary_files_of_killed_writers_are_swept_by_age(tmp_path):
    folder = tmp_path / "toy" / "paper"
    folder.mkdir(parents=True)
    for name, age_s in ((".ab.parquet.node.7.0a.tmp", 90_000), (".cd.parquet.node.7.0b.tmp", 80_000), ("kept", 90_000)):
        (folder / name).touch()
        then = time.time() - age_s
        os.utime(folder / name, (then, then))
    sweep(tmp_path, ["toy"])
    assert sorted(path.name for path in folder.iterdir()) == [".cd.parquet.node.7.0b.tmp", "kept"]
