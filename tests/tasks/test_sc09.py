"""SC09: clips as levels, and a judge that tells generated clips from real ones."""

import functools
import io
import shutil

import numpy as np
import pytest
import torch

from subquad.suite.contracts import TaskSpec
from subquad.suite.training.trainer import Trainer
from subquad.tasks.audio import ZERO, mu_law, mu_law_decode, stretched
from subquad.tasks.data import DataError, obtain
from subquad.tasks.judge import Judge, judged, mel_filters
from subquad.tasks.sc09 import DIGITS, SC09
from tests.runs import one_run

soundfile = pytest.importorskip("soundfile")

CPU = torch.device("cpu")
RATE = 16_000
LENGTH = 2048
SPEAKERS = [f"{i:08x}" for i in range(12)]


def voice(word, speaker, frames=LENGTH):
    """A tone for every word, whose pitch and phase depend on the speaker."""
    rng = np.random.default_rng(100 * word + speaker)
    time = np.arange(frames) / RATE
    pitch = 300 * 1.35**word * (1 + 0.02 * rng.normal())
    wave = np.sin(2 * np.pi * pitch * time + rng.uniform(0, 6)) + 0.05 * rng.normal(size=frames)
    return np.round(6000 * wave).astype(np.int16)


@functools.cache
def recorded(word, speaker, frames):
    """The file of a voice, which many tests write."""
    file = io.BytesIO()
    soundfile.write(file, voice(word, speaker, frames), RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def record(folder):
    for i, word in enumerate(DIGITS):
        (folder / word).mkdir()
        for j, name in enumerate(SPEAKERS):
            frames = 1500 if (i, j) == (0, 0) else LENGTH
            (folder / word / f"{name}_nohash_0.wav").write_bytes(recorded(i, j, frames))
    for name, speakers in (("testing_list.txt", SPEAKERS[:3]), ("validation_list.txt", SPEAKERS[3:5])):
        lines = [f"{word}/{speaker}_nohash_0.wav\n" for word in DIGITS for speaker in speakers]
        (folder / name).write_text("".join(lines) + "bed/00000000_nohash_0.wav\n")
    return folder


@pytest.fixture
def folder(tmp_path):
    return record(tmp_path)


def load(folder, split, **options):
    (segment,) = SC09(data=folder, length=LENGTH, **options).segments(split, 0)
    return segment


def test_rows_are_the_levels_of_clips_and_inputs_the_samples_before(folder):
    segment = load(folder, "valid")
    assert segment.targets.shape == (20, LENGTH)
    assert segment.inputs.dtype == segment.targets.dtype == torch.uint8
    assert segment.targets[3].numpy().tolist() == mu_law(stretched(voice(1, 4))).tolist()
    assert (segment.inputs[:, 0] == ZERO).all()
    assert torch.equal(segment.inputs[:, 1:], segment.targets[:, :-1])


def test_official_lists_keep_speakers_apart(folder):
    assert [len(load(folder, split)) for split in ("train", "valid", "test")] == [70, 20, 30]


def test_a_short_clip_ends_in_silence_which_is_predicted_too(folder):
    row = load(folder, "test", scaling="unit").targets[0]
    assert (row[1500:] == ZERO).all()
    assert (row[:1500] != ZERO).float().mean() > 0.9


def test_it_is_found_in_the_cache_as_itself_or_within_speech_commands(folder, tmp_path_factory):
    import tarfile

    with pytest.raises(DataError, match=r"sc09: no data; call `python run_suite.py data prepare sc09`"):
        SC09(length=LENGTH).fingerprint()
    archive = tmp_path_factory.mktemp("download") / "speech.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    obtain("speech-commands", [archive])
    assert SC09(length=LENGTH).counts() == {"train": 70, "valid": 20, "test": 30}


def test_stand_in_data_say_so(folder):
    assert SC09(data=folder, length=LENGTH).stand_in == "120 clips of the digits; SC09 has 31158"
    other = SC09(data=folder, length=LENGTH, words=("one", "two"))
    assert other.stand_in == "24 clips of 2 other words, not the digits"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"words": ("one", "ten")}, "'ten' is no word of Speech Commands"),
        ({"words": ("one", "one")}, "two or more different ones"),
        ({"num_generated": 1}, "num_generated=1 has no spread"),
    ],
)
def test_options_that_cannot_work_are_errors(folder, options, words):
    with pytest.raises(ValueError, match=words):
        _ = SC09(data=folder, length=LENGTH, **options).spec


def test_a_word_without_a_clip_is_an_error(folder):
    for path in (folder / "six").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"no WAV files in .*six"):
        SC09(data=folder, length=LENGTH).fingerprint()


def test_the_defaults_fit_a_model_without_data():
    assert SC09().spec == TaskSpec("tokens", 256, "token", 16_000, vocab_size=256)


