"""The JSON in rows and files, read once for all readers: settings of a run, operators that it used, how it ended.

Whatever a stranger has written there, the answer is a checked value or a ValueError of one sentence.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from subquad.suite.identity import file_digest, likeness

ENDING = b"subquad.ending"
"""Key of the footer of a file under which stands how the run ended: a CRC-32 in hexadecimal and JSON."""
OF_ENDINGS = (
    *("metric", "status", "operators", "error", "run_id", "experiment", "scale", "config", "device", "duration_s"),
)
"""The columns from which an ending is made where the footer has none."""

MOST_CHARACTERS = 1_000_000
MOST_DEPTH = 32
"""Settings have a depth of about four. A deeper tree could exhaust the stack of a function that walks through it."""
MOST_DIGITS = 19
"""An integer with so many digits fits into 64 bits, or nearly so."""

STATUSES = ("ok", "failed", "diverged", "oom", "n/a")
Status = Literal["ok", "failed", "diverged", "oom", "n/a"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Component(_Part):
    name: str
    version: int = 0


class _Timing(_Part):
    op: str
    implementation: str


class _Settings(_Part):
    """A resolved run: what must have which type wherever it is given. Everything else is an option of its section."""

    task: _Component = Field(default=None)  # type: ignore[assignment]
    model: _Component = Field(default=None)  # type: ignore[assignment]
    train: dict[str, Any] = {}
    speed: dict[str, Any] = {}
    bench: _Timing = Field(default=None)  # type: ignore[assignment]
    plugins: dict[str, str] = {}
    seed: int = 0


class _Used(BaseModel):
    model_config = ConfigDict(strict=True)
    version: int = Field(ge=0, le=2**31)
    backend: str


class _Verdict(_Part):
    """The settings of a comparison of two revisions."""

    base: str
    verdict: str
    low: float
    high: float
    noise: float


class StoredEnding(BaseModel):
    """The ending of a run, as the footer of its file gives it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    status: Status
    operators: str | None = None
    error: str | None = None
    device: str | None = None
    duration_s: float | None = Field(default=None, ge=0)
    like: list[str] | None = None
    """None in older files, which do not say so."""
    run_id: str | None = None
    experiment: str | None = None
    scale: str | None = None
    """These three are None in older files, which say in their rows alone whose ending it is."""


_SETTINGS = TypeAdapter(_Settings)
_OPERATORS = TypeAdapter(dict[str, _Used])
_VERDICT = TypeAdapter(_Verdict)
_ENDING = TypeAdapter(StoredEnding)


@lru_cache(maxsize=4096)
def settings_in(text: str | None) -> dict[str, Any]:
    """The settings of a run, from the column `config`. ValueError where they are none.

    They are kept, because whoever reads rows needs them again after they were checked; so nobody may change them.
    """
    return _checked(_object_in(text or "{}"), _SETTINGS)


def operators_in(text: str | None) -> dict[str, dict[str, Any]]:
    """Operator to `version` and `backend`, from the column `operators`; none where nothing was recorded."""
    return _checked(_object_in(text or "{}"), _OPERATORS)


def verdict_in(text: str | None) -> dict[str, Any]:
    """The verdict on two revisions, from the column `config` of a row `ratio`."""
    return _checked(_object_in(text or "{}"), _VERDICT)


def _stored_ending(text: str) -> StoredEnding:
    """The ending of a run, from the footer of a file."""
    return _ENDING.validate_python(_checked(_object_in(text), _ENDING))


def _checked(found: dict[str, Any], wanted: TypeAdapter[Any]) -> dict[str, Any]:
    try:
        wanted.validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(f"{name[:80]}: {first['msg'][:1].lower()}{first['msg'][1:120]}") from None
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError, which begins with its path, where there is none."""
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_tokenizer(path: Path) -> Any:
    """The tokenizer in a file `tokenizer.json`. ValueError, which begins with its path, where there is none.

    ImportError where the library `tokenizers` is missing.
    """
    import tokenizers  # noqa: F401

    try:
        seen = path.stat()
        return _tokenizer(path.resolve(), seen.st_size, seen.st_mtime)
    except (KeyboardInterrupt, SystemExit):
        raise
    # a panic of the library's Rust code is raised as a BaseException that is no Exception
    except BaseException as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"{path}: no tokenizer.json that can be read ({reason}); name another file") from None


def tokenizer_digest(path: Path) -> str:
    """The SHA-256 of a tokenizer file, in hexadecimal. ValueError, which begins with its path, where there is none."""
    try:
        return file_digest(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


@lru_cache(maxsize=4)
def _tokenizer(path: Path, size: int, changed: float) -> Any:
    """`read_tokenizer`, once for all texts that are encoded: a large vocabulary takes seconds."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(path.read_text(encoding="utf-8"))


