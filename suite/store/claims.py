"""Claims of runs, by which any number of processes and machines share one folder of results.

A claim is a file beside the rows, `<run_id>.claim`, that only one process can create. It is JSON and says who carries
out the run:

    host, pid     the process that holds the claim
    process       boot, process namespace and start time of that process, to tell on its own machine whether it lives
    token         a random word that tells this claim from an earlier or later one of the same run
    since         when the run was claimed, UTC, ISO 8601
    place         where the run is carried out, if that says more than the host: a device, a node, the id of a job
    expiry_s      seconds without a renewal after which anyone may take the run over

The holder renews a claim by touching its file while its run gives signs of life, and removes it once the rows are
written. The age of a claim is the
difference between two times of the file system, that of the claim and that of a new file, so the clocks of the machines
may differ. File locks are not used, because shared file systems do not all have them.

A claim saves work and is no lock: a process that slept for longer than the expiry wakes up and goes on, so two
processes may finish one run. Both then write the same rows, each file whole, and the later one stays.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import math
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from subquad.suite.runs import Run
from subquad.suite.store.target import as_oserror, create, files_like, is_remote, make_folder, renew, replacing, time_at

EXPIRY_S = 180.0
"""A shared file system may show a renewal a minute late."""
RENEWAL_S = 20.0
LONGEST_S = 86400.0
"""Our processes never write a longer expiry."""
GUARD_S = 60.0
"""Age of a file that guards the replacement of a claim, which takes milliseconds, from which on it is a left-over."""

LEFT_OVER_S = 86400.0
"""Age of a temporary file from which on nobody writes it any more."""

SUFFIX = ".claim"


@dataclass(frozen=True)
class Claim:
    """A claim as it was found in a folder of results."""

    path: Path
    host: str
    pid: int
    process: str
    token: str
    since: str
    place: str
    expiry_s: float
    age_s: float
    """Seconds since the last renewal, by the clock of the file system."""

    @property
    def run_id(self) -> str:
        return self.path.name.removesuffix(SUFFIX)

    @property
    def scale(self) -> str:
        return self.path.parent.name

    @property
    def live(self) -> bool:
        """Whether the run is still carried out, as far as can be told from here."""
        return self.age_s < self.expiry_s and not _has_ended(self.pid, self.process)

    @property
    def holder(self) -> str:
        """`node7, process 4211` or `node7, process 4211, cuda:1`."""
        return f"{self.host}, process {self.pid}" + f", {self.place}" * bool(self.place)


def claim_path(root: Path, experiment: str, scale: str, run_id: str) -> Path:
    """Path of the claim of a run."""
    return root / experiment / scale / f"{run_id}{SUFFIX}"


def find_claims(root: Path, experiment: str) -> list[Claim]:
    """All claims of an experiment, live or not."""
    found = (read_claim(path) for path in files_like(root / experiment, f"*/*{SUFFIX}"))
    return [claim for claim in found if claim is not None]


def read_claim(path: Path) -> Claim | None:
    """The claim in a file; None if there is no file. Of a file that holds none, only the age is known."""
    try:
        with as_oserror(path):
            known = path.stat() if is_remote(path) else path.lstat()
        # a claim that is being written is empty, and what is no file must not be opened
        values = _values(path) if stat.S_ISREG(known.st_mode) else {}
    except FileNotFoundError:
        return None
    age_s = max(0.0, time_at(path.parent) - known.st_mtime)
    return Claim(
        path,
        host=str(values.get("host", "unknown host")),
        pid=int(values.get("pid", 0)),
        process=str(values.get("process", "")),
        token=str(values.get("token", "")),
        since=str(values.get("since", "")),
        place=str(values.get("place", "")),
        expiry_s=float(values.get("expiry_s", EXPIRY_S)),
        age_s=age_s,
    )


def _values(path: Path) -> dict[str, Any]:
    try:
        with as_oserror(path):
            values = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError):
        return {}
    holds = isinstance(values, dict) and isinstance(values.get("pid"), int)
    expiry_s = values.get("expiry_s") if holds else None
    return values if isinstance(expiry_s, (int, float)) and 0 <= expiry_s <= LONGEST_S else {}


def _process(pid: int) -> str:
    """Boot, process namespace and start time of a process of this machine; empty where they are not known."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{_machine()} {started}"
    except OSError:
        return ""


def _machine() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _has_ended(pid: int, process: str) -> bool:
    """Whether a process is known to have ended; of another machine's or container's process nothing is known."""
    try:
        return process.startswith(_machine()) and _process(pid) != process
    except OSError:
        return False


