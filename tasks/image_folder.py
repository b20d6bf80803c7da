"""Image folder: the class of the pictures in any folder, read pixel by pixel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import SPLITS, Array
from subquad.tasks.data import DataError, NoDataError, cache
from subquad.tasks.data.stored import ChosenTask
from subquad.tasks.data.tables import WORDS, pictures
from subquad.tasks.lra.image import SUFFIXES, Pixels, as_grey, pixel_spec, signal_segment


class ImageFolder(ChosenTask):
    """The class of a grey picture from its pixels in reading order.

        input   0.22  0.18  0.24  ...  -0.66    (size x size pixels, row after row)
        target  frog                            (the folder that the picture lies in)

    Source: the folder `data` in the layout that `datasets` calls `imagefolder`, `{train,validation,test}/<class>/` with
    PNG or JPEG files. Where there is no `validation` (or `valid`, `val`), one training picture in ten is held out,
    under either policy. No published number belongs to this task.
    """

    name: ClassVar[str] = "image-folder"
    version: ClassVar[int] = 1
    reader: ClassVar[int] = 2

    size: int = Field(default=32, ge=2, le=1024)
    """Number of pixels of a side."""
    resize: bool = False
    """Whether pictures of another size are resized, by Pillow's bicubic filter."""
    pixels: Pixels = "centered"
    """Range of the pixels. `centered` and `standard`: [-1, 1]. `unit`: [0, 1]. `tokens`: 256 tokens."""

    @property
    def folder(self) -> Path:
        if self.data is None:
            raise NoDataError(f"{self.name}: no data; give --data DIR, a folder of pictures.")
        return self.data

    def _split_files(self, folder: Path) -> dict[str, list[Path]]:
        """The pictures of every split that the folder has, class by class."""
        found = {}
        for split in SPLITS:
            below = [folder / word for word in WORDS[split] if (folder / word).is_dir()]
            classes = [path for path in sorted(below[0].iterdir()) if path.is_dir()] if below else []
            shown = [path for path in classes if not cache.hidden(path.name)]
            found[split] = [file for path in shown for file in cache.files_in(path, *SUFFIXES)]
            if not found[split] and (below or split != "valid"):
                where = below[0] if below else folder / WORDS[split][0]
                raise DataError(f"{self.name}: no pictures in {where}/<class>/ ({', '.join(SUFFIXES)}); add some.")
        known = {path.parent.name for path in found["train"]}
        for path in (path for files in found.values() for path in files):
            if path.parent.name not in known:
                raise DataError(
                    f"{path.parent}: no training picture has this class, which could not be learnt (they have "
                    f"{', '.join(sorted(known)[:5])}{', ...' * (len(known) > 5)}); name it alike in every split."
                )
        return {split: files for split, files in found.items() if files}

    def files(self, folder: Path) -> list[Path]:
        return [path for files in self._split_files(folder).values() for path in files]

    @property
    def spec(self) -> TaskSpec:
        # without data the task can only be described; two classes are the least that any data have
        num_classes = 2 if self.data is None else len({path.parent.name for path in self.files(self.folder)})
        if num_classes < 2:
            raise DataError(f"{self.name}: {self.folder} has one class only; put each class in a folder of its own.")
        return pixel_spec(self.pixels, num_classes, self.size)

    @property
    def stand_in(self) -> str:
        return f"{len(self.files(self.folder))} pictures of the user's own"

    def reading(self) -> dict[str, Any]:
        return {"size": self.size, "resize": self.resize}

    def read(self, folder: Path) -> dict[str, Array]:
        files = self._split_files(folder)
        arrays: dict[str, Array] = {}
        for split, found in pictures(files).items():
            arrays[f"{split}.inputs"] = np.empty((len(files[split]), self.size**2), dtype=np.uint8)
            arrays[f"{split}.targets"] = np.empty(len(files[split]), dtype=np.int16)
            for row, (path, (picture, label)) in enumerate(zip(files[split], found, strict=True)):
                if picture.size != (self.size, self.size) and not self.resize:
                    width, height = picture.size
                    raise DataError(
                        f"{path}: has {width} x {height} pixels, needs {self.size} x {self.size}; set size, or "
                        f"resize=true."
                    )
                try:
                    grey = as_grey(picture)
                except ValueError as error:
                    raise DataError(f"{path}: not a picture that can be read ({error}).") from None
                grey = grey.resize((self.size, self.size)) if self.resize else grey
                arrays[f"{split}.inputs"][row] = np.asarray(grey).reshape(-1)
                arrays[f"{split}.targets"][row] = label
        return arrays

    def chosen(self, split: str) -> tuple[str, Array]:
        arrays = self.arrays()
        part = split if f"{split}.targets" in arrays else "train"
        rows = np.arange(len(arrays[f"{part}.targets"]))
        if part != "test" and "valid.targets" not in arrays:
            order = numpy_generator(0, "image-folder/held-out").permutation(len(rows))
            count = max(len(rows) // 10, 1)
            rows = np.sort(order[:count] if split == "valid" else order[count:])
        return part, rows

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        inputs, targets = self.selected(split, "inputs", "targets")
        yield signal_segment(inputs, targets, self.pixels)
