"""Kill a training that publishes, a server that follows it, and its sink, at random moments.

    python ci/attack/kill_serving.py --kills 500 --seed 7
    python ci/attack/kill_serving.py --kills 500 --seed 7 --redis
    python ci/attack/kill_serving.py --kills 500 --seed 7 --ranks 2      # a rank of the server, too

A training publishes every two steps and saves a checkpoint every four, into a folder or, with `--redis`, a
`redis-server` of this script. A server follows and answers requests, and a follower polls. One of them gets
SIGKILL at a random moment, of its start too, and is started again: a training at the published step continues
the sequence, before it it begins an epoch. Whenever the follower goes on, its rows and dense values are
compared with those of a training that nobody killed, and every answer of the server by the step that it
names; a server with ranks must answer between two kills. At the end both must show the last step. A training
that came to its end is followed by a new one in a new place. The last line is a JSON object; exit status 1
where a state or an answer was another one, or where an error did not pass.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer
from tritonrec import checkpoint as checkpoints
from tritonrec.data import NextItemLoader, load
from tritonrec.embedding import Eviction, TablePolicy
from tritonrec.nn import HSTU, HSTUConfig
from tritonrec.pipeline import WindowConfig
from tritonrec.serving.live import Follower, LiveError, Publisher, SinkError
from tritonrec.serving.live.wire import digest_of
from tritonrec.serving.server import ServerConfig
from tritonrec.serving.server.run import Source, serve

STEPS, EVERY, SAVE_EVERY = 40, 2, 4
HISTORIES, BEST = [[3, 7], [5], [2, 9, 2, 4]], 4
PATIENCE = 300.0
"""Seconds in which a training that nobody kills must end."""
ANSWERS = 3
"""Of a server with ranks that are compared behind each kill, at least."""
NO_SINK = 3


def made() -> tuple[Trainer, NextItemLoader]:
    """The training, in the same bits each time."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = HSTU(HSTUConfig(dim=6, layers=1, heads=2, qk_dim=3, v_dim=4, max_seq_len=6))
    feature = FeatureConfig("item", 6, policy=TablePolicy(Eviction("lru", capacity=40)))
    tables = HashTableCollection([feature], RowOptimizer("adam", lr=0.05), seed=2, slots=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    config = WindowConfig(micro_batches=2)
    trainer = Trainer(model, tables, optimizer, Communicators.local(), "sequential", config)
    return trainer, NextItemLoader(load("zipf:users=60,items=120,seed=1"), 4, 6, 1, 3)


def state_of(trainer: Trainer) -> str:
    ids, weights = trainer.tables.weights()["item"]
    dense = trainer.dense.evaluated.state_dict()
    return digest_of(
        {"ids": ids, "weights": weights, **{f"dense {name}": each for name, each in dense.items()}}
    )


def state_shown(follower: Follower) -> tuple[int, str]:
    predictor = follower.predictor
    table, dense = predictor.tables["item"], predictor.program.state_dict()
    own = {f"dense {name.removeprefix('module.model.')}": each for name, each in dense.items()}
    return predictor.step, digest_of({"ids": table.ids, "weights": table.weights, **own})


def publish(sink: str, saved: str, ready: str) -> None:
    """Train on from the newest checkpoint, and publish."""
    try:
        train(sink, saved, ready)
    except SinkError:
        sys.exit(NO_SINK)


def train(sink: str, saved: str, ready: str) -> None:
    warnings.simplefilter("ignore")
    trainer, loader = made()
    if checkpoints.steps(saved):
        trainer.load(saved)
    with trainer, trainer.saver(saved) as saver:
        Path(ready).touch()
        with Publisher(trainer, sink, every=EVERY, snapshot_every=5, patience=30) as publisher:
            for first in range(trainer.next_step, STEPS, SAVE_EVERY):
                for _ in publisher.run(loader.batch(step) for step in range(first, first + SAVE_EVERY)):
                    time.sleep(0.01)
                saver.save(trainer.next_step)


class Server:
    """`tritonrec serve --follow --ranks` in a process, asked for the best items of `HISTORIES`."""

    def __init__(self, sink: str, ranks: int) -> None:
        self._sink, self._ranks = sink, ranks
        self.start()

    def start(self) -> None:
        self._port = free_port()
        self._process = PROCESSES.Process(target=serve_quietly, args=(self._sink, self._port, self._ranks))
        self._process.start()

    def kill_rank(self, draw: random.Random) -> None:
        """One of its ranks, if they have started; it starts them all anew."""
        if ranks := descendants_of(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(draw.choice(ranks), signal.SIGKILL)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def answer(self) -> tuple[int, str] | None:
        """A step and a digest of items and scores; None while it starts, or has nothing to show yet.

        A server that ended by itself, because there was no snapshot to begin with, is started again.
        """
        body = json.dumps({"histories": HISTORIES, "k": BEST}).encode()
        url, headers = f"http://127.0.0.1:{self._port}/retrieve", {"content-type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as found:
                told = json.loads(found.read())
        except urllib.error.HTTPError as error:  # not ready, or a table before the first step
            error.close()
            if error.code >= 500 and error.code != 503:
                raise
            return None
        except OSError:
            if not self._process.is_alive():
                self.start()
            return None
        return told["step"], json.dumps([told["items"], told["scores"]])


def serve_quietly(sink: str, port: int, ranks: int) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115
    serve(Source(None, follow=sink), ServerConfig(port=port, ranks=ranks))


class Redis:
    """A `redis-server` whose answers are on the disk."""

    def __init__(self, folder: str) -> None:
        self.port = free_port()
        self._command = [
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", folder,
            "--appendonly", "yes", "--appendfsync", "always",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def descendants_of(pid: int | None) -> list[int]:
    """Processes that it started, and those that these did."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    own = [child for child, parent in parents.items() if parent == pid]
    return own + [each for child in own for each in descendants_of(child)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


PROCESSES = multiprocessing.get_context("forkserver")


def unharmed(folder: str) -> dict[int, tuple[str, str | None]]:
    """What each published step shows: a digest of the training's state, and the answer to `HISTORIES`."""
    trainer, loader = made()
    shown: dict[int, tuple[str, str | None]] = {}
    with trainer, Publisher(trainer, folder, every=EVERY) as publisher:
        follower: Follower | None = None
        for step in range(0, STEPS + 1, EVERY):
            end = time.monotonic() + PATIENCE
            while follower is None or follower.step < step:
                with suppress(LiveError):
                    if follower is None:
                        follower = Follower.open(folder)
                    follower.poll()
                assert time.monotonic() < end, f"step {step} is not published"
            state, best = state_of(trainer), None
            assert state_shown(follower) == (step, state), (
                f"another state at step {step}, and nobody was killed"
            )
            if step:  # before, there are no items
                items, scores = follower.predictor.retrieve([torch.tensor(ids) for ids in HISTORIES], BEST)
                best = json.dumps([items.tolist(), scores.tolist()])
            shown[step] = state, best
            for _ in publisher.run(loader.batch(each) for each in range(step, min(step + EVERY, STEPS))):
                pass
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="end earlier, after so many")
    parser.add_argument("--folder", type=Path, help="an absent one; a temporary one by default")
    parser.add_argument("--redis", action="store_true", help="publish to a redis-server, which is killed too")
    parser.add_argument("--ranks", type=int, default=1, help="of the server")
    given = parser.parse_args()
    draw, began = random.Random(given.seed), time.monotonic()
    PROCESSES.set_forkserver_preload(
        ["tritonrec.serving.live", "tritonrec.serving.server.run", "tritonrec.pipeline", "torch._dynamo"]
    )
    counts = Counts()

    def enough() -> bool:
        return counts.kills >= given.kills or time.monotonic() - began > given.seconds

    with TemporaryDirectory(prefix="tritonrec-") as temporary:
        want = unharmed(str(Path(temporary, "unharmed")))
        root = given.folder or Path(temporary, "kills")
        redis = Redis(temporary) if given.redis else None
        while not enough():
            counts.runs += 1
            place = f"redis://127.0.0.1:{redis.port}/0?key=run{counts.runs}" if redis else str(root / "sink")
            Run(root, place, redis, given.ranks, want, counts).killed(draw, enough)
            print(f"{counts.kills} kills, {counts.states} states, {counts.answers} answers", file=sys.stderr)
            shutil.rmtree(root, ignore_errors=True)
        if redis:
            redis.kill()
    counts.seconds = round(time.monotonic() - began, 1)
    counts.steps_answered = sorted(counts.steps_answered)
    print(json.dumps(vars(counts)))
    return int(counts.wrong > 0)


@dataclass
class Counts:
    """What was killed, what was compared, and what was wrong."""

    kills: int = 0
    of: dict[str, int] = field(default_factory=lambda: {"training": 0, "server": 0, "rank": 0, "sink": 0})
    runs: int = 0
    epochs: int = 0
    states: int = 0
    answers: int = 0
    refused: int = 0
    wrong: int = 0
    seconds: float = 0.0
    steps_answered: Any = field(default_factory=set)


class Run:
    """One training, killed and started until it ends; who follows it."""

    _training: BaseProcess

    def __init__(
        self,
        root: Path,
        place: str,
        redis: Redis | None,
        ranks: int,
        want: dict[int, tuple[str, str | None]],
        counts: Counts,
    ) -> None:
        root.mkdir(exist_ok=True, parents=True)
        self._root, self._place, self._redis, self._want, self.counts = root, place, redis, want, counts
        self._follower: Follower | None = None
        self._sequence = 0
        self._ranks, self._server = ranks, Server(place, ranks)

    def train(self) -> None:
        """Start it, or go on."""
        self._ready = self._root / "ready"
        self._ready.unlink(missing_ok=True)
        words = (self._place, str(self._root / "saved"), str(self._ready))
        self._training = PROCESSES.Process(target=publish, args=words)
        self._training.start()

    def killed(self, draw: random.Random, enough: Callable[[], bool]) -> None:
        """Kill who is drawn until the training has ended, or there were `enough`, and see how all end."""
        self.train()
        victims = ["training", "training", "server", *(["sink"] if self._redis else [])]
        victims += ["rank"] * (self._ranks > 1)
        while not self._has_ended():
            self._look_for(PATIENCE, until=lambda: self._ready.exists() or enough())
            if self._ranks > 1:
                self._let_the_server_answer()
            self._look_for(draw.uniform(0, draw.choice([0.3, 4, 12])), until=enough)
            if enough():
                self._look_for(PATIENCE)
                break
            victim = draw.choice(victims)
            self.counts.kills += 1
            self.counts.of[victim] += 1
            if victim == "training":
                self._training.kill()
                self._training.join()
                self.train()
            elif victim == "server":
                self._server.kill()
                self._server.start()
            elif victim == "rank":
                self._server.kill_rank(draw)
            else:
                assert self._redis is not None
                self._redis.kill()
                self.look()
                self._redis.start()
        self._come_to_the_end()

    def _has_ended(self) -> bool:
        """Whether the training came to its end; one that could not use the sink is started again."""
        code = self._training.exitcode
        if code == NO_SINK:
            self.counts.refused += 1
            self.train()
        elif code:
            self._wrong(f"a training ended with {code}")
        return code is not None and code != NO_SINK

    def _look_for(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + seconds
        while self._training.is_alive() and time.monotonic() < end and not until():
            self.look()
            time.sleep(0.002)

    def _let_the_server_answer(self) -> None:
        """The training rests meanwhile: ranks start for longer than it takes to its end.

        A server that answered before the kill answers again behind it, with what the training has published.
        """
        began, shown = self.counts.answers, lambda: self._follower is not None and self._follower.step > 0
        self._look_for(PATIENCE, until=shown)  # before, there are no items
        if not self._training.is_alive():
            return
        assert self._training.pid is not None
        end = time.monotonic() + PATIENCE
        os.kill(self._training.pid, signal.SIGSTOP)
        try:
            while self.counts.answers < began + ANSWERS and time.monotonic() < end:
                self.look()
                time.sleep(0.02)
        finally:
            os.kill(self._training.pid, signal.SIGCONT)
        if self.counts.answers < began + ANSWERS:
            self._wrong(f"the server gave {self.counts.answers - began} answers in {PATIENCE:.0f} s")

    def _come_to_the_end(self) -> None:
        """The follower and the server show the last step."""
        if self._training.is_alive():
            self._training.kill()
            self._wrong("a training that nobody killed did not end")
        end, told = time.monotonic() + PATIENCE, None
        while (
            self._follower is None or self._follower.step != STEPS or told != STEPS
        ) and time.monotonic() < end:
            told = self.look()
        self._server.kill()
        shown = self._follower.step if self._follower else None
        if (shown, told) != (STEPS, STEPS):
            self._wrong(f"at the end the follower shows step {shown} and the server {told}, not {STEPS}")
        if self._follower is not None:
            self.counts.epochs += self._follower._state.epoch

    def look(self) -> int | None:
        """Compare what the follower and the server show; the step of the server's answer."""
        try:
            if self._follower is None:
                self._follower = Follower.open(self._place)
            else:
                self._follower.poll()
        except LiveError as error:
            if self._follower is not None:
                self.counts.refused += 1
                if not isinstance(error, SinkError):  # a killed sink answers nobody
                    print(f"refused: {type(error).__name__}: {error}")
        if self._follower is not None and self._follower.sequence != self._sequence:
            self._sequence = self._follower.sequence
            step, state = state_shown(self._follower)
            self.counts.states += 1
            if self._want[step][0] != state:
                self._wrong(f"another state at step {step}, sequence {self._sequence} in {self._place}")
        if (found := self._server.answer()) is None:
            return None
        step, answer = found
        self.counts.answers += 1
        self.counts.steps_answered.add(step)
        if self._want[step][1] != answer:
            self._wrong(f"another answer at step {step} in {self._place}: {answer}")
        return step

    def _wrong(self, what: str) -> None:
        self.counts.wrong += 1
        print(what)


if __name__ == "__main__":
    sys.exit(main())
