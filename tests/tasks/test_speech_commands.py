"""Speech Commands: folders, splits, and faults that name the file."""

import functools
import io
import sys

import numpy as np
import pytest
import torch

from subquad.suite.training.trainer import Trainer
from subquad.tasks.data import obtain
from subquad.tasks.speech_commands import (
    ALL_WORDS,
    RATE,
    WORDS,
    SpeechCommands,
    find_recordings,
    mfcc,
    read_clip,
    speaker,
)
from tests.runs import one_run

soundfile = pytest.importorskip("soundfile")

SPEAKERS = [f"{i:08x}" for i in range(24)]


def tone(index, frames=RATE):
    """A 16-bit waveform that no other clip has."""
    return np.round(8000 * np.sin(np.arange(1, frames + 1) * (index + 1) * 1e-3)).astype(np.int16)


def unit(samples):
    return samples.astype(np.float32) / 2**15


def write(path, samples, rate=RATE):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, subtype="PCM_16")


@functools.cache
def recorded(index):
    """The file of a short tone, which many tests write."""
    file = io.BytesIO()
    soundfile.write(file, tone(index, 100), RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Ten words, each spoken once by 24 speakers in 100 samples, without lists of splits."""
    for i, word in enumerate(WORDS):
        (tmp_path / word).mkdir(exist_ok=True)
        for j, name in enumerate(SPEAKERS):
            (tmp_path / word / f"{name}_nohash_0.wav").write_bytes(recorded(24 * i + j))
    return tmp_path


def clips_of(speakers):
    return "".join(f"{word}/{name}_nohash_0.wav\n" for word in WORDS for name in speakers)


@pytest.fixture
def official(folder):
    (folder / "testing_list.txt").write_text(clips_of(SPEAKERS[:6]) + "bed/00000000_nohash_0.wav\n")
    (folder / "validation_list.txt").write_text(clips_of(SPEAKERS[6:9]))
    return folder


def load(folder, split, **options):
    (segment,) = SpeechCommands(data=folder, length=100, **options).segments(split, 0)
    return segment


def clips(folder, split, **options):
    """The clips of a split, recognised by their waveforms."""
    known = {unit(tone(24 * i + j, 100)).tobytes(): (i, j) for i in range(10) for j in range(24)}
    segment = load(folder, split, **options)
    found = [known[row.numpy().tobytes()] for row in segment.inputs]
    assert [i for i, _ in found] == segment.targets.tolist(), "a label belongs to another clip"
    return set(found)


def test_official_lists_decide_on_all_three_splits(official):
    everyone = {(i, j) for i in range(10) for j in range(24)}
    assert clips(official, "test") == {(i, j) for i, j in everyone if j < 6}
    assert clips(official, "valid") == {(i, j) for i, j in everyone if 6 <= j < 9}
    assert clips(official, "train") == {(i, j) for i, j in everyone if j >= 9}


def test_without_a_validation_list_whole_speakers_are_held_out_of_train(official):
    (official / "validation_list.txt").unlink()
    train, valid, test = (clips(official, split) for split in ("train", "valid", "test"))
    assert len(train) + len(valid) + len(test) == 240
    speakers = [{j for _, j in part} for part in (train, valid, test)]
    assert speakers[2] == set(range(6))
    assert speakers[1]
    assert not speakers[0] & speakers[1]
    assert len(train) > len(valid)


def test_a_sample_follows_its_own_lists_and_says_that_it_is_one(folder):
    (folder / "split_train.txt").write_text(clips_of(SPEAKERS[6:]) + "_silence_/1.wav\n")
    (folder / "split_test.txt").write_text(clips_of(SPEAKERS[:6]))
    assert clips(folder, "test") == {(i, j) for i in range(10) for j in range(6)}
    assert not clips(folder, "train") & clips(folder, "valid")
    assert len(clips(folder, "train") | clips(folder, "valid")) == 180
    assert SpeechCommands(data=folder).stand_in == (
        "240-clip sample of the v0.02 test set; speaker-disjoint split of ours"
    )


def test_a_sample_whose_lists_forget_a_clip_is_an_error(folder):
    (folder / "split_train.txt").write_text(clips_of(SPEAKERS[7:]))
    (folder / "split_test.txt").write_text(clips_of(SPEAKERS[:6]))
    with pytest.raises(ValueError, match=r"00000006_nohash_0.wav is in neither"):
        load(folder, "train")


def test_policy_paper_splits_every_word_70_15_15_for_all_seeds(official):
    train, valid, test = (clips(official, split, split_policy="paper") for split in ("train", "valid", "test"))
    assert (len(train), len(valid), len(test)) == (170, 30, 40)
    assert len(train | valid | test) == 240
    for i in range(10):
        assert len([clip for clip in train if clip[0] == i]) == 17
    assert {j for _, j in train} & {j for _, j in test}, "speakers are mixed, as in the source"
    task = SpeechCommands(data=official, length=100, split_policy="paper")
    first, second = next(task.segments("test", 0)), next(task.segments("test", 1))
    assert torch.equal(first.inputs, second.inputs)


def test_the_split_of_the_source_is_stratified_and_of_whole_clips_alone(folder):
    pytest.importorskip("sklearn")
    write(folder / "yes" / f"{SPEAKERS[0]}_nohash_0.wav", tone(0, 99))
    options = {"split_policy": "paper", "paper_split": "source", "short_clips": "drop"}
    parts = [clips(folder, split, **options) for split in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [167, 36, 36]
    assert len(set.union(*parts)) == 239
    for part, least in zip(parts, (16, 3, 3), strict=True):
        counts = [sum(word == i for word, _ in part) for i in range(10)]
        assert least <= min(counts) <= max(counts) <= least + 1
    assert "paper_split" not in SpeechCommands().model_dump(mode="json")
    with pytest.raises(ValueError, match="paper_split=source is for ten classes and split_policy=paper, got 10 and cl"):
        load(folder, "train", paper_split="source")


def test_steps_can_be_standardised_one_by_one_as_in_the_source(official):
    train = load(official, "train", scaling="standard-steps").inputs.double()
    assert train.mean(0).abs().max() < 1e-5
    plain = load(official, "train").inputs.double()
    moves = plain.std(0, correction=0) > 0.1
    assert moves.sum() > 50
    torch.testing.assert_close(
        train.std(0, correction=0)[moves], torch.ones(int(moves.sum()), dtype=torch.float64), rtol=1e-3, atol=0
    )
    expected = (load(official, "test").inputs - plain.mean(0)) / (plain.std(0, correction=0) + 1e-5)
    test = load(official, "test", scaling="standard-steps").inputs.double()
    torch.testing.assert_close(test, expected, rtol=1e-3, atol=1e-3)


def test_clean_without_lists_says_what_to_do(folder):
    with pytest.raises(ValueError, match=r"need testing_list.txt .* split_policy: paper"):
        load(folder, "train")


def test_few_clips_stand_in_for_the_papers_set(official):
    assert SpeechCommands(data=official).stand_in == "240 clips; the papers' set has 34975"


def test_signal_is_one_channel_of_float32_at_full_scale_one(official):
    segment = load(official, "test")
    assert segment.inputs.shape == (60, 100, 1)
    assert segment.inputs.dtype == torch.float32
    assert segment.targets.dtype == torch.int16
    assert segment.positions is None
    assert (segment.inputs[0, :, 0].numpy() == unit(tone(0, 100))).all()
    spec = SpeechCommands(data=official).spec
    assert (spec.input, spec.readout, spec.num_classes, spec.channels) == ("signal", "sequence", 10, 1)
    assert spec.max_length == 16_000


def test_short_clips_are_padded_behind_or_dropped_and_long_ones_lose_their_end(official):
    write(official / "yes" / "00000000_nohash_0.wav", tone(0, 70))
    write(official / "yes" / "00000001_nohash_0.wav", tone(1, 150))
    padded = load(official, "test").inputs[:, :, 0].numpy()
    assert (padded[0, :70] == unit(tone(0, 70))).all()
    assert (padded[0, 70:] == 0).all()
    assert (padded[1] == unit(tone(1, 150)[:100])).all()
    dropped = load(official, "test", short_clips="drop")
    assert len(dropped) == len(padded) - 1
    assert torch.equal(dropped.inputs[:, :, 0], torch.from_numpy(padded[1:]))


def test_standard_scaling_uses_the_statistics_of_train(official):
    train = load(official, "train", scaling="standard").inputs.double()
    assert train.mean().abs().item() < 1e-6
    assert train.std().item() == pytest.approx(1, abs=1e-3)
    raw, plain = load(official, "train").inputs.double(), load(official, "test").inputs.double()
    expected = (plain - raw.mean()) / (raw.std(correction=0) + 1e-5)
    assert torch.allclose(load(official, "test", scaling="standard").inputs.double(), expected, atol=1e-5)


def test_recordings_may_lie_below_speech_commands(official, tmp_path):
    (tmp_path / "above").mkdir()
    (tmp_path / "above" / "speech_commands").symlink_to(official)
    above = SpeechCommands(data=tmp_path / "above", length=100)
    assert torch.equal(next(above.segments("test", 0)).inputs, load(official, "test").inputs)
    assert above.fingerprint() == SpeechCommands(data=official).fingerprint()


def test_fingerprint_depends_on_content_names_and_lists(official):
    def fresh():
        return SpeechCommands(data=official, length=100).fingerprint()

    first = fresh()
    assert len(first) == 64
    assert fresh() == first
    clip = official / "go" / "00000000_nohash_0.wav"
    content = clip.read_bytes()
    clip.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert fresh() != first
    clip.write_bytes(content)
    assert fresh() == first
    (official / "validation_list.txt").write_text(clips_of(SPEAKERS[6:8]))
    assert fresh() != first


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def garble(path):
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"\0" * (len(content) - 8))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"is truncated"),
        (garble, r"cannot be decoded"),
        (lambda path: path.write_bytes(b""), r"is truncated"),
        (lambda path: write(path, tone(0), 8000), r"sampling rate of 8000 Hz, needs 16000"),
        (lambda path: write(path, np.stack([tone(0), tone(1)], axis=1)), r"has 2 channels"),
        (lambda path: write(path, tone(0, 0)), r"0 frames"),
        (lambda path: soundfile.write(path, unit(tone(0)), RATE, subtype="FLOAT"), r"is FLOAT, needs 16-bit samples"),
    ],
)
def test_a_bad_recording_is_an_error_that_names_it(official, damage, message):
    damage(official / "left" / "00000003_nohash_0.wav")
    with pytest.raises(ValueError, match=r"left.00000003_nohash_0\.wav.*" + message):
        load(official, "test")
    # planning finds it too, before any run starts
    with pytest.raises(ValueError, match=message):
        SpeechCommands(data=official).fingerprint()


def test_a_list_that_is_no_text_is_named(official):
    (official / "testing_list.txt").write_bytes(b"left/00000003_nohash_\xff.wav")
    with pytest.raises(ValueError, match=r"testing_list.txt is no text; restore the list"):
        SpeechCommands(data=official).fingerprint()


def test_missing_folders_say_what_to_do(tmp_path, official):
    with pytest.raises(ValueError, match=r"no data; call .*data prepare speech-commands.*or give --data DIR"):
        SpeechCommands().fingerprint()
    with pytest.raises(ValueError, match=r"nowhere does not hold the folders yes, no, up"):
        SpeechCommands(data=tmp_path / "nowhere").fingerprint()
    for path in (official / "up").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"no WAV files in .*up"):
        load(official, "train")


def test_a_list_that_names_a_missing_clip_is_an_error(official):
    (official / "stop" / "00000002_nohash_0.wav").unlink()
    with pytest.raises(ValueError, match=r"testing_list.txt names stop/00000002_nohash_0.wav"):
        load(official, "train")


def test_an_empty_split_is_an_error(official):
    (official / "validation_list.txt").write_text("")
    with pytest.raises(ValueError, match="leaves no row for the valid split; add data"):
        SpeechCommands(data=official).fingerprint()


def test_without_soundfile_the_extra_is_named(official, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ValueError, match=r"install -e '\.\[audio\]'"):
        load(official, "test")


def test_prepared_recordings_are_found_without_a_folder(official, tmp_path):
    import tarfile

    archive = tmp_path / "speech_commands_v0.02.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(official, "speech_commands_v0.02", filter=lambda member: None if "tar" in member.name else member)
    obtain("speech-commands", [archive])
    cached, named = SpeechCommands(length=100), SpeechCommands(data=official, length=100)
    assert cached.fingerprint() == named.fingerprint()
    for split in ("train", "valid", "test"):
        assert torch.equal(next(cached.segments(split, 0)).inputs, next(named.segments(split, 0)).inputs)


def test_prepared_clips_are_not_decoded_again(official, monkeypatch):
    load(official, "test")
    # no clip can be decoded without the library
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert len(load(official, "test")) == 60


@pytest.fixture
def all_words(tmp_path):
    """35 words by three speakers, of whom one is in test, one in valid and one in train."""
    for i, word in enumerate(ALL_WORDS):
        for j, name in enumerate(SPEAKERS[:3]):
            write(tmp_path / word / f"{name}_nohash_0.wav", tone(3 * i + j, 100 - 10 * (i == 4)))
    for j, name in enumerate(("testing_list.txt", "validation_list.txt")):
        (tmp_path / name).write_text("".join(f"{word}/{SPEAKERS[j]}_nohash_0.wav\n" for word in ALL_WORDS))
    return tmp_path


@pytest.mark.parametrize("policy", ["clean", "paper"])
def test_35_words_follow_the_official_lists_under_either_policy(all_words, policy):
    for j, split in enumerate(("test", "valid", "train")):
        segment = load(all_words, split, classes=35, split_policy=policy)
        assert segment.targets.tolist() == list(range(35))
        for i, row in enumerate(segment.inputs[:, :, 0].numpy()):
            assert (row[:90] == unit(tone(3 * i + j, 90))).all(), "a label belongs to another word"
            assert (row[90:] == 0).all() == (i == 4)
    task = SpeechCommands(data=all_words, classes=35)
    assert task.spec.num_classes == 35
    assert task.stand_in == "105 clips; the papers' set has 105829"


def test_one_of_35_words_without_a_file_is_an_error(all_words, official):
    for path in (all_words / "bed").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"no WAV files in .*bed; all 35 words are needed"):
        SpeechCommands(data=all_words, classes=35).fingerprint()


def test_half_rate_adds_every_second_sample_of_test_and_nothing_else(official):
    task = SpeechCommands(data=official, length=100, scaling="standard", half_rate=True)
    whole, half = task.segments("test", 0)
    assert (whole.slice, half.slice) == ("rate=16000", "rate=8000")
    assert (whole.rate, half.rate) == (1, 0.5)
    assert torch.equal(half.inputs, whole.inputs[:, ::2])
    assert half.inputs.shape == (60, 50, 1)
    assert torch.equal(half.targets, whole.targets)
    assert torch.equal(whole.inputs, load(official, "test", scaling="standard").inputs)
    for split in ("train", "valid"):
        (segment,) = task.segments(split, 0)
        assert torch.equal(segment.inputs, load(official, split, scaling="standard").inputs)


@pytest.mark.parametrize(("model", "scale"), [("dss-exp", 2), ("mamba", 1)])
def test_a_run_reports_both_rates_and_whether_its_steps_followed(official, model, scale):
    run = one_run(
        {"name": "speech-commands", "data": str(official), "length": 100, "half_rate": True},
        {"name": model, "d_model": 8, "num_layers": 1},
        {"steps": 2, "batch_size": 20},
    )
    trainer = Trainer(run, torch.device("cpu"))
    rows = trainer().rows
    found = {row["slice"]: row["value"] for row in rows if (row["split"], row["metric"]) == ("test", "loss")}
    assert set(found) == {"rate=16000", "rate=8000", ""}
    assert [(row["slice"], row["value"]) for row in rows if row["metric"] == "step_scale"] == [("rate=8000", scale)]
    # the value at half the rate is that of the trained network with its step sizes scaled in this way
    _, half = run.task.segments("test", 0)
    with torch.no_grad(), trainer.model.at_rate(1 / scale):
        logits = trainer.model(half.inputs)
    expected = torch.nn.functional.cross_entropy(logits, half.targets.long())
    assert found["rate=8000"] == pytest.approx(float(expected), rel=1e-5)


def test_cepstrum_has_161_steps_of_20_coefficients_standardised_one_by_one(official):
    task = SpeechCommands(data=official, features="mfcc", scaling="standard")
    spec = task.spec
    assert (spec.max_length, spec.channels) == (161, 20)
    (train,) = task.segments("train", 0)
    assert train.inputs.shape == (150, 161, 20)
    flat = train.inputs.double().flatten(0, 1)
    assert flat.mean(0).abs().max() < 1e-3
    assert torch.allclose(flat.std(0), torch.ones(20, dtype=torch.float64), atol=1e-3)


def test_cepstrum_is_the_cosine_transform_of_log_energies_of_mel_bands():
    """One frame at a time, from the definition, on noise and on silence, which has the energies of no band."""
    noise = np.random.default_rng(0).integers(-4000, 4000, 1050).astype(np.int16)
    noise[400:800] = 0
    found = mfcc(noise[None])
    assert found.shape == (1, 11, 20)
    assert found.dtype == np.float32
    # reflected without its first and its last sample
    wave = np.concatenate([noise[100:0:-1], noise, noise[-2:-102:-1]]) / 2**15
    edges = 700 * (10 ** (np.linspace(0, np.log10(1 + 8000 / 700), 66)) - 1)
    for frame in range(11):
        piece = wave[100 * frame : 100 * frame + 200] * np.sin(np.pi * np.arange(200) / 200) ** 2
        phases = np.exp(-2j * np.pi * np.outer(np.arange(101), np.arange(200)) / 200)
        energy = np.abs(phases @ piece) ** 2
        logs = [
            np.log(1e-6 + sum(e * max(0, np.interp(80 * k, edges[m : m + 3], [0, 1, 0])) for k, e in enumerate(energy)))
            for m in range(64)
        ]
        for k in range(20):
            cosines = np.cos(np.pi * k * (np.arange(64) + 0.5) / 64)
            assert found[0, frame, k] == pytest.approx(cosines @ logs / np.linalg.norm(cosines), abs=1e-4)


def test_options_that_contradict_are_errors():
    with pytest.raises(ValueError, match="half_rate is for raw signals"):
        _ = SpeechCommands(features="mfcc", half_rate=True).spec


def test_the_real_sample_loads_with_disjoint_speakers(shared):
    data = shared("speech_commands").parent
    task = SpeechCommands(data=data)
    assert task.stand_in.startswith("800-clip sample")
    segments = {split: next(task.segments(split, 0)) for split in ("train", "valid", "test")}
    assert len(segments["test"]) == 266
    assert len(segments["train"]) + len(segments["valid"]) == 534
    for segment in segments.values():
        assert segment.inputs.shape[1:] == (16_000, 1)
        assert segment.inputs.abs().max() <= 1
        assert segment.inputs.std() > 0.01
        assert len(segment.targets.unique()) == 10
    recordings = find_recordings(data)
    listed = {name: {speaker(clip) for clip in recordings.listed(name)} for name in recordings.lists}
    assert not listed["split_train.txt"] & listed["split_test.txt"]
    assert len(read_clip(recordings.root / recordings.clips[0])) == RATE
