"""A Slurm cluster of one node on this machine: started in a temporary folder, on loopback, and stopped without a trace.

`python tests/slurm/one_node.py` starts it for a shell with its commands (`sinfo`, `sbatch`, …), and stops it when the
shell ends. Needs the Debian packages slurm-wlm and munge, whose own services need not run.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

NODE = "node"
CPUS = 2
STARTS_WITHIN = 60.0  # seconds
# Seconds from SIGTERM to SIGKILL in the partition `grace`. A job notices the signal within 0.2 s, and its run saves
# after the step that it is in, here another 0.2 s. Then a process that has imported torch takes 1.2 s to end, and the
# job 0.3 s. So both tasks of an array have ended after 2 s on two idle cores; other work may slow them down 30 times.
GRACE = 60
# munged, slurmctld and slurmd are in /usr/sbin, which is not on every user's PATH.
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

# Preempted jobs return to the queue. Slurm starts a job again only when its old credential has expired, by default
# after two minutes. KillWait is the time from SIGTERM to SIGKILL elsewhere; 30 seconds is what Slurm itself takes.
CONFIGURATION = """\
ClusterName=onenode
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait}
MinJobAge=300
ReturnToService=2
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000
PartitionName=low Nodes={node} PriorityTier=1 Default=YES MaxTime=60
PartitionName=grace Nodes={node} PriorityTier=1 GraceTime={grace} MaxTime=60
PartitionName=high Nodes={node} PriorityTier=10 PreemptMode=off MaxTime=60
"""


class NoSlurm(RuntimeError):
    """The cluster cannot be started; the message says why."""


@contextmanager
def one_node(*, cpus: int = CPUS, kill_wait: int = 30) -> Iterator[dict[str, str]]:
    """Start the cluster; yield the environment in which Slurm's commands talk to it. Jobs end with it."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=SEARCH) is None]
    if missing:
        raise NoSlurm(f"{', '.join(missing)} not found: apt-get install slurm-wlm munge")
    with ExitStack() as stack:
        # Of its own under /tmp: paths of sockets are short, and munged refuses folders that others can write.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")))
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o755)
        folder.chmod(0o755)
        controller_port, node_port = _free_ports(2)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=folder,
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                node=NODE,
                cpus=cpus,
                kill_wait=kill_wait,
                grace=GRACE,
                controller_port=controller_port,
                node_port=node_port,
            )
        )
        environment = {**os.environ, "PATH": SEARCH, "SLURM_CONF": str(folder / "slurm.conf")}
        daemons = [
            stack.enter_context(_daemon(_munged(folder), folder, environment)),
            stack.enter_context(_daemon(["slurmctld", "-D"], folder, environment)),
            stack.enter_context(_daemon(["slurmd", "-D", "-N", NODE], folder, environment)),
        ]
        _wait_until_idle(environment, daemons, folder)
        stack.callback(_end_jobs, environment)
        yield environment


def _munged(folder: Path) -> list[str]:
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    options = [f"--{option}={folder / 'munge' / name}" for option, name in files.items()]
    # --force: root may run it too.
    return ["munged", "--foreground", "--force", "--num-threads=1", *options]


@contextmanager
def _daemon(command: Sequence[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{command[0]}.out").open("ab") as output:
        # The daemon ends with this process, even if that is killed. Ctrl-C in a terminal does not reach it.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_idle(environment: dict[str, str], daemons: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline and all(daemon.poll() is None for daemon in daemons):
        state = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True
        ).stdout
        if set(state.split()) == {"idle"}:
            return
        time.sleep(0.2)
    logs = [file for file in sorted(folder.glob("*.out")) + sorted(folder.glob("*.log")) if file.stat().st_size]
    tails = "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-2000:]}" for file in logs)
    raise NoSlurm(f"the node did not become idle within {STARTS_WITHIN:.0f} s.\n{tails}")


def _end_jobs(environment: dict[str, str]) -> None:
    """Cancel every job, and wait until the node has no process of them."""
    for options in (["--full", "--signal=KILL"], []):
        subprocess.run(["scancel", *options, f"--user={getpass.getuser()}"], env=environment, check=False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = subprocess.run(["squeue", "--noheader"], env=environment, capture_output=True, text=True).stdout
        if not left.strip():
            return
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with one_node() as cluster:
        subprocess.run([os.environ.get("SHELL", "/bin/sh")], env=cluster, check=False)
