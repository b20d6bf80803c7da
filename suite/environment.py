"""The machine, versions and commit that a row records, and what works on this machine (`doctor`)."""

from __future__ import annotations

import codecs
import functools
import hashlib
import importlib.metadata
import importlib.util
import locale
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import subquad

REPOSITORY = Path(__file__).resolve().parent.parent
"""The folder with `suite`, `tasks`, `models`, `kernels` and `reports`."""
PROJECT = REPOSITORY / "pyproject.toml"
"""The description of the project, which a checkout has and an installed wheel has not."""
CALL = "python run_suite.py" if PROJECT.is_file() and Path(sys.argv[0]).name != "subquad" else "subquad"
"""The words that call the command line, in a checkout or in an installation."""
IMPORTED_FROM = Path(subquad.__file__).resolve().parent.parent
"""The folder from which `subquad` is imported."""


def with_extra(name: str) -> str:
    """The command that installs an extra of this package, which lies in the folder of the user or elsewhere."""
    checkout = "." if REPOSITORY.samefile(os.curdir) else REPOSITORY
    return f"pip install -e '{checkout}[{name}]'" if PROJECT.is_file() else f"pip install 'subquad[{name}]'"


def import_path() -> str:
    """PYTHONPATH of a process that imports `subquad` as this one does, and what else its environment names."""
    return os.pathsep.join([str(IMPORTED_FROM), *filter(None, [os.environ.get("PYTHONPATH")])])


def reads_utf8() -> bool:
    """Returns whether this Python takes files for UTF-8, as those of the suite are; a locale may say otherwise."""
    return codecs.lookup(locale.getpreferredencoding(False)).name == "utf-8"


def version_of(package: str) -> str:
    """Version of an installed distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def named_commit() -> str:
    """SUBQUAD_COMMIT, or an empty text. ValueError where it is no commit, which every row would then name."""
    named = os.environ.get("SUBQUAD_COMMIT", "")
    if named and not re.fullmatch(r"[0-9a-f]{4,64}(-dirty)?", named):
        raise ValueError(f"SUBQUAD_COMMIT={named}: expected the hash of a commit, or the hash and -dirty")
    return named


@functools.cache
def commit(folder: Path = REPOSITORY) -> tuple[str, bool | None]:
    """The commit of the checkout that holds a folder, and whether files differ from it; ("", None) outside a checkout.

    SUBQUAD_COMMIT (`<sha>` or `<sha>-dirty`) names that of Subquad for a copy of the tree that carries no history, and
    the file COMMIT that of an installed wheel (`suite.packaging`), which may lie inside a checkout of something else.
    """
    wheel = REPOSITORY / "COMMIT"
    named = named_commit() or (wheel.read_text() if wheel.is_file() else None)
    if named is not None and folder == REPOSITORY:
        return named.removesuffix("-dirty"), named.endswith("-dirty") if named else None
    if shutil.which("git") is None:
        return "", None
    try:
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *CODE)
        return _git(folder, "rev-parse", "HEAD"), bool(changes)
    except (subprocess.SubprocessError, OSError):
        return "", None


CODE = (".", ":!results", ":!submissions", ":!docs", ":!*.md")
"""Folders and files whose code runs in a checkout; results are its products."""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    # a file need not be UTF-8
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=True, timeout=20
    ).stdout.strip()


@functools.cache
def code() -> str:
    """The commit of Subquad, and a digest of the uncommitted changes where there are some."""
    sha, dirty = commit()
    if not dirty:
        return sha
    try:
        changes = _git(REPOSITORY, "diff", "HEAD", "--no-ext-diff", "--", *CODE)
    except (subprocess.SubprocessError, OSError):
        changes = ""
    return f"{sha} with changes {hashlib.sha256(changes.encode()).hexdigest()[:8]}"


def cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release() -> str:
    """`v0.2.0`, the tag of this version: that of the checkout, or of the wheel that is installed."""
    if PROJECT.is_file():
        return f"v{tomllib.loads(PROJECT.read_text())['project']['version']}"
    return f"v{version_of('subquad')}"


def version() -> str:
    """`subquad 0.2.0, commit 0123456789, with uncommitted changes`."""
    sha, dirty = commit()
    where = f"commit {sha[:10]}" if sha else "not a checkout"
    return f"subquad {release().removeprefix('v')}, {where}" + ", with uncommitted changes" * bool(dirty)


def _processor() -> str:
    """The name of the host processor and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name} ({cores()} cores)"