def test_mel_filters_are_triangles_that_cover_every_frequency_once():
    filters = mel_filters(40, 257, RATE)
    assert filters.shape == (40, 257)
    assert (filters >= 0).all()
    assert filters.max() <= 1
    # between the first and the last peak, neighbouring filters sum to one
    inside = slice(int(filters[0].argmax()) + 1, int(filters[-1].argmax()))
    np.testing.assert_allclose(filters.sum(0)[inside], 1, atol=1e-9)
    assert (np.diff(filters.argmax(1)) >= 0).all()


def rows_of(task, split):
    return {(s, metric): value for s, metric, value in task.judge(load_clips(task, split), CPU)}


def load_clips(task, split):
    (segment,) = task.segments(split, 0)
    return segment.targets.long()


def of_four_words(folder):
    return SC09(data=folder, length=LENGTH, words=("zero", "three", "six", "nine"), num_generated=20, judge_steps=30)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A cache in which a judge is kept, and what it said of the validation clips when it had been trained."""
    cache = tmp_path_factory.mktemp("judge")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_DATA", str(cache))
        return cache, rows_of(of_four_words(record(tmp_path_factory.mktemp("recordings"))), "valid")


@pytest.fixture
def task(folder, trained, cache_root):
    shutil.copytree(trained[0], cache_root, dirs_exist_ok=True)
    return of_four_words(folder)


def test_the_judge_knows_the_words_and_real_clips_from_noise(task):
    real = rows_of(task, "valid")
    assert real["test", "judge_accuracy"] > 0.9
    assert {metric for split, metric in real if split == "generated"} == {
        "fid",
        "inception_score",
        "modified_inception_score",
        "am_score",
    }
    noise = torch.randint(0, 256, (20, LENGTH), generator=torch.Generator().manual_seed(0))
    made = {(s, m): value for s, m, value in task.judge(noise, CPU)}
    # the scores of the real clips do not depend on the generated ones
    assert {key: value for key, value in made.items() if key[0] == "test"} == {
        key: value for key, value in real.items() if key[0] == "test"
    }
    assert made["generated", "fid"] > 5 * real["generated", "fid"]
    assert made["generated", "inception_score"] < 0.7 * real["generated", "inception_score"]
    assert made["generated", "am_score"] > real["generated", "am_score"]


def test_test_clips_given_as_generated_ones_get_the_same_scores(task):
    found = rows_of(task, "test")
    for metric in ("fid", "inception_score", "modified_inception_score", "am_score"):
        assert found["generated", metric] == pytest.approx(found["test", metric])


def test_one_word_alone_has_an_inception_score_of_one_at_most_two(task):
    clips = load_clips(task, "valid")[4:6].repeat(4, 1)
    found = {(s, m): value for s, m, value in task.judge(clips, CPU)}
    assert 1 <= found["generated", "inception_score"] < 2
    assert found["generated", "am_score"] > found["test", "am_score"]


def test_the_judge_is_trained_once_and_kept(task, trained, cache_root):
    (path,) = cache_root.rglob("judge.pt")
    kept = path.stat()
    assert rows_of(task, "valid") == trained[1]
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns), "it was trained again"


@pytest.mark.slow
def test_the_judge_is_the_same_every_time_and_touches_no_generator(task, cache_root, monkeypatch):
    first = rows_of(task, "valid")
    torch.manual_seed(11)
    before = torch.get_rng_state()
    monkeypatch.setenv("SUBQUAD_DATA", str(cache_root / "another"))
    assert rows_of(task, "valid") == first
    assert torch.equal(torch.get_rng_state(), before)


def test_a_damaged_judge_is_named(task, cache_root):
    (path,) = cache_root.rglob("judge.pt")
    whole = path.read_bytes()
    # one byte of a weight
    for content in (
        b"half",
        whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :],
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"judge-\w+: damaged \(\w+\); remove this folder"):
            rows_of(task, "valid")


def test_judged_gives_probabilities_of_every_word():
    judge = Judge(7, RATE).eval()
    features, log_p = judged(judge, torch.randn(3, LENGTH))
    assert features.shape == (3, 128)
    np.testing.assert_allclose(np.exp(log_p).sum(1), 1)


def test_levels_survive_the_way_to_the_judge():
    levels = np.arange(256, dtype=np.uint8)
    assert mu_law(mu_law_decode(levels)).tolist() == levels.tolist()


@pytest.mark.parametrize(
    ("model", "status"), [({"name": "s4d"}, "ok"), ({"name": "s4d", "bidirectional": True}, "n/a")]
)
def test_a_run_generates_and_reports_what_the_judge_says(folder, model, status):
    run = one_run(
        {
            "name": "sc09",
            "data": str(folder),
            "length": 1024,
            "num_generated": 6,
            "judge_steps": 5,
        },
        {"d_model": 8, "d_state": 4, "num_layers": 1, **model},
        {"steps": 2, "batch_size": 4},
    )
    rows = [row for row in Trainer(run, CPU)().rows if row["split"] == "generated"]
    assert {row["status"] for row in rows} == {status}
    if status == "ok":
        assert {row["metric"] for row in rows} == {"fid", "inception_score", "modified_inception_score", "am_score"}
        assert all(np.isfinite(row["value"]) for row in rows)
    else:
        assert "reads the future and has no step" in rows[0]["error"]
