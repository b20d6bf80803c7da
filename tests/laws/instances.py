"""Small instances of every registered task: options for those that draw their rows, files for those that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from subquad.tasks import TASKS

Options = dict[str, Any]

FEW: Options = {"num_train": 200, "num_test": 100}
COPYING: Options = {"length": 64, "num_data": 8, "num_test": 100}
LONGER: Options = {"length": 32, "test_lengths": (16, 32, 64), "num_test": 100}
SUMS: Options = {"length": 24, "min_test_length": 24, "test_length": 64, "num_test": 100}

INSTANCES: dict[str, Options] = {
    "induction-heads": FEW | {"test_lengths": (30, 60)},
    "induction-heads/answer-only": FEW | {"train_loss": "answer-only"},
    "associative-recall": FEW | {"test_lengths": (20, 40)},
    "associative-recall/vocab-20": FEW | {"vocab_size": 20, "length": 40, "train_loss": "answer-only"},
    "mqar/zoology-fig2": FEW | {"vocab_size": 128, "length": 64, "num_kv_pairs": 8},
    "mqar/based-fig2": {
        "protocol": "based-fig2",
        "vocab_size": 128,
        "train": [
            {"length": 32, "num_kv_pairs": 4, "num_examples": 200},
            {"length": 64, "num_kv_pairs": 16, "num_examples": 100},
        ],
        "test": [{"length": 128, "num_kv_pairs": 32, "num_examples": 100}],
    },
    "mqar/no-keys": FEW | {"vocab_size": 64, "length": 64, "num_kv_pairs": 8, "non_queries": "random-no-keys"},
    "selective-copying": COPYING,
    "selective-copying/additional": COPYING | {"marker": "additional", "length_rule": "total"},
    "selective-copying/none": COPYING | {"marker": "none", "length_rule": "noise"},
    "induction-heads-extrapolation": LONGER,
    "induction-heads-extrapolation/all-tokens": LONGER | {"train_loss": "all-tokens"},
    "selective-copying/mad": FEW | COPYING | {"length_rule": "total", "marker": "before", "places": "gaps"},
    "word-problem": FEW | {"length": 32, "test_lengths": (16, 64)},
    "word-problem/cyclic": {
        "group": "Z5",
        "length": 24,
        "test_lengths": (64,),
        "num_train": 0,
        "num_test": 100,
        "labels": "end",
    },
    "word-problem/repeats": FEW | {"group": "S3", "length": 32, "test_lengths": (32,), "repeats": True},
    "word-problem/swaps": FEW
    | {"group": "S5", "length": 32, "test_lengths": (32,), "begin": False, "identity": False, "max_moved": 2},
    "word-problem/range": {
        "group": "Z3",
        "length": 39,
        "min_length": 2,
        "test_lengths": (64,),
        "min_test_length": 39,
        "num_train": 0,
        "num_test": 100,
        "labels": "end",
        "begin": False,
    },
    "modular-arithmetic": SUMS,
    "modular-arithmetic/brackets": SUMS | {"brackets": True},
    "modular-arithmetic/sums": SUMS | {"modulus": 7, "brackets": True, "multiply": False},
    "in-context-recall": FEW | {"length": 32},
    "in-context-recall/noisy": FEW
    | {"length": 32, "vocab_size": 32, "num_noise": 16, "frac_noise": 0.4, "train_loss": "answer-only"},
    "fuzzy-in-context-recall": FEW | {"length": 48},
    "compression": FEW | {"length": 16},
    "memorization": FEW | {"vocab_size": 32, "length": 16},
    "copying": {"length": 48, "min_string": 4, "max_string": 12, "test_strings": (12, 24), "num_test": 100},
    "needle": {"length": 48, "test_lengths": (48, 96), "num_words": 40, "num_names": 8, "num_test": 50},
    "needle/distractors": {
        "length": 64,
        "test_lengths": (64,),
        "num_words": 40,
        "num_names": 8,
        "num_depths": 1,
        "num_distractors": 3,
        "num_test": 50,
    },
    "brain-activity": FEW | {"num_networks": 3, "num_points": 16, "num_states": 4},
    "brain-activity/state": FEW | {"labels": "state", "num_networks": 3, "num_points": 16, "num_states": 4},
    "seizures": {"length": 800, "num_channels": 2, "num_train": 60, "num_test": 60},
}
"""Options of tasks whose rows depend on the seed of the run, by the name of the task and, behind a slash, the case."""


def _grey(number: int, size: int) -> np.ndarray:
    """A picture [size, size] uint8 that no other number has."""
    y, x = np.mgrid[:size, :size]
    return ((3 * x + 5 * y + 7 * number) % 256).astype(np.uint8)


def _wave(number: int, frames: int) -> np.ndarray:
    """Sound [frames] int16 of sixteen coarse levels, so that no rounding decides on a level of the mu-law."""
    return (((np.arange(frames) * (number + 3) + number) % 16 - 8) * 1000).astype(np.int16)


def _save_picture(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def _save_sound(path: Path, samples: np.ndarray) -> None:
    import soundfile

    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, 16_000, subtype="PCM_16")


def _spoken(folder: Path, words: tuple[str, ...], frames: int) -> None:
    """Eight speakers say every word; the lists give one of them to test and one to validation."""
    for i, word in enumerate(words):
        for j in range(8):
            _save_sound(folder / word / f"{j:08x}_nohash_0.wav", _wave(8 * i + j, frames - j))
    for j, name in enumerate(("testing_list.txt", "validation_list.txt")):
        (folder / name).write_text("".join(f"{word}/{j:08x}_nohash_0.wav\n" for word in words))


def speech_commands(folder: Path) -> dict[str, Options]:
    from subquad.tasks.speech_commands import WORDS

    _spoken(folder, WORDS, 48)
    return {
        "clean": {"data": folder, "length": 48},
        "paper": {
            "data": folder,
            "length": 44,
            "split_policy": "paper",
            "short_clips": "drop",
            "scaling": "standard",
            "half_rate": True,
        },
    }


def sc09(folder: Path) -> dict[str, Options]:
    from subquad.tasks.sc09 import DIGITS

    _spoken(folder, DIGITS, 1030)
    return {"segment": {"data": folder, "length": 1024}, "unit": {"data": folder, "length": 1024, "scaling": "unit"}}


def recordings(folder: Path) -> dict[str, Options]:
    for number, frames in ((2, 700), (10, 900)):
        _save_sound(folder / f"take{number}.wav", _wave(number, frames))
    return {"segment": {"data": folder, "length": 32}, "unit": {"data": folder, "length": 32, "scaling": "unit"}}


def _write_fasta(path: Path, records: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f">{name}\n{text[:50]}\n{text[50:100]}\n{text[100:]}\n" for name, text in records.items()]
    path.write_text("".join(lines))


def _bases(number: int) -> str:
    """150 bases, some of them unknown (N) and some in lower case."""
    text = "".join("ACGT"[(i * i + number * i + i // 7) % 4] for i in range(150))
    return text[:30] + "NN" + text[32:80].lower() + text[80:]


def hg38(folder: Path) -> dict[str, Options]:
    _write_fasta(folder / "genome.fa", {"chr1": _bases(1), "chr2": _bases(2)})
    lines = [
        ("chr1", 0, 64, "train"),
        ("chr2", 40, 104, "train"),
        ("chr1", 80, 144, "valid"),
        ("chr2", 100, 150, "test"),
    ]
    (folder / "some.bed").write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
    return {
        "mamba": {"data": folder, "length": 16},
        "hyenadna": {"data": folder, "length": 80, "rule": "hyenadna", "soft_masked": "ignore"},
    }


def species(folder: Path) -> dict[str, Options]:
    kinds = ("human", "mouse")
    for number, kind in enumerate(kinds):
        _write_fasta(folder / kind / "all.fa", {f"chr{i}": _bases(10 * number + i) for i in (1, 2, 4, 5)})
    shared = {"data": folder, "species": kinds, "num_eval": 20}
    return {
        "chromosome": {**shared, "length": 40},
        "position": {**shared, "length": 12, "split_by": "position"},
    }


def lra_listops(folder: Path) -> dict[str, Options]:
    lines = ["Source\tTarget", "( ( [MAX 2 ) 9 ) ( ( [MIN 4 ) 7 ] ) ]\t9", "( ( [SM 5 ) 8 ) ]\t3"]
    for name in ("train", "val", "test"):
        (folder / f"basic_{name}.tsv").write_text("".join(f"{line}\n" for line in lines))
    sizes = {"length": 200, "max_length": 180, "min_length": 20, "num_train": 60, "num_valid": 10, "num_test": 10}
    return {"generated": sizes, "files": {"data": folder, "rows": "files", "length": 16}}


def lra_text(folder: Path) -> dict[str, Options]:
    for part in ("train", "test"):
        for name in ("pos", "neg"):
            (folder / part / name).mkdir(parents=True)
            for i in range(10):
                (folder / part / name / f"{i}_1.txt").write_text(f"{part} {name} film number {i}")
    return {"clean": {"data": folder, "length": 20}, "paper": {"data": folder, "length": 32, "split_policy": "paper"}}


def lra_retrieval(folder: Path) -> dict[str, Options]:
    for name in ("train", "eval", "test"):
        lines = f"1.0\tP1\tP2\tone {name} paper\tanother\n0.0\tP3\tP4\tcafé\tthe fourth paper\n"
        (folder / f"new_aan_pairs.{name}.tsv").write_text(lines)
    return {"bytes": {"data": folder, "length": 12}}


def lra_image(folder: Path) -> dict[str, Options]:
    from subquad.tasks.lra.image import CLASSES

    for part in ("train", "test"):
        for number, name in enumerate(CLASSES):
            for i in range(2):
                _save_picture(folder / part / name / f"{i}.png", _grey(20 * i + number, 32))
    return {"tokens": {"data": folder, "pixels": "tokens"}, "standard": {"data": folder}}


def _pathfinder(folder: Path, size: int) -> None:
    level = folder / f"pathfinder{size}" / "curv_contour_length_14"
    (level / "metadata").mkdir(parents=True)
    for i in range(10):
        _save_picture(level / "imgs" / "0" / f"sample_{i}.png", _grey(i, size))
    lines = "".join(f"imgs/0 sample_{i}.png {i} {i % 2}\n" for i in range(10))
    (level / "metadata" / "0.npy").write_text(lines)


def lra_pathfinder(folder: Path) -> dict[str, Options]:
    _pathfinder(folder, 32)
    return {
        "files": {"data": folder, "pixels": "tokens"},
        "unit": {"data": folder, "pixels": "unit"},
        "generated": {"pictures": "generated", "num_pictures": 20, "pixels": "tokens"},
    }


def lra_pathx(folder: Path) -> dict[str, Options]:
    _pathfinder(folder, 128)
    # its generator takes seconds at this size; tests/tasks/test_lra_pathfinder.py pins it
    return {"files": {"data": folder, "pixels": "tokens"}}


def image_folder(folder: Path) -> dict[str, Options]:
    for part, count in (("train", 10), ("test", 2)):
        for number, name in enumerate(("ant", "bee")):
            for i in range(count):
                _save_picture(folder / part / name / f"{i}.png", _grey(40 * number + i, 8))
    options = {"data": folder, "size": 8}
    return {"tokens": {**options, "pixels": "tokens"}, "centered": options}


def _texts(folder: Path) -> None:
    for part, count in (("train", 9), ("valid", 3), ("test", 3)):
        (folder / f"{part}.txt").write_text(" = Homer = \n \n The gamma ray is a ray . \n" * count)


def wikitext(folder: Path) -> dict[str, Options]:
    _texts(folder)
    return {"bytes": {"data": folder, "length": 64}}


def text_file(folder: Path) -> dict[str, Options]:
    _texts(folder)
    return {"folder": {"data": folder, "length": 64}, "short rows": {"data": folder / "train.txt", "length": 16}}


def text_recall(folder: Path) -> dict[str, Options]:
    _texts(folder)
    return {"longer rows": {"data": folder, "length": 64, "test_lengths": [96]}}


STORED: dict[str, Callable[[Path], dict[str, Options]]] = {
    "speech-commands": speech_commands,
    "sc09": sc09,
    "youtubemix": recordings,
    "recordings": recordings,
    "hg38": hg38,
    "species": species,
    "lra-listops": lra_listops,
    "lra-text": lra_text,
    "lra-retrieval": lra_retrieval,
    "lra-image": lra_image,
    "lra-pathfinder": lra_pathfinder,
    "lra-pathx": lra_pathx,
    "image-folder": image_folder,
    "wikitext": wikitext,
    "text-file": text_file,
    "text-recall": text_recall,
}
"""Tasks with one fixed set of rows: writes a small set of files and names the options that read it, case by case."""


def task_of(case: str) -> str:
    """The name of the task of a case of `INSTANCES`."""
    return case.partition("/")[0]


def instances(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """The small instances of a task, case by case; folder is empty and may be filled."""
    if name in STORED:
        for case, options in STORED[name](folder).items():
            yield case, TASKS.load(name)(**options)
    for case, options in INSTANCES.items():
        if task_of(case) == name:
            yield case, TASKS.load(name)(**options)
