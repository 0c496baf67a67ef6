"""Promise: real namespaces and links come, are as slow as they say, and go, also when their owner is killed.

`test_lab_network` shows the same of the commands without root.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.lab import rounds
from tritonrec.harness.network import Network, existing


def _cannot_build() -> str:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs iproute2"
    probe = f"tritonrec-lab-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "may not make network namespaces"
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return ""


WHY_NOT = _cannot_build()
pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


BUILD = """
import os, time
from tritonrec.harness.network import Network, built
with built(Network(2, 100.0, os.getpid())):
    print("built", flush=True)
    time.sleep(60)
"""


@pytest.mark.if_changed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_owner_leaves_nothing(number):
    owner = subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "built\n"
    mine = f"tritonrec-lab-{owner.pid}-"
    assert sum(name.startswith(mine) for name in existing()) == 3
    owner.send_signal(number)
    owner.wait(timeout=20)
    deadline = time.monotonic() + 20
    while any(name.startswith(mine) for name in existing()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [name for name in existing() if name.startswith(mine)]


@pytest.mark.slow
@pytest.mark.multi_rank
def test_a_lab_from_end_to_end(tmp_path):
    small = "--data zipf:users=60,items=80,seed=3 --world-size 2 --rate 50 --micro-batches 2 --modes nestpipe"
    sizes = "--steps 4 --rounds 1 --batch-size 12 --max-seq-len 8 --dim 4 --switch replicas=2"
    result = CliRunner().invoke(
        app, ["lab", *small.split(), *sizes.split(), "--json", str(tmp_path / "a.json"),
              "--png", str(tmp_path / "a.png"), "--trace", str(tmp_path / "traces")]
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "identical in every bit in all modes" in result.output
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        f"{name}.{kind}"
        for name in ("sequential_N=1", "nestpipe_N=2", "nestpipe_N=2_replicas=2")
        for kind in ("pftrace", "png")
    }


@pytest.mark.slow
@pytest.mark.multi_rank
def test_an_exchange_takes_the_time_of_its_bytes():
    count, rate = 250_000, 40.0  # 1 MB from each rank to the other
    with rounds.ranks_in(Network(2, rate, os.getpid())) as pool:
        times = pool.run(timed_exchange, 2, count)
    for seconds in times:
        assert seconds >= 0.9 * 4 * count * 8 / (rate * 1e6)


@pytest.mark.slow
@pytest.mark.multi_rank
def test_hosts_serve_with_a_bounded_lag_by_messages_over_their_links(tmp_path):
    words = "--world-size 2 --rate 40 --scenarios delays --bounds 1 --steps 4 --rounds 2 --largest 262144"
    saved = tmp_path / "a.json"
    result = CliRunner().invoke(app, ["serve-bench", *words.split(), "--json", str(saved)])
    assert result.exit_code == 0, result.output
    assert "predictions of all settings equal, bit for bit" in " ".join(result.output.split())
    largest = json.loads(saved.read_text())["collectives"]["262144"]
    seconds = [value for name, every in largest.items() if "cpu" not in name for value in every]
    assert min(seconds) >= 0.9 * 262144 * 8 / 40e6  # memory that ranks share would take a thousandth of it


def timed_exchange(communicators, count):
    values, counts = torch.ones(count), [0, 0]
    counts[1 - communicators.rank] = count
    communicators.control.all_reduce(torch.zeros(1), "start together")
    began = time.perf_counter()
    received = communicators.communication.all_to_all(values, counts, counts)
    assert received.shape == (count,)
    return time.perf_counter() - began
