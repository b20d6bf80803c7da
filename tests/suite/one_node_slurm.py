"""A Slurm cluster of this machine alone, for tests: one processor, and two partitions of which one preempts the other.

On Debian the programs come with `apt-get install slurmctld slurmd slurm-client munge` (or slurm-wlm). The daemons need
to be started by root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")

CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1,requeue_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes={host} MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why no cluster can be started here; None if it can be tried."""
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    # Debian has daemons in a folder that is not on every path
    absent = [name for name in PROGRAMS if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]
    return f"{', '.join(absent)} not installed (apt-get install slurm-wlm)" if absent else None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def one_node_slurm(folder: Path) -> Iterator[Path]:
    """A running cluster, and the path of its configuration (SLURM_CONF). RuntimeError where it does not start."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key, log = folder / "munge.key", folder / "daemons.log"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    ports = {"controller_port": _free_port(), "node_port": _free_port()}
    configuration.write_text(CONFIGURATION.format(host=socket.gethostname().split(".")[0], folder=folder, **ports))
    environment = {
        **os.environ,
        "SLURM_CONF": str(configuration),
        "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin",
    }
    files = [
        f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    commands = (
        ["munged", "--force", "--foreground", f"--key-file={key}", *files],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D"],
    )
    daemons = []
    try:
        with log.open("w") as output:
            for command in commands:
                daemons.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
                )
                time.sleep(1)
        deadline = time.monotonic() + 30
        while "idle" not in _nodes(environment):
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
                raise RuntimeError(f"Slurm does not start: {log.read_text()[-400:]}")
            time.sleep(0.5)
        yield configuration
    finally:
        subprocess.run(["scancel", "--user", "root", "--signal=KILL"], env=environment, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()


def _nodes(environment: dict[str, str]) -> str:
    asked = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(asked, env=environment, capture_output=True, text=True).stdout