def _object_in(text: str) -> dict[str, Any]:
    """The JSON object that a text of a row is. ValueError for every other text."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters, more than {MOST_CHARACTERS}")
    return _parsed(text)


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(
            text,
            object_pairs_hook=_without_repetition,
            parse_constant=_refused,
            parse_int=_integer,
            parse_float=_real,
        )
    except RecursionError:
        raise ValueError(f"deeper than {MOST_DEPTH} objects and lists in each other") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg} at character {error.pos})") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object was expected, not {text[:20]!r}")
    if text.count("{") + text.count("[") > MOST_DEPTH and _depth(found) > MOST_DEPTH:
        raise ValueError(f"deeper than {MOST_DEPTH} objects and lists in each other")
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a character of two halves") from None
    return found


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name[:40]!r} twice")
    return found


def _refused(name: str) -> Any:
    raise ValueError(f"{name}, which is no JSON")


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS + text.startswith("-"):
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:40]}")
    return value


def _depth(value: Any) -> int:
    """Objects and lists in each other, counted level by level, so that no depth exhausts the stack."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list))]:
        level = [part for found in level for part in (found.values() if isinstance(found, dict) else found)]
        depth += 1
    return depth


def ending_of(rows: Iterable[Mapping[str, Any]]) -> StoredEnding:
    """The ending and the identity of the run of these rows. Without a row `run`, it failed."""
    row: Mapping[str, Any] = {}
    for row in rows:
        if row.get("metric") == "run":
            kept = {key: row.get(key) for key in ("status", "operators", "error", "device", "duration_s")}
            if kept["duration_s"] is not None and math.isnan(kept["duration_s"]):
                kept["duration_s"] = None
            return StoredEnding.model_construct(**kept, like=_likeness_of(row), **_name_of(row))
    return StoredEnding.model_construct(status="failed", **_name_of(row))


def _name_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row.get(key) for key in ("run_id", "experiment", "scale")}


def _likeness_of(row: Mapping[str, Any]) -> list[str]:
    """The likeness (`suite.identity`) of the run of a row; empty where its columns do not say which run it was."""
    try:
        return list(likeness(row["scale"], settings_in(row["config"])))
    except (KeyError, ValueError, TypeError):
        return []


def footer_of(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """The value of ENDING for the rows of a run."""
    text = json.dumps(ending_of(rows).model_dump()).encode()
    return f"{zlib.crc32(text):08x} ".encode() + text


def ending_in(value: bytes) -> StoredEnding | None:
    """The ending that is the value of ENDING; None if its checksum does not fit, or if it is empty."""
    checksum, _, text = value.partition(b" ")
    if not text or checksum != f"{zlib.crc32(text):08x}".encode():
        return None
    found = _stored_ending(text.decode())
    operators_in(found.operators)
    return found


def operator_mix(rows: Iterable[Mapping[str, Any]], *, alike: bool = True) -> str | None:
    """Description of the operator versions and backends behind several rows if they differ; None if they are the same.

    rows: stored rows or the first row of each run; only the column `operators` is read. `selective_scan: version 1
    (torch), version 2 (triton)`. Rows without a record among rows with one are counted, because their versions are
    not known.
    alike: whether the rows are of one setting. Then an operator that only some of them used is named, too: the others
    computed the same in another way, such as by code that was no operator yet.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    unknown = known = 0
    for row in rows:
        text = row.get("operators")
        # pandas has NaN for null
        if not isinstance(text, str):
            unknown += 1
            continue
        known += 1
        for name, used in operators_in(text).items():
            found.setdefault(name, []).append((used["version"], used["backend"]))
    parts = []
    for name, uses in sorted(found.items()):
        kinds = [f"version {version} ({backend})" for version, backend in sorted(set(uses))]
        if alike and len(uses) < known:
            kinds.append(f"not used in {known - len(uses)} of {known} rows")
        if len(kinds) > 1:
            parts.append(f"{name}: {', '.join(kinds)}")
    if unknown and known:
        parts.append(f"not recorded in {unknown} of {unknown + known} rows")
    return "; ".join(parts) or None
