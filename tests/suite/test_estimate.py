"""The time that runs will take is that of stored runs like them."""

import zlib

import pyarrow.parquet as pq
import pytest

from subquad.suite.store import documents, endings, storage
from subquad.suite.store.estimate import estimate
from tests.stored import store as store_rows
from tests.suite.toy import make_run


def store(root, run, seconds, device="GPU", **columns):
    row = {"metric": "run", "device": device, "duration_s": seconds, **columns}
    return store_rows(root, [row], run.resolved, experiment=run.experiment, scale=run.scale)


def test_a_run_takes_as_long_as_its_other_seeds_or_else_as_its_model_on_its_task(tmp_path):
    wanted = make_run(seed=0)
    files = [store(tmp_path, make_run(seed=1, train={"epochs": 9}), 3600.0)]
    assert estimate([wanted], files) == ["about 1 hours of GPU for 1 run to do"]
    files += [store(tmp_path, make_run(seed=seed), 7200.0 * seed) for seed in (1, 2, 3)]
    assert estimate([wanted], files) == ["about 4 hours of GPU for 1 run to do"]


@pytest.mark.parametrize(("seconds", "words"), [(17.3, "17 seconds"), (359, "6 minutes"), (360, "0.1 hours")])
def test_short_times_are_not_said_in_hours(tmp_path, seconds, words):
    files = [store(tmp_path, make_run(seed=1), seconds)]
    assert estimate([make_run(seed=0)], files) == [f"about {words} of GPU for 1 run to do"]


def test_each_kind_of_device_has_an_estimate_of_its_own(tmp_path):
    files = [store(tmp_path, make_run(seed=seed), 3600.0 * seed, device=f"GPU {seed}") for seed in (1, 2)]
    assert estimate([make_run(seed=0)], files) == [
        "2 estimates, each for one device and from the runs that it has done:",
        "about 1 hours of GPU 1 for 1 run to do",
        "about 2 hours of GPU 2 for 1 run to do",
    ]


def test_a_shared_device_counts_by_its_share_and_failures_do_not(tmp_path):
    shared = store(tmp_path, make_run(seed=1), 7200.0, device="GPU, 4 runs")
    failed = store(tmp_path, make_run(seed=2), 1.0, status="failed")
    assert estimate([make_run(seed=0)], [shared, failed]) == ["about 0.5 hours of GPU for 1 run to do"]


@pytest.mark.parametrize(
    ("jobs", "wall"),
    [(None, ""), (1, ", at most 2 hours with --jobs 1"), (2, ", at most 1 hours with --jobs 2"), (4, ""), (8, "")],
)
def test_the_wall_time_of_fewer_runs_at_a_time_than_were_measured_is_bounded(tmp_path, jobs, wall):
    shared = store(tmp_path, make_run(seed=1), 7200.0, device="GPU, 4 runs")
    assert estimate([make_run(seed=0)], [shared], jobs=jobs) == [f"about 0.5 hours of GPU for 1 run to do{wall}"]


@pytest.mark.parametrize("footer", [None, b'{"status": "ok", "operators": null, "error": ""}'])
def test_rows_whose_footer_does_not_say_what_they_are_like_count_too(tmp_path, footer):
    path = store(tmp_path, make_run(seed=1), 3600.0)
    metadata = footer and {documents.ENDING: f"{zlib.crc32(footer):08x} ".encode() + footer}
    pq.write_table(storage.load(path).replace_schema_metadata(metadata), path)
    assert estimate([make_run(seed=0)], [path]) == ["about 1 hours of GPU for 1 run to do"]
    assert endings.ending(path).status == "ok"
