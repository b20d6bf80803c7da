"""Audio: levels of the mu-law, rows of recordings, bits per sample, and recordings that cannot be used."""

import math

import numpy as np
import pytest
import torch

from subquad.suite.contracts import IGNORE
from subquad.suite.training.trainer import Trainer
from subquad.tasks.audio import (
    LEVELS,
    RATE,
    ZERO,
    Recordings,
    YouTubeMix,
    mu_law,
    mu_law_decode,
    read_recording,
    stretched,
)
from subquad.tasks.data import obtain
from subquad.tasks.data.faults import DataError, NoDataError
from tests.drawn import only
from tests.runs import one_run

soundfile = pytest.importorskip("soundfile")


def noise(seed, frames=1000):
    return np.random.default_rng(seed).integers(-9000, 9000, frames).astype(np.int16)


def write(path, wave, rate=RATE):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave, rate, subtype="PCM_16")


@pytest.fixture
def folder(tmp_path):
    """20 clips whose names have another order by the alphabet than by their numbers."""
    for i in range(20):
        write(tmp_path / f"out{i}.wav", noise(i))
    return tmp_path


def unit(wave):
    return wave.astype(np.float32) / 2**15


def test_levels_are_ordered_symmetric_and_fill_the_range():
    wave = np.linspace(-1, 1, 20_001)
    levels = mu_law(wave)
    assert (np.diff(levels.astype(int)) >= 0).all()
    assert set(levels.tolist()) == set(range(LEVELS))
    assert mu_law(np.zeros(1)) == ZERO
    assert (levels.astype(int) + levels[::-1].astype(int))[levels != ZERO].tolist() == [255] * (levels != ZERO).sum()


def test_decoded_levels_encode_to_themselves_and_errors_are_smallest_near_silence():
    levels = np.arange(LEVELS).astype(np.uint8)
    assert (mu_law(mu_law_decode(levels)) == levels).all()
    wave = np.linspace(-1, 1, 20_001)
    error = np.abs(mu_law_decode(mu_law(wave)) - wave)
    assert error[np.abs(wave) < 0.01].max() < 4e-4 < 1e-2 < error.max() < 3e-2


