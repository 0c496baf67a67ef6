"""Promise: SLURM itself runs slurm.sh on two machines, and goes on from its checkpoint: two slurmd here,
where Debian's packages are installed. `test_job_files.py` has a stand-in that always runs.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("munged", "slurmctld", "slurmd")
]
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmctldPort={port}
AuthInfo=socket={folder}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=127.0.0.[1-2] NodeHostname={host} Port={first}-{second} CPUs=8 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES State=UP
"""  # addresses as names of machines: every machine can resolve them


@pytest.fixture
def cluster(tmp_path):
    """The environment of two machines' SLURM."""
    if None in PROGRAMS:
        pytest.skip("needs SLURM: apt-get install slurmctld slurmd slurm-client munge")
    munged, slurmctld, slurmd = PROGRAMS
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ports = {"port": port, "first": port + 1, "second": port + 2}
    names = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": tmp_path}
    (tmp_path / "state").mkdir()
    (tmp_path / "slurm.conf").write_text(CONFIG.format(**names, **ports))
    (tmp_path / "munge.key").write_bytes(os.urandom(64))
    (tmp_path / "munge.key").chmod(0o600)
    own = {"SLURM_CONF": str(tmp_path / "slurm.conf"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own, "RANKS_PER_NODE": "1"}
    files = {"socket": "sock", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    commands = [
        [munged, "-F", "--force", *(f"--{name}={tmp_path}/munge.{end}" for name, end in files.items())],
        [slurmctld, "-D"],
        *([slurmd, "-D", "-N", machine] for machine in ("127.0.0.1", "127.0.0.2")),
    ]
    daemons = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
            time.sleep(1)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


@pytest.mark.slow
@pytest.mark.multi_rank
def test_slurm_itself_trains_on_two_machines_and_goes_on(cluster, tmp_path):
    for epochs in ("1", "2"):
        job = [
            "sbatch", "--wait", "--output", tmp_path / f"{epochs}.out", ROOT / "docs/examples/slurm.sh",
            tmp_path / "run", "--data", "zipf:users=30,items=40,ratings=1", "--epochs", epochs,
            "--precision", "float32",
        ]  # fmt: skip
        done = subprocess.run(job, cwd=ROOT, env=cluster, capture_output=True, text=True, timeout=240)
        printed = (tmp_path / f"{epochs}.out").read_text()
        assert done.returncode == 0, done.stderr + printed[-3000:]
        assert printed.count("test: {") == 1 and "NDCG@10" in printed
    where = subprocess.run(["scontrol", "show", "job"], env=cluster, capture_output=True, text=True).stdout
    assert where.count("NodeList=127.0.0.[1-2]") == 2 and where.count("JobState=COMPLETED") == 2
