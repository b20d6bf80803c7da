"""Results and checkpoints on an S3 server, which the test starts."""

import logging
import threading
import time
from dataclasses import replace

import pytest
import torch

from subquad.suite.executors.contract import Settings
from subquad.suite.executors.local import OutOfTimeError, run_all
from subquad.suite.runner import ENDED, execute, plan
from subquad.suite.store import elsewhere, endings, storage
from subquad.suite.store.claims import Claims, claim_path, find_claims, read_claim
from subquad.suite.store.status import standings
from subquad.suite.store.target import create, probe, stamp, target, time_at
from subquad.suite.training import checkpoints
from tests.processes import until
from tests.suite.test_parts import PLACE, everything, identity, published, store
from tests.suite.test_workers import Recording, values
from tests.suite.toy import make_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def server():
    """Address of an S3 server with a bucket `results`."""
    pytest.importorskip("s3fs", reason="needs s3fs; pip install -e '.[s3]'")
    pytest.importorskip("upath", reason="needs universal_pathlib; pip install -e '.[s3]'")
    moto = pytest.importorskip("moto.moto_server.threaded_moto_server", reason="needs moto and flask")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    started = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    yield f"http://{host}:{port}"
    started.stop()


@pytest.fixture
def s3(server, monkeypatch):
    """An empty place on the server."""
    variables = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "ENDPOINT_URL": server}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    import s3fs

    files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    if not files.exists("results"):
        files.mkdir("results")
    return target(f"s3://results/{time.monotonic_ns()}")


def test_a_grid_on_s3_has_the_rows_of_one_in_a_folder(s3, tmp_path):
    runs = [make_run(seed=seed) for seed in range(2)]
    for root in (s3, tmp_path):
        probe(root)
        ended = run_all(runs, root, CPU, Recording())
        assert [finished.status for finished in ended] == ["ok", "ok"]
    assert values(s3, runs) == values(tmp_path, runs)
    assert [item.stored for item in plan(runs, [s3])] == ["ok", "ok"]
    assert [standing.state for standing in standings(runs, s3)] == ["ok", "ok"]
    # claims, checkpoints and temporary files are gone
    assert {path.suffix for path in s3.rglob("*") if path.is_file()} == {".parquet", ".jsonl"}


def test_runs_are_published_to_s3_and_from_there(s3, tmp_path):
    local = store(tmp_path / "local", 1, 2)
    (path,) = published(local, s3)
    assert everything(s3) == everything(local)
    assert [ended.status for ended in endings.endings_of(s3, [(*PLACE, identity(2))])] == ["ok"]
    assert endings.files_of(s3, [(*PLACE, identity(number)) for number in (1, 5)]) == [path]
    assert published(local, s3) == []
    assert [again.name for again in published(s3, tmp_path / "back")] == [path.name]


def test_rows_of_another_experiment_on_s3_are_taken(s3):
    run = make_run()
    run_all([run], s3, CPU, Recording())
    other = replace(run, experiment="toy/other")
    assert [standing.state for standing in standings([other], s3)] == ["elsewhere"]
    assert elsewhere.take([other], elsewhere.find([other], s3), s3) == [other]
    assert values(s3, [other]) == values(s3, [run])
    assert not list(s3.rglob("*.claim"))


@pytest.mark.slow
def test_an_interrupted_run_continues_from_its_checkpoint_on_s3(s3, tmp_path):
    run = make_run(model={"fault": "slow"}, train={"epochs": 30})
    path = storage.checkpoint_path(s3, run.experiment, run.scale, run.run_id)
    # the time is up long before the run ends, and on a busy machine it may be before the run has begun, too
    for within_s in (2, 5, 15):
        with pytest.raises(OutOfTimeError):
            run_all([run], s3, CPU, Recording(), Settings(within_s=within_s))
        if path.exists():
            break
    assert path.exists()
    assert standings([run], s3)[0].state == "interrupted"
    run_all([run], s3, CPU, Recording())
    run_all([run], tmp_path, CPU, Recording())
    assert values(s3, [run]) == values(tmp_path, [run])
    assert not path.exists()


def test_one_process_at_a_time_has_a_run_on_s3(s3):
    run = make_run()
    with Claims(s3) as mine, Claims(s3) as theirs:
        assert mine.take(run, "here") is None
        holder = theirs.take(run)
        assert holder is not None
        assert holder.live
        assert "here" in holder.holder
        assert [claim.run_id for claim in find_claims(s3, run.experiment)] == [run.run_id]
        mine.release(run)
        assert theirs.take(run) is None
    assert find_claims(s3, run.experiment) == []


