"""Promise: ranks of torchft_quorum.py come and go, and every step has the digits of one rank: by torchft's
lighthouse where it is installed, and always by a stand-in for it.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from multiprocessing.managers import BaseManager
from pathlib import Path

import pytest
from test_ray_example import losses, of_one_process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/torchft_quorum.py"
CLIENT = """
from multiprocessing.managers import BaseManager
from types import SimpleNamespace

class LighthouseClient:
    def __init__(self, address, timeout):
        BaseManager.register("lighthouse")
        host, port = address.removeprefix("http://").split(":")
        served = BaseManager((host, int(port)), b"test")
        served.connect()
        self._served = served.lighthouse()

    def heartbeat(self, name):
        self._served.heartbeat(name)

    def quorum(self, name, timeout, address, store_address, step):
        number, members = self._served.quorum(name, store_address)
        members = [SimpleNamespace(replica_id=name, store_address=at) for name, at in members]
        return SimpleNamespace(quorum_id=number, participants=members)
"""


class Lighthouse:
    """Who has asked, once all have that have a heart; another number for others."""

    def __init__(self):
        self.change, self.beats, self.asked, self.rounds, self.answer = (
            threading.Condition(),
            {},
            {},
            0,
            (0, []),
        )

    def heartbeat(self, name):
        self.beats[name] = time.monotonic()

    def quorum(self, name, store_address):
        with self.change:
            self.heartbeat(name)
            self.asked[name], mine = store_address, self.rounds
            while self.rounds == mine:
                alive = {each for each, beat in self.beats.copy().items() if time.monotonic() - beat < 3}
                if alive <= self.asked.keys():
                    members = [(each, at) for each, at in self.asked.items() if each in alive]
                    is_other = sorted(members) != sorted(self.answer[1])
                    self.answer = self.answer[0] + is_other, members
                    self.asked, self.rounds = {}, self.rounds + 1
                    self.change.notify_all()
                else:
                    self.change.wait(0.2)
            return self.answer


def serve(tmp_path):
    """The address of a lighthouse, and the path of its client's package."""
    lighthouse = Lighthouse()
    BaseManager.register("lighthouse", lambda: lighthouse)
    server = BaseManager(("127.0.0.1", 0), b"test").get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "torchft").mkdir()
    (tmp_path / "torchft/__init__.py").touch()  # else the package that is installed comes first
    (tmp_path / "torchft/coordination.py").write_text(CLIENT)
    return "http://{}:{}".format(*server.address)


@pytest.mark.if_changed
@pytest.mark.multi_rank
@pytest.mark.parametrize("kind", ["stand-in", pytest.param("torchft", marks=pytest.mark.slow)])
def test_ranks_come_and_go(tmp_path, kind):
    if kind == "stand-in":
        address = serve(tmp_path)
    else:
        reason = "no wheel for each Python: pip install 'tritonrec[heavy]'"
        coordination = pytest.importorskip("torchft.coordination", reason=reason)
        server = coordination.LighthouseServer("[::]:0", 1, 1000, heartbeat_timeout_ms=3000)
        address = server.address()
    own = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": address}
    environment = {**os.environ, **own}
    lines, text, ranks = queue.Queue(), "", []

    def start():
        command = [sys.executable, EXAMPLE, str(tmp_path / "run"), "1000000"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(command, env=environment, **pipes))
        read = threading.Thread(
            target=lambda out: [*map(lines.put, out)], args=[ranks[-1].stdout], daemon=True
        )
        read.start()

    try:
        for of in ("of 1", "of 2", "of 1", "of 2")[: 3 if kind == "stand-in" else 4]:
            if of == "of 2" or not ranks:
                start()
            else:
                ranks.pop().kill()
            while not text.endswith(f"{of}\n") or "step" not in text:
                text += lines.get(timeout=120)
            text += "|\n"
        while "step 20:" not in text:
            text += lines.get(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        if kind == "torchft":
            server.shutdown()
    found = losses(text)
    assert {step: found[step] for step in of_one_process()} == of_one_process()
