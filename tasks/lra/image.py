"""LRA Image: the class of a small grey picture, read pixel by pixel."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.identity import file_digest
from subquad.tasks.base import Array
from subquad.tasks.data import DataError, cache
from subquad.tasks.data.stored import ChosenTask
from subquad.tasks.data.tables import rows, split_tables, unpublished

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
"""The official files and their published MD5 hashes."""
SIZES = {"train": 50_000, "test": 10_000}
SUFFIXES = (".png", ".jpg", ".jpeg")

Pixels = Literal["standard", "unit", "centered", "tokens"]


def _is_official(folder: Path) -> bool:
    return (folder / "test_batch").is_file() and (folder / "data_batch_1").is_file()


def _is_tables(folder: Path) -> bool:
    return all(split_tables(folder, split) for split in SIZES)


def _is_folder_of_images(folder: Path) -> bool:
    return all((folder / split / name).is_dir() for split in SIZES for name in CLASSES)


class _Said:
    """The arguments that a pickle gives for an array or its dtype. NumPy crashes where a byte of them is wrong."""

    def __init__(self, *words: Any) -> None:
        self.words = words

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _bytes_in(said: _Said) -> Array:
    """The array of bytes that a pickle holds. ValueError, or another error, where it holds another one."""
    _, shape, dtype, is_transposed, content = said.state
    if dtype.words[0] not in ("u1", b"u1") or is_transposed:
        raise ValueError("its pictures are no rows of bytes")
    return np.frombuffer(content, np.uint8).reshape(shape)


class _Batch(pickle._Unpickler):
    """Reads the official batches without running code: a pickle may name only what describes an array.

    The unpickler in Python is the one that no content crashes and that takes no more memory than the content.
    """

    NUMPY = frozenset(
        (module, name)
        for module in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy")
        for name in ("_reconstruct", "ndarray", "dtype")
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode("latin-1")
        if (module, name) not in self.NUMPY:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _Said


def grey(colours: Array) -> Array:
    """Colours uint8 [..., 3] to grey [...]: L = (19595 R + 38470 G + 7471 B + 2^15) / 2^16, rounded down.

    These are the ITU-R 601-2 weights as Pillow, and so torchvision's `Grayscale`, rounds them.
    """
    parts = colours.astype(np.uint32)
    total = 19595 * parts[..., 0] + 38470 * parts[..., 1] + 7471 * parts[..., 2] + 0x8000
    return (total >> 16).astype(np.uint8)


def as_grey(picture: Any) -> Any:
    """A picture of Pillow in grey with 8 bits. ValueError where pixels have no colour or no scale.

    Pillow's own conversion cuts off the values of 16 bits at 255, and shows what lies below transparent pixels.
    """
    from PIL import Image

    if picture.mode.startswith("I"):
        # a grey PNG of 16 bits, which older versions of Pillow open with 32 bits
        values = np.asarray(picture, dtype=np.int64)
        if values.min(initial=0) < 0 or values.max(initial=0) > 0xFFFF:
            raise ValueError("its pixels have more than 16 bits; save it with 8 or 16")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if picture.mode.startswith("F"):
        raise ValueError("its pixels are floats of no known scale; save it with 8 or 16 bits")
    if picture.has_transparency_data:
        colours = picture.convert("RGBA")
        if colours.getchannel("A").getextrema()[0] < 255:
            raise ValueError("it has transparent pixels, which have no colour; flatten it")
        picture = colours.convert("RGB") if picture.mode != "LA" else picture
    return picture.convert("L")


def pixel_spec(scale: Pixels, num_classes: int, size: int) -> TaskSpec:
    """The properties of a task on grey pictures of size x size pixels, in the range `scale`, with one label each."""
    if scale == "tokens":
        return TaskSpec("tokens", num_classes, readout="sequence", max_length=size**2, vocab_size=256)
    return TaskSpec("signal", num_classes, readout="sequence", max_length=size**2, channels=1)


def signal_segment(pixels: Array, targets: Array, scale: Pixels, mean: float = 0.5, deviation: float = 0.5) -> Segment:
    """A segment of pixels uint8 [R, T] as tokens or as a signal in the range `scale`, with one label per row.

    mean, deviation: for the range `standard`.
    """
    labels = torch.from_numpy(np.ascontiguousarray(targets, dtype=np.int16))
    values = torch.from_numpy(np.ascontiguousarray(pixels))
    if scale == "tokens":
        return Segment(inputs=values, targets=labels)
    signal = values.to(torch.float32).div_(255).unsqueeze(-1)
    if scale != "unit":
        centre, spread = (mean, deviation) if scale == "standard" else (0.5, 0.5)
        signal.sub_(centre).div_(spread)
    return Segment(inputs=signal, targets=labels)


class LRAImage(ChosenTask):
    """The class of a grey CIFAR-10 picture from its pixels in reading order, LRA's `Image`.

        input   0.61  0.59  0.62  ...  0.17     (32 x 32 pixels, row after row, 1024 steps)
        target  frog                            (one of ten classes)

    Source: Tay et al. 2021, section 2.4. The preprocessing is that of the S4 and DSS code: Pillow's grey, then
    (x / 255 - 122.6 / 255) / (61 / 255) (`pixels: standard`). LRA itself reads pixels as tokens. Both policies validate
    on the 5,000 training pictures that `torch.utils.data.random_split` with seed 42 sets aside, as S4 and DSS do.

    Folders: the official pickles (`data_batch_1` ... `test_batch`) or the parquet files of the hub, which are compared
    with published hashes. Pictures in `{train,test}/<class>/` are accepted as stand-in data, since they are lossy or of
    unknown origin. Where the training pictures have another order, the validation split has other pictures.
    """

    name: ClassVar[str] = "lra-image"
    version: ClassVar[int] = 1
    source: ClassVar[str] = "cifar10"

    pixels: Pixels = "standard"
    """`standard`: mean 122.6 and deviation 61 of 255. `unit`: [0, 1]. `centered`: [-1, 1]. `tokens`: 256 tokens."""

    @property
    def spec(self) -> TaskSpec:
        return pixel_spec(self.pixels, num_classes=10, size=32)

    @property
    def folder(self) -> Path:
        names = ("cifar-10-batches-py", "cifar10/cifar-10-batches-py", "cifar10", "plain_text")
        layout = "data_batch_1 ... test_batch, the hub's parquet files, or pictures in {train,test}/<class>/"
        kinds = _is_official, _is_tables, _is_folder_of_images
        return self.find(names, lambda path: any(kind(path) for kind in kinds), layout)

    def files(self, folder: Path) -> list[Path]:
        if _is_official(folder):
            missing = [name for name in BATCHES if not (folder / name).is_file()]
            if missing:
                raise DataError(f"{self.name}: {missing[0]} is not in {folder}; restore it.")
            return [folder / name for name in BATCHES]
        if _is_tables(folder):
            return [path for split in SIZES for path in split_tables(folder, split)]
        found = []
        for split in SIZES:
            for name in CLASSES:
                images = cache.files_in(folder / split / name, *SUFFIXES)
                if not images:
                    raise DataError(f"{self.name}: no pictures in {folder / split / name}; restore the folder.")
                found += images
        return found

    @property
    def stand_in(self) -> str:
        folder = self.folder
        files = self.files(folder)
        if _is_official(folder):
            changed = [path.name for path in files if file_digest(path, "md5") != BATCHES[path.name]]
            return f"{changed[0]} is not the official file" if changed else ""
        if _is_tables(folder):
            return unpublished(files, self.source)
        count = "all 60,000 pictures" if len(files) == sum(SIZES.values()) else f"{len(files)} of 60,000 pictures"
        if any(path.suffix.lower() != ".png" for path in files):
            return f"{count} as JPEG, a lossy copy of CIFAR-10"
        return f"{count} as PNG of unknown origin"

    def read(self, folder: Path) -> dict[str, Array]:
        if _is_official(folder):
            return self._batches(folder)
        return self._tables(folder) if _is_tables(folder) else self._pictures(folder)

    def _batches(self, folder: Path) -> dict[str, Array]:
        parts: dict[str, list[Array]] = {f"{split}.{what}": [] for split in SIZES for what in ("inputs", "targets")}
        for path in self.files(folder):
            try:
                with path.open("rb") as file:
                    batch = _Batch(file, encoding="bytes").load()
                colours = _bytes_in(batch[b"data"]).reshape(-1, 3, 1024).transpose(0, 2, 1)
                labels = np.asarray(batch[b"labels"], dtype=np.int8)
                if len(labels) != len(colours) or labels.min() < 0 or labels.max() > 9:
                    raise ValueError(f"{len(colours)} pictures and {len(labels)} labels")
            # a damaged pickle raises many kinds of errors
            except Exception as error:
                reason = " ".join(str(error).split())[:120]
                raise DataError(
                    f"{path}: not an official CIFAR-10 batch ({type(error).__name__}: {reason}); fetch it again."
                ) from None
            split = "test" if path.name == "test_batch" else "train"
            parts[f"{split}.inputs"].append(grey(colours))
            parts[f"{split}.targets"].append(labels)
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}

    def _tables(self, folder: Path) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for split in SIZES:
            paths, pixels, labels = split_tables(folder, split), [], []
            for number, (picture, label) in enumerate(rows(paths, ("img", "label")), start=1):
                if label not in range(len(CLASSES)) or getattr(picture, "size", None) != (32, 32):
                    raise DataError(
                        f"{paths[0]}: row {number} is no picture of 32 x 32 with a label below 10; restore it."
                    )
                try:
                    pixels.append(np.asarray(as_grey(picture)).reshape(-1))
                except ValueError as error:
                    raise DataError(f"{paths[0]}: the picture of row {number} cannot be read ({error}).") from None
                labels.append(label)
            arrays[f"{split}.inputs"] = np.array(pixels, dtype=np.uint8)
            arrays[f"{split}.targets"] = np.array(labels, dtype=np.int8)
        return arrays

    def _pictures(self, folder: Path) -> dict[str, Array]:
        files = self.files(folder)
        arrays = {}
        for split in SIZES:
            paths = [path for path in files if path.parent.parent.name == split]
            arrays[f"{split}.inputs"] = read_pictures(paths, 32)
            arrays[f"{split}.targets"] = np.array([CLASSES.index(path.parent.name) for path in paths], dtype=np.int8)
        return arrays

    def chosen(self, split: str) -> tuple[str, Array]:
        part = "test" if split == "test" else "train"
        rows = np.arange(len(self.arrays()[f"{part}.targets"]))
        if part == "train":
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42)).numpy()
            held_out = len(rows) // 10
            rows = order[len(rows) - held_out :] if split == "valid" else order[: len(rows) - held_out]
        return part, rows

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        inputs, targets = self.selected(split, "inputs", "targets")
        yield signal_segment(inputs, targets, self.pixels, 122.6 / 255, 61 / 255)


def read_pictures(paths: list[Path], size: int) -> Array:
    """Reads grey pictures: uint8 [R, size * size]. A DataError names a picture that is damaged or has another size."""
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image, UnidentifiedImageError

    def one(path: Path) -> Array:
        try:
            content = path.read_bytes()
            # reading the pixels of a PNG file verifies no checksum of the last ones
            Image.open(io.BytesIO(content)).verify()
            pixels = np.asarray(as_grey(Image.open(io.BytesIO(content))))
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: not a readable picture ({reason}); fetch it again.") from None
        if pixels.shape != (size, size):
            raise DataError(f"{path}: has {pixels.shape[1]} x {pixels.shape[0]} pixels, needs {size} x {size}.")
        return pixels.reshape(-1)

    rows = np.empty((len(paths), size * size), dtype=np.uint8)
    # threads help because decoding releases the interpreter lock
    with ThreadPoolExecutor(max_workers=8) as threads:
        for index, pixels in enumerate(threads.map(one, paths, chunksize=256)):
            rows[index] = pixels
    return rows
