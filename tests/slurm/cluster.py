"""A SLURM cluster of two nodes on this machine: real daemons, but no systemd, cgroups or accounting."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

NODES = ("runnertest1", "runnertest2")
HOSTS = Path("/etc/hosts")
CONF = """
ClusterName=runnertest
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/%n.pid
SlurmdSpoolDir={base}/spool/%n
StateSaveLocation={base}/state
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MinJobAge=300
KillWait=5
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=8000 Gres=gpu:8"
"""Line of a node in slurm.conf.

``cred_expire`` in ``CONF`` is short, because a requeued job starts only after its credential has expired.
"""
GPUS = 8
"""Number of GPUs of each node. They are only empty files."""


class Cluster:
    """A cluster whose daemons run from ``__enter__`` to ``__exit__``, and end if this process ends."""

    def __init__(self, base: Path) -> None:
        self.base, self.daemons = base, list[subprocess.Popen[bytes]]()
        self.environ = {"SLURM_CONF": str(base / "slurm.conf")}

    def __enter__(self) -> Self:
        for folder in ("state", "log", *(f"spool/{name}" for name in NODES)):
            (self.base / folder).mkdir(parents=True)
        key = self.base / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        host, ports = socket.gethostname().split(".")[0], free_ports(1 + len(NODES))
        nodes = [
            NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports[1:], strict=True)
        ]
        text = CONF.format(host=host, base=self.base, port=ports[0])
        (self.base / "slurm.conf").write_text("\n".join([text, *nodes, ""]))
        for number in range(GPUS):  # SLURM only checks that the files exist
            (self.base / f"gpu{number}").touch()
        (self.base / "gres.conf").write_text(f"Name=gpu File={self.base}/gpu[0-{GPUS - 1}]\n")
        with HOSTS.open("a") as hosts:  # in place: containers mount this file
            hosts.write(self.line)
        try:
            self.start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def start_all(self) -> None:
        munge = [f"--{what}-file={self.base}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self.start("munged", "--foreground", "--force", f"--socket={self.base}/munge.socket", *munge)
        self.start("slurmctld", "-D", "-i")
        for name in NODES:
            self.start("slurmd", "-D", "-N", name)
        self.until(lambda: self.run("sinfo", "--noheader", "--format=%D %t") == "2 idle", seconds=60)

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root")
        with contextlib.suppress(AssertionError):
            self.until(lambda: not self.run("squeue", "--noheader"), seconds=30)
        self.stop()

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(30)
        HOSTS.write_text(HOSTS.read_text().replace(self.line, ""))

    @property
    def line(self) -> str:
        return f"127.0.0.1 {' '.join(NODES)} # {self.base}\n"

    def start(self, *command: str) -> None:
        log = (self.base / "log" / f"{len(self.daemons)}_{command[0]}.log").open("wb")
        with log:
            guarded = ["setpriv", "--pdeathsig", "KILL", *command]
            env = os.environ | self.environ
            self.daemons.append(subprocess.Popen(guarded, env=env, stdout=log, stderr=log))

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command of SLURM and return its output."""
        answer = subprocess.run(
            command, env=os.environ | self.environ, cwd=cwd, capture_output=True, text=True, check=False
        )
        return answer.stdout.strip()

    def until(self, true: Callable[[], bool], *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            logs = "\n".join(path.read_text() for path in sorted((self.base / "log").glob("*.log")))
            assert time.monotonic() < deadline, logs[-5000:]
            time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Return ports that are free at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def need_slurm() -> None:
    """Install SLURM if possible; otherwise skip the tests."""
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons for tests need root")
    if shutil.which("slurmctld") and shutil.which("munged"):
        return
    if not shutil.which("apt-get"):
        pytest.skip("SLURM is not installed (slurmctld, slurmd, munged), and there is no apt-get")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm", "munge"]
    for command in (["apt-get", "update"], install):
        answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        if answer.returncode:
            pytest.skip(f"SLURM cannot be installed: {' '.join(command)}: {answer.stderr[-300:]}")