def device_name(device: Any) -> str:
    """`NVIDIA H200`, or the host processor's name with its cores."""
    import torch

    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def provenance(device: Any) -> dict[str, Any]:
    """The columns of a row that say where it comes from."""
    import torch

    sha, dirty = commit()
    return {
        "commit": sha,
        "dirty": dirty,
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda or "",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


PRECISION_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TRITON_F32_DEFAULT")
"""Environment variables by which NVIDIA's libraries and Triton round float32 products otherwise than a program asks."""


def pick_device(wanted: str | None) -> Any:
    """The device a run uses: the one named, else the first GPU, else the CPU.

    ValueError where it is not there, or where it would compute in another precision than rows say.
    """
    import torch

    if name := next((name for name in PRECISION_VARIABLES if os.environ.get(name)), ""):
        raise ValueError(
            f"the environment has {name}={os.environ[name]}, which changes the precision of products whatever the "
            "settings of a run say; unset it, and choose the precision by train.precision"
        )
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]?))?", wanted):
        raise ValueError(f"--device {wanted!r}: expected cpu, cuda or cuda:N")
    device = torch.device(wanted)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"--device {wanted}: this machine has {count} CUDA devices; use --device cpu")
    return device


@dataclass(frozen=True)
class Capability:
    """An optional part: its name, what it is for, and why it does not work here (empty where it does)."""

    name: str
    purpose: str
    found: str
    missing: str


def _package(name: str, purpose: str, extra: str, module: str = "") -> Capability:
    """Returns what is known of a package, whose module may have another name."""
    if importlib.util.find_spec(module or name) is None:
        return Capability(name, purpose, "", f"not installed; {with_extra(extra)}")
    try:
        __import__(module or name)
    except Exception as error:  # a broken binary raises anything from OSError to AttributeError
        return Capability(name, purpose, "", f"cannot be imported: {' '.join(str(error).split())[:160]}")
    return Capability(name, purpose, version_of(name), "")


def capabilities() -> Iterator[Capability]:
    """Every optional part with its version on this machine, or with the reason why it does not work."""
    import torch

    yield Capability("python", "interpreter", platform.python_version(), "")
    yield Capability("torch", "training", torch.__version__, "")
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Capability("GPU", "training at speed", f"{names}; CUDA {torch.version.cuda}", "")
    else:
        reason = "this torch is a CPU build" if torch.version.cuda is None else "no CUDA device is visible"
        yield Capability("GPU", "training at speed", "", f"{reason}; runs use the CPU: {_processor()}")
    yield _package("triton", "GPU kernels, torch.compile", "triton")
    yield _package("soundfile", "speech-commands, youtubemix, recordings: decoding", "audio")
    yield _package("scipy", "recordings: resampling", "audio")
    yield _package("tokenizers", "wikitext, text-file: byte pairs", "data")
    yield _package("datasets", "sets of the hub, tables, image-folder", "datasets")
    yield _package("scikit-learn", "speech-commands: the split of the source", "audio", "sklearn")
    yield _package("pyfaidx", "hg38, species: random access to FASTA", "dna")
    yield _package("safetensors", "weights import and export", "weights")
    yield _package("lm-eval", "evaluate", "eval", "lm_eval")
    yield _package("s3fs", "--results s3://", "s3")
    yield _package("ray", "run --executor ray", "ray")
    yield _package("submitit", "run --executor slurm", "slurm")
    yield _package("tensorboard", "run --log tensorboard", "tensorboard")
    yield _package("trackio", "run --log trackio, export --to trackio", "trackio")
    yield _package("wandb", "run --log wandb", "wandb")
    yield _package("huggingface_hub", "weights push", "hub")
    sha, dirty = commit()
    state = " with uncommitted changes" if dirty else ""
    yield Capability("git", "commit in every row", f"{sha[:12]}{state}" if sha else "", "" if sha else "not a checkout")