def test_an_expired_claim_on_s3_is_taken_over_and_left_to_its_new_holder(s3):
    run = make_run()
    # it never renews its claims, because it is not entered
    old = Claims(s3, expiry_s=0.0)
    with Claims(s3) as new:
        assert old.take(run, "old") is None
        assert new.take(run, "new") is None
        old.release(run)
        (claim,) = find_claims(s3, run.experiment)
        assert claim.place == "new"


def test_a_claim_on_s3_is_renewed(s3):
    run = make_run()
    path = claim_path(s3, run.experiment, run.scale, run.run_id)
    with Claims(s3, expiry_s=4.0) as claims:
        claims.take(run)
        then = path.stat().st_mtime
        assert until(lambda: path.stat().st_mtime > then, seconds=15)


def test_only_one_of_many_threads_creates_a_file_on_s3(s3):
    made = []
    threads = [threading.Thread(target=lambda: made.append(create(s3 / "one", "text"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.count(True) == 1
    assert abs(time_at(s3) - time.time()) < 60
    before = stamp(s3 / "one")
    (s3 / "one").write_text("other")
    assert before != stamp(s3 / "one")
    assert stamp(s3 / "two") is None


def test_rows_that_cannot_be_written_to_s3_are_a_failed_run(s3):
    run = make_run()
    finished = execute(run, target("s3://no-such-bucket/folder"), CPU)
    assert finished.status not in ENDED
    assert "could not be written" in finished.error


def test_a_store_that_does_not_answer_raises_oserror_whatever_its_library_raises(monkeypatch):
    upath = pytest.importorskip("upath", reason="needs universal_pathlib; pip install -e '.[s3]'")

    class LibraryError(Exception):
        pass

    def fail(*arguments, **options):
        raise LibraryError

    place, run = upath.UPath("memory://lost"), make_run()
    path = claim_path(place, run.experiment, run.scale, run.run_id)
    with Claims(place, expiry_s=0.2) as claims:
        assert claims.take(run) is None
        claim = read_claim(path)
        for name in (
            "exists",
            "info",
            "ls",
            "find",
            "glob",
            "open",
            "cat_file",
            "pipe_file",
            "put_file",
            "rm",
            "rm_file",
        ):
            monkeypatch.setattr(type(place.fs), name, fail)
        for ask in (
            *(lambda: create(path, ""), lambda: stamp(path), lambda: endings.ending(path), lambda: probe(place)),
            *(lambda: read_claim(path), lambda: find_claims(place, run.experiment), lambda: checkpoints.remove(path)),
            *(lambda: claims.take(run), lambda: storage.files([place], run.experiment)),
        ):
            with pytest.raises(OSError, match="memory://lost"):
                ask()
        time.sleep(0.2)
        monkeypatch.undo()
        # the claim is renewed once the store is there again
        assert until(lambda: read_claim(path).age_s < claim.age_s + 0.2, seconds=15)
    assert not path.exists()


@pytest.mark.slow
def test_worker_processes_share_s3(s3):
    runs = [make_run(seed=seed) for seed in range(4)]
    ended = run_all(runs, s3, CPU, Recording(), jobs=2)
    assert sorted(finished.run.run_id for finished in ended) == sorted(run.run_id for run in runs)
    assert {standing.state for standing in standings(runs, s3)} == {"ok"}


FEW = ("train.steps=2", "train.eval_every=2", "train.batch_size=4", "task.num_train=8", "task.num_test=8")
ONE = ("quickstart", "--only", "model.name=linear-attention", "--only", "model.d_model=8", "--seeds", 1)


@pytest.mark.slow
def test_commands_take_an_address(s3, command_line):
    settings = [word for setting in FEW for word in ("--set", setting)]
    asked = (*ONE, *settings, "--results", s3)
    done = command_line("run", *asked, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 runs are already stored in s3://results/" in command_line("run", *asked, "--device", "cpu").stdout
    assert "1 run, 1 ok" in command_line("status", *asked).stdout
    assert "Linear attention" in command_line("report", "quickstart", "--results", s3).stdout


@pytest.mark.parametrize(
    ("address", "words"),
    [("s3://no-such-bucket/x", "nothing can be written there"), ("nosuch://x", "nosuch"), ("s3://", "bucket")],
)
def test_an_address_that_does_not_work_is_one_line_and_exit_code_2(s3, command_line, address, words):
    done = command_line("run", "quickstart", "--results", address, "--device", "cpu")
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
