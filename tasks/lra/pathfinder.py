"""LRA Pathfinder and Path-X: whether two dots lie on the same dashed contour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from subquad.suite.bounds import LARGEST, Seed
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import Array
from subquad.tasks.data import DataError
from subquad.tasks.data.parallel import in_order
from subquad.tasks.data.stored import ChosenTask
from subquad.tasks.lra.contours import STYLES, draw
from subquad.tasks.lra.image import Pixels, pixel_spec, read_pictures, signal_segment

LEVEL = "curv_contour_length_14"
"""The folder with the hardest contours, the only ones that LRA reports."""
PICTURES = 200_000
"""Number of pictures of each size in the release."""


class LRAPathfinder(ChosenTask):
    """Whether a dashed contour joins two dots, read from a picture pixel by pixel, LRA's `Pathfinder`.

        input   0.00  0.00  0.69  ...  0.00    (32 x 32 pixels, row after row, 1024 steps)
        target  joined                         (one label a picture, half of them joined)

    Source: Linsley et al. 2018 for the challenge; Tay et al. 2021, section 2.5. Under either policy, the splits are
    those of the S4 and DSS code: `torch.utils.data.random_split` with seed 42 divides the pictures, in the order of the
    metadata, into 80, 10 and 10 %. S4's later code has pixels in [0, 1], DSS in [-1, 1] (`pixels`).

    Folders: those of the release (`pathfinder32/curv_contour_length_14/{imgs,metadata}`). The one empty file that the
    S4 code skips lies in another folder of the release. `pictures: generated` draws pictures by the same procedure,
    written again in tasks/lra/contours.py; they are stand-in data.
    """

    name: ClassVar[str] = "lra-pathfinder"
    version: ClassVar[int] = 1
    source: ClassVar[str] = "lra-release"
    size: ClassVar[int] = 32

    pictures: Literal["files", "generated"] = "files"
    """`files`: the pictures of the release. `generated`: pictures drawn here."""
    pixels: Pixels = "centered"
    """Range of the pixels. `centered` and `standard`: [-1, 1]. `unit`: [0, 1]. `tokens`: 256 tokens."""
    num_pictures: int = Field(default=PICTURES, ge=10, le=LARGEST)
    """Number of generated pictures, all splits together."""
    data_seed: Seed = 0
    """Seed of the generated pictures. The seed of a run does not change them, as it does not change the release."""

    @property
    def generated(self) -> bool:
        return self.pictures == "generated"

    @property
    def spec(self) -> TaskSpec:
        return pixel_spec(self.pixels, num_classes=2, size=self.size)

    @property
    def folder(self) -> Path:
        name = f"pathfinder{self.size}"
        names = (name, f"lra_release/{name}", f"lra_release/lra_release/{name}", f"pathfinder/{name}")
        layout = f"{name}/{LEVEL}/{{imgs,metadata}}"

        def holds(path: Path) -> bool:
            # pictures of the other size have the same layout, so the name of the folder decides
            return path.resolve().name == name and (path / LEVEL / "metadata").is_dir()

        return self.find(names, holds, layout)

    def _listing(self, folder: Path) -> list[tuple[Path, int]]:
        """Pictures and labels in the order of the metadata: files by their number, then lines."""
        level = folder / LEVEL
        lists = [path for path in (level / "metadata").glob("*.npy") if path.stem.isdigit()]
        found = []
        for path in sorted(lists, key=lambda path: int(path.stem)):
            # these files are text, in spite of their ending
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
                words = line.split()
                if len(words) < 4 or words[3] not in ("0", "1") or "\0" in line:
                    raise DataError(f"{path}: line {number} names no picture and label; restore the file.")
                found.append((level / words[0] / words[1], int(words[3])))
        if not found:
            raise DataError(f"{self.name}: no metadata in {level / 'metadata'}; restore the folder.")
        return found

    def files(self, folder: Path) -> list[Path]:
        lists = [path for path in (folder / LEVEL / "metadata").glob("*.npy") if path.stem.isdigit()]
        return [path for path, _ in self._listing(folder)] + lists

    @property
    def stand_in(self) -> str:
        if self.generated:
            return f"{self.num_pictures} pictures of our own generator"
        count = len(self._listing(self.folder))
        return "" if count >= PICTURES - 1 else f"{count} pictures; the release has {PICTURES}"

    def reading(self) -> Mapping[str, Any]:
        if not self.generated:
            return {}
        return {"num_pictures": self.num_pictures, "data_seed": self.data_seed}

    def read(self, folder: Path) -> dict[str, Array]:
        listing = self._listing(folder)
        pictures = read_pictures([path for path, _ in listing], self.size)
        return {"inputs": pictures, "targets": np.array([label for _, label in listing], dtype=np.int8)}

    def generate(self, workers: int) -> dict[str, Array]:
        margins = STYLES[self.size].margins
        which = numpy_generator(self.data_seed, f"{self.name}/margins").integers(0, len(margins), self.num_pictures)
        pictures = np.empty((self.num_pictures, self.size**2), dtype=np.uint8)
        labels = np.empty(self.num_pictures, dtype=np.int8)
        for number, margin in enumerate(margins):
            rows, start = np.flatnonzero(which == number), 0
            calls = ((self.data_seed, self.size, margin, index) for index in range(1 << 40))
            for made, label in in_order(draw, calls, workers):
                chosen = rows[start : start + len(label)]
                pictures[chosen], labels[chosen] = made[: len(chosen)], label[: len(chosen)]
                start += len(label)
                if start >= len(rows):
                    break
        return {"inputs": pictures, "targets": labels}

    def chosen(self, split: str) -> tuple[str, Array]:
        count = len(self.arrays()["targets"])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(42)).numpy()
        held_out = count // 10
        train = count - 2 * held_out
        bounds = {"train": (0, train), "valid": (train, train + held_out), "test": (train + held_out, count)}
        return "", order[slice(*bounds[split])]

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        inputs, targets = self.selected(split, "inputs", "targets")
        yield signal_segment(inputs, targets, self.pixels)


class LRAPathX(LRAPathfinder):
    """Pathfinder with pictures of 128 x 128 pixels, LRA's `Path-X`.

        input   0.00  0.00  0.69  ...  0.00    (128 x 128 pixels, row after row, 16384 steps)
        target  joined                         (one label a picture, half of them joined)

    Source: Tay et al. 2021, section 2.6. Splits, folders (`pathfinder128`) and options are those of `lra-pathfinder`.
    """

    name: ClassVar[str] = "lra-pathx"
    version: ClassVar[int] = 1
    size: ClassVar[int] = 128