def sweep(root: Path, experiments: Iterable[str]) -> None:
    """Removes what killed processes have left of these experiments: expired claims, and temporary files of a day ago.

    A run that is repeated takes its claim over anyway; this is for those that never are.
    """
    for experiment in experiments:
        for path in files_like(root / experiment, "*/.*.tmp"):
            with contextlib.suppress(OSError), as_oserror(path):
                if time_at(path.parent) - path.stat().st_mtime > LEFT_OVER_S:
                    path.unlink()
        for claim in find_claims(root, experiment):
            if not claim.live:
                _take_over(claim, None)


class Claims:
    """The claims that this process holds below one folder: a context that renews them, and removes them at its end.

    silence_s: a claim is not renewed once its run has given no sign of life (`alive`) for so long.
    """

    def __init__(self, root: Path, *, expiry_s: float = EXPIRY_S, silence_s: float = math.inf) -> None:
        self.root = root
        self.expiry_s, self.silence_s = expiry_s, silence_s
        self._held: dict[Path, str] = {}
        self._alive_at: dict[str, float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._renewal = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Claims:
        self._renewal.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_up()
        self._renewal.join()

    def give_up(self) -> None:
        """Lets a thread remove all claims, which goes on where a signal interrupts or blocks this one."""
        self._ended.set()

    def alive(self, run: Run) -> None:
        """Takes a sign of life of a run."""
        self._alive_at[run.run_id] = time.monotonic()

    def take(self, run: Run, place: str = "") -> Claim | None:
        """Claims a run. None means that this process has it now, and a claim that another process has it.

        An expired claim is taken over. Whoever gets a run looks whether its rows have been stored in the meantime.
        """
        path = claim_path(self.root, run.experiment, run.scale, run.run_id)
        token = uuid.uuid4().hex
        values = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": _process(os.getpid()),
            "token": token,
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "place": place,
            "expiry_s": self.expiry_s,
        }
        make_folder(path.parent)
        found: Claim | None = None
        # between the two calls of a round another process may have given the run up
        while found is None:
            if create(path, json.dumps(values)):
                break
            found = read_claim(path)
        if found is not None and (found.live or not _take_over(found, json.dumps(values))):
            return found
        self.alive(run)
        with self._lock:
            self._held[path] = token
        return None

    def release(self, run: Run) -> None:
        """Gives up the claim of a run, whose rows are written or which another process may continue."""
        self._remove(claim_path(self.root, run.experiment, run.scale, run.run_id))

    def _remove(self, path: Path) -> None:
        # under the lock, since a renewal in between would write the claim again that is removed here
        with self._lock, contextlib.suppress(OSError), as_oserror(path):
            token = self._held.pop(path, None)
            # it is another process's claim if this one did not renew it in time
            if token is not None and _values(path).get("token") == token:
                path.unlink()

    def _renew(self) -> None:
        while not self._ended.wait(min(RENEWAL_S, self.expiry_s / 4)):
            with self._lock:
                held = list(self._held.items())
            for path, token in held:
                if time.monotonic() - self._alive_at[path.name.removesuffix(SUFFIX)] > self.silence_s:
                    continue
                with self._lock, contextlib.suppress(OSError):
                    if self._held.get(path) == token == _values(path).get("token"):
                        renew(path)
        for path in list(self._held):
            self._remove(path)


class NoClaimError(OSError):
    """A folder or a pipe has the name of a claim, which nobody renews and nobody can take over."""


def _is_no_file(path: Path) -> bool:
    if is_remote(path):
        return False
    kind = path.lstat().st_mode
    return not (stat.S_ISREG(kind) or stat.S_ISLNK(kind))


def _take_over(claim: Claim, text: str | None) -> bool:
    """Replaces an expired claim, or removes it (None), unless another process does so. Returns whether this one did.

    Only one process at a time may replace a claim, and it looks again before it does: otherwise a process that saw the
    claim a moment ago would replace that of another which has just taken the run over.
    """
    guard = claim.path.with_name(f".{claim.path.name}.taken-over")
    if not create(guard, text or ""):
        found = read_claim(guard)
        if found is not None and found.age_s > GUARD_S:
            # its process was killed between two system calls
            with as_oserror(guard):
                guard.unlink(missing_ok=True)
        return False
    try:
        found = read_claim(claim.path)
        if found is None or found.token != claim.token or found.live:
            return False
        if _is_no_file(claim.path):
            if text is not None:
                raise NoClaimError(errno.EEXIST, f"{claim.path} is no file, and so no claim; remove it")
            return False
        if text is None:
            with as_oserror(claim.path):
                claim.path.unlink()
            return True
        with replacing(claim.path) as temporary:
            temporary.write_text(text)
    except NoClaimError:
        raise
    except OSError:
        return False
    finally:
        with as_oserror(guard):
            guard.unlink()
    return True