def test_rows_are_shifted_by_one_and_never_cross_a_recording(folder):
    segment = only(Recordings(data=folder, length=300, scaling="unit"), "train")
    assert segment.inputs.shape == (17 * 3, 300)
    for row, (inputs, targets) in enumerate(zip(segment.inputs.numpy(), segment.targets.numpy(), strict=True)):
        start = row % 3 * 300
        assert (targets == mu_law(unit(noise(row // 3)[start : start + 300]))).all()
        assert inputs[0] == ZERO
        assert (inputs[1:] == targets[:-1]).all()
    assert segment.inputs.dtype == segment.targets.dtype == torch.uint8


def test_files_split_88_6_6_in_the_order_of_their_numbers(folder):
    task = Recordings(data=folder, length=1000, scaling="unit")
    expected = {"train": range(17), "valid": range(17, 18), "test": range(18, 20)}
    for split, numbers in expected.items():
        found = only(task, split).targets.numpy()
        assert (found == np.stack([mu_law(unit(noise(i))) for i in numbers])).all()


def test_few_recordings_are_each_cut(tmp_path):
    for i in range(2):
        write(tmp_path / f"{i}.wav", noise(i))
    task = Recordings(data=tmp_path, length=60, scaling="unit")
    for split, (low, high) in {"train": (0, 880), "valid": (880, 940), "test": (940, 1000)}.items():
        targets = only(task, split).targets
        assert len(targets) == 2 * ((high - low) // 60)
        assert (targets[0].numpy() == mu_law(unit(noise(0)[low : low + 60]))).all()


def test_rows_are_stretched_one_by_one_as_in_the_source(folder):
    targets = only(Recordings(data=folder, length=500), "valid").targets.numpy()
    assert (targets.min(axis=1) == 0).all()
    assert (targets.max(axis=1) == 255).all()
    assert (targets[1] == mu_law(stretched(noise(17)[500:]))).all()
    # a constant row has no range
    assert np.isfinite(stretched(np.full(5, 7, dtype=np.int16))).all()


@pytest.mark.parametrize("length", [20, 23, 59, 700])
@pytest.mark.parametrize(
    ("recordings", "valid", "test"),
    [
        (2, [(0, 880, 940), (1, 880, 940)], [(0, 940, 1000), (1, 940, 1000)]),
        (20, [(17, 0, 1000)], [(18, 0, 1000), (19, 0, 1000)]),
    ],
)
def test_padded_rows_test_every_sample_once_at_any_length(tmp_path, recordings, valid, test, length):
    """If the rest of a stretch were dropped, two lengths would be judged on different samples."""
    for i in range(recordings):
        write(tmp_path / f"{i}.wav", noise(i))
    task = Recordings(data=tmp_path, length=length, scaling="unit", rest="pad")
    for split, stretches in (("valid", valid), ("test", test)):
        inputs, targets = only(task, split).inputs.long(), only(task, split).targets.long()
        counted = targets != IGNORE
        expected = np.concatenate([mu_law(unit(noise(i)[low:high])) for i, low, high in stretches])
        assert targets[counted].tolist() == expected.tolist()
        assert (inputs[:, 0] == ZERO).all()
        assert torch.equal(inputs[:, 1:][counted[:, :-1]], targets[:, :-1][counted[:, :-1]])
    # training rows are whole
    train = only(task, "train").targets
    assert train.dtype == torch.uint8
    assert len(train) == (2 * (880 // length) if recordings == 2 else 17 * (1000 // length))


def test_score_gives_bits_a_sample(folder):
    task = Recordings(data=folder, length=500)
    segment = only(task, "test")
    total, count = task.score(torch.zeros(*segment.targets.shape, LEVELS), segment.targets)["bits_per_sample"]
    assert float(total / count) == pytest.approx(8)
    assert count == 2 * 1000


def test_recordings_of_another_rate_are_refused_or_resampled(tmp_path):
    pytest.importorskip("scipy")
    for i in range(2):
        time = np.arange(8000) / 8000
        wave = np.stack([np.sin(2 * np.pi * 200 * time), np.zeros(8000)], axis=1)
        write(tmp_path / f"{i}.wav", wave, 8000)
    with pytest.raises(DataError, match=r"0.wav: has a sampling rate of 8000 Hz, needs 16000; resample it, or set"):
        Recordings(data=tmp_path, length=64).fingerprint()
    samples = Recordings(data=tmp_path, length=64, resample=True).arrays()["samples"]
    assert len(samples) == 2 * 16_000
    expected = 0.5 * np.sin(2 * np.pi * 200 * np.arange(16_000) / RATE)
    assert np.abs(samples[200:15_800] / 2**15 - expected[200:15_800]).max() < 0.01


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), r"out3.wav: truncated"),
        (lambda path: path.write_bytes(b"no sound"), r"out3.wav: cannot be decoded"),
        (lambda path: write(path, noise(0, 0)), r"out3.wav: holds no sound"),
    ],
)
def test_a_bad_recording_is_met_before_a_run_and_named(folder, damage, message):
    damage(folder / "out3.wav")
    with pytest.raises(DataError, match=message):
        Recordings(data=folder, length=100).fingerprint()


@pytest.mark.parametrize(
    ("form", "options"),
    [("WAV", {"endian": "BIG"}), ("RF64", {}), ("AIFF", {}), ("OGG", {"subtype": "VORBIS"}), ("MP3", {})],
)
def test_a_recording_of_any_container_that_was_cut_off_is_refused(tmp_path, form, options):
    path = tmp_path / "out.wav"
    soundfile.write(path, unit(noise(1, 20_000)), RATE, format=form, **options)
    whole = path.read_bytes()
    assert len(read_recording(path, resample=False)) == 20_000
    last_page = len(whole) - whole.rfind(b"OggS") if form == "OGG" else 2
    for missing in (1, 999, len(whole) // 2, last_page):
        path.write_bytes(whole[:-missing])
        with pytest.raises(DataError, match=r"out\.wav: truncated"):
            read_recording(path, resample=False)


def test_rows_longer_than_any_recording_say_what_to_do(folder, tmp_path_factory, monkeypatch):
    with pytest.raises(
        DataError, match=r"no train stretch of .* has 2000 samples \(the longest has 1000\); lower length"
    ):
        Recordings(data=folder, length=2000).fingerprint()
    with pytest.raises(NoDataError, match="give --data DIR, a folder of recordings"):
        Recordings().fingerprint()
    with pytest.raises(DataError, match="data prepare youtubemix"):
        YouTubeMix().fingerprint()
    with pytest.raises(DataError, match="does not hold recordings"):
        Recordings(data=tmp_path_factory.mktemp("empty")).fingerprint()
    write(folder / "out20.wav", noise(20))
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(DataError, match=r"install -e '\.\[audio\]'"):
        Recordings(data=folder, length=100).fingerprint()


def test_prepared_youtubemix_is_found_and_is_a_stand_in_unless_it_is_long(folder, tmp_path_factory):
    import zipfile

    archive = tmp_path_factory.mktemp("download") / "youtube_mix.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in sorted(folder.iterdir()):
            packed.write(path, f"youtube_mix/{path.name}")
    obtain("youtubemix", [archive])
    task = YouTubeMix(length=500)
    assert torch.equal(only(task, "train").inputs, only(YouTubeMix(data=folder, length=500), "train").inputs)
    assert task.stand_in == "20 recordings, 0.00 hours; YouTubeMix has about 4"


@pytest.mark.parametrize("length", [pytest.param(8192, marks=pytest.mark.slow), 120_832])
def test_the_real_piano_loads_at_lengths_of_table_14(shared, length):
    pytest.importorskip("scipy")
    task = Recordings(data=shared("piano"), length=length, resample=True)
    segments = {split: only(task, split) for split in ("train", "valid", "test")}
    assert segments["train"].inputs.shape[1] == length
    used = sum(len(segment) for segment in segments.values()) * length / RATE
    assert 300 < used < 386
    assert task.stand_in == "3 recordings, 386 s, of the user's own"
    levels = (
        np.bincount(segments["train"].targets.numpy().ravel(), minlength=LEVELS) / segments["train"].targets.numel()
    )
    entropy = -(levels[levels > 0] * np.log2(levels[levels > 0])).sum()
    assert 5 < entropy < 8


@pytest.mark.slow
def test_a_run_reports_bits_a_sample(folder):
    for i in range(20):
        write(folder / f"out{i}.wav", np.tile(np.array([-9000, 0, 9000, 0], dtype=np.int16), 100))
    run = one_run(
        {"name": "recordings", "data": str(folder), "length": 32},
        {"name": "linear-attention", "d_model": 16, "num_layers": 1, "num_heads": 1},
        {"steps": 60, "batch_size": 8, "lr": 0.01},
    )
    rows = Trainer(run, torch.device("cpu"))().rows
    final = {row["metric"]: row["value"] for row in rows if row["split"] == "test"}
    assert final["bits_per_sample"] == pytest.approx(final["loss"] / math.log(2))
    assert final["bits_per_sample"] < 3, "nothing was learned of a wave that repeats itself"


@pytest.mark.parametrize(
    ("riff", "data"),
    [(0xFFFFFFFF, 0xFFFFFFFF), (0x7FFFF024, 0x7FFFF000), (0xFFFFFFFF, 0xFFFFFFDB)],
    ids=["ffmpeg", "sox", "gstreamer"],
)
def test_a_wav_from_a_pipe_is_read_to_its_end(folder, riff, data):
    path, wave = folder / "out3.wav", noise(3)
    content = bytearray(path.read_bytes())
    at = content.index(b"data") + 4
    content[4:8], content[at : at + 4] = riff.to_bytes(4, "little"), data.to_bytes(4, "little")
    path.write_bytes(content)
    arrays = Recordings(data=folder, length=300).arrays()
    assert arrays["samples"][3000:4000].tolist() == wave.tolist()
    # a header of a known size is still believed
    (folder / "out4.wav").write_bytes((folder / "out4.wav").read_bytes()[:-100])
    with pytest.raises(DataError, match=r"out4\.wav: truncated"):
        Recordings(data=folder, length=300).arrays(force=True)


@pytest.mark.parametrize(
    ("sample", "message"), [(np.nan, "samples that are not finite"), (-9000.0, "samples of up to 9000, where full")]
)
def test_floats_that_are_no_samples_are_refused(folder, sample, message):
    soundfile.write(folder / "out0.wav", np.array([0.0, sample, 0.5]), RATE, subtype="FLOAT")
    with pytest.raises(DataError, match=rf"out0\.wav: holds {message}"):
        Recordings(data=folder, length=300).arrays()


def test_channels_that_cancel_each_other_are_refused(folder):
    """Their mean is silence; a recording that is silent itself is none of their kind."""
    soundfile.write(folder / "out0.wav", np.zeros((1000, 2)), RATE)
    assert not Recordings(data=folder, length=300).arrays()["samples"][:1000].any()
    soundfile.write(folder / "out0.wav", np.outer(noise(3), [1, -1]) / 2**16, RATE)
    with pytest.raises(DataError, match=r"out0\.wav: its channels cancel each other in their mean; keep one"):
        Recordings(data=folder, length=300).arrays()


def test_hidden_files_are_no_recordings(folder):
    (folder / "._out0.wav").write_bytes(b"a resource fork")
    assert len(Recordings(data=folder, length=300).arrays()["ends"]) == 20
