"""Requests per second and latency of `tritonrec serve` beside plain FastAPI with eager torch, by wrk.

    python ci/benchmarks/measure_server.py                         # needs wrk (apt-get install wrk)
    python ci/benchmarks/measure_server.py --seconds 3 --rounds 1 --json FILE
    python ci/benchmarks/measure_server.py --only start score

The same exported HSTU (2 layers, 64 dimensions, 50 events, 10,000 items) and the same requests: one history
of 20 to 50 events, the best 10 items without it. The peer has one process too, computes each request in
FastAPI's threads by the exported program, one product with all items and topk, and has no batches. Answers of
both are compared with the Predictor's before a time counts, ours during all runs too, in every bit. Servers
take turns. Saturation is wrk's closed loop over `CONNECTIONS`; at half load each connection pauses at random,
so that half of the smaller of both saturated rates comes (equal pauses would bring all connections' requests
at one moment for ever: a batch answers them at one time). One client asks without pauses. Then saturation of
ours again with slow clients and hostile bodies beside it.

`start` is the time from a server's start to its first answer, and its processor time until then. `score` asks
for the scores of `CANDIDATES` items of one history.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from frame import options_of, record
from pydantic import BaseModel

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer
from tritonrec.data import NextItemLoader, load
from tritonrec.nn import HSTU, HSTUConfig
from tritonrec.serving import Predictor, export

ITEMS, K, LONGEST, CONNECTIONS, CANDIDATES = 10_000, 10, 50, 32, 100
PARTS = "start", "loads", "score"
SCRIPT = """
local bodies, at = {}, 0
for line in io.lines("BODIES") do bodies[#bodies + 1] = line end
function init(args) at = math.random(#bodies) end
function delay() return math.floor(-PAUSE * math.log(1 - math.random())) end
function request()
  at = at % #bodies + 1
  return wrk.format("POST", "/PATH", {["content-type"] = "application/json"}, bodies[at])
end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("FOUND %d %d %f %f %f %d %d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), latency:percentile(99.9),
    e.connect + e.read + e.write + e.timeout, e.status))
end
"""
HOSTILE = (b"[" * 100_000, b'{"histories": [[NaN]]}', b'{"histories": [["\xff"]]}', b" " * (2**20 + 1))


def make(folder: Path) -> Path:
    """An export that has been trained for a step."""
    torch.manual_seed(5)
    model = HSTU(HSTUConfig(max_seq_len=LONGEST))
    data = load(f"zipf:users=400,items={ITEMS},exponent=0.2,seed=3")
    loader = NextItemLoader(data, 256, LONGEST, 64, 0)
    tables = HashTableCollection([FeatureConfig("item", 64)], RowOptimizer("adam", lr=1e-2))
    with Trainer(
        model, tables, torch.optim.Adam(model.parameters(), lr=1e-2), Communicators.local()
    ) as trainer:
        trainer.step(loader.batch(0))
        trainer.save(folder / "run")
    export(folder / "run", folder / "out", model)
    return folder / "out"


class Body(BaseModel):
    histories: list[list[int]]
    k: int = K
    items: list[int] = []


def serve_plainly(path: Path, port: int) -> None:
    """The peer."""
    full = Predictor.load(path)
    ids, weights = full.item_ids, full.tables["item"].weights
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(body: Body) -> dict[str, Any]:
        places = [torch.searchsorted(ids, torch.tensor(each)) for each in body.histories]
        lengths = torch.tensor([0, *map(len, places)]).cumsum(0)
        flat = torch.cat(places)
        with torch.inference_mode():
            vectors = full.program(weights[flat], lengths, torch.zeros_like(flat))
            scores = vectors @ weights.t()
            for row, each in enumerate(places):
                scores[row, each] = -torch.inf
            best = scores.topk(body.k)
        return {"items": ids[best.indices].tolist(), "scores": best.values.tolist()}

    @app.post("/score")
    def score(body: Body) -> dict[str, Any]:
        places = torch.searchsorted(ids, torch.tensor(body.histories[0]))
        with torch.inference_mode():
            lengths = torch.tensor([0, len(places)])
            vectors = full.program(weights[places], lengths, torch.zeros_like(places))
            scores = vectors @ weights[torch.searchsorted(ids, torch.tensor(body.items))].t()
        return {"scores": scores.tolist()}

    uvicorn.run(app, port=port, log_level="error")


@contextmanager
def running(words: list[str], port: int) -> Iterator[dict[str, float]]:
    """A server, and what it took to its first answer."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    try:
        for _ in range(4800):
            with suppress(OSError):
                post(port, {"histories": [[1, 2]], "k": K})
                break
            time.sleep(0.05)
        else:
            raise SystemExit(f"{words} does not serve")
        took, ticks = time.perf_counter() - began, Path(f"/proc/{process.pid}/stat").read_text()
        spent = sum(map(int, ticks.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
        yield {"seconds": took, "processor": spent}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def post(port: int, body: Any, raw: bytes | None = None, path: str = "retrieve") -> Any:
    data = raw if raw is not None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def wrk(
    port: int, folder: Path, seconds: float, pause: float = 0, connections: int = CONNECTIONS,
    path: str = "retrieve",
) -> dict[str, float]:  # fmt: skip
    """Requests per second, milliseconds, and errors. pause: of a connection, its mean in milliseconds."""
    script = folder / "wrk.lua"
    changes = {"BODIES": str(folder / f"bodies-{path}"), "PAUSE": str(int(pause)), "PATH": path}
    text = SCRIPT
    for name, value in changes.items():
        text = text.replace(name, value)
    script.write_text(text)
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "--timeout", "30s", "-s", str(script)]
    shown = subprocess.run([*command, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True)
    found = re.search(r"FOUND (.*)", shown.stdout)
    assert found, shown.stdout + shown.stderr
    count, micros, *times, socket_errors, other_status = map(float, found[1].split())
    return {
        "rate": count / micros * 1e6, "p50": times[0] / 1e3, "p99": times[1] / 1e3, "p99_9": times[2] / 1e3,
        "socket_errors": socket_errors, "other_status": other_status,
    }  # fmt: skip


class Checks:
    """Asks ours all the while and compares each answer with the Predictor's."""

    def __init__(self, port: int, bodies: list[dict[str, Any]], full: Predictor):
        self.port, self.bodies, self.full, self.right, self.lost = port, bodies, full, 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Checks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for body in self.bodies * 1000:
            if self._stop.wait(0.2):
                return
            try:
                answer = post(self.port, body)
            except OSError:
                self.lost += 1
                continue
            items, scores = self.full.retrieve(body["histories"], K)
            same = answer["items"] == items.tolist() and torch.equal(torch.tensor(answer["scores"]), scores)
            if not same:
                print("A WRONG ANSWER", body, answer, flush=True)
                os._exit(1)
            self.right += 1


def hostile(port: int, stop: threading.Event) -> None:
    """Bodies that nobody should send, and clients that never end their request."""
    slow = []
    while not stop.wait(0.1):
        for body in HOSTILE:
            with suppress(OSError):
                post(port, None, body)
        if len(slow) < 100:
            with suppress(OSError):
                slow.append(socket.create_connection(("127.0.0.1", port)))
                slow[-1].sendall(b"POST /retrieve HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{")
    for each in slow:
        each.close()


def starts(commands: dict[str, list[str]], ports: dict[str, int], rounds: int) -> dict[str, Any]:
    """Seconds and processor seconds until the first answer, by turns; kernels were compiled before."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, words in commands.items():
            with running(words, ports[name]) as took:
                found[name] += [took] * (number > 0)
    row = {name: {key: median(each[key] for each in of) for key in of[0]} for name, of in found.items()}
    for name, each in row.items():
        print(
            f"start {name:5s} {each['seconds']:.2f} s, {each['processor']:.2f} s of the processor", flush=True
        )
    return {"start": row}


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = make(folder)
    full = Predictor.load(path)
    draw = torch.Generator().manual_seed(1)
    known = full.item_ids
    bodies = [
        {"histories": [known[torch.randint(0, len(known), (n,), generator=draw)].unique().tolist()], "k": K}
        for n in torch.randint(20, LONGEST + 1, (500,), generator=draw).tolist()
    ]
    (folder / "bodies-retrieve").write_text("\n".join(map(json.dumps, bodies)) + "\n")
    candidates = [known[torch.randperm(len(known), generator=draw)[:CANDIDATES]].tolist() for _ in bodies]
    judged = [
        {"histories": each["histories"], "items": items}
        for each, items in zip(bodies, candidates, strict=True)
    ]
    (folder / "bodies-score").write_text("\n".join(map(json.dumps, judged)) + "\n")
    ours, peer = free_port(), free_port()
    ports = {"ours": ours, "peer": peer}
    commands = {
        "ours": ["-m", "tritonrec", "serve", str(path), "--port", str(ours)],
        "peer": [__file__, "--peer", str(path), str(peer)],
    }
    rows: dict[str, Any] = {}
    if "start" in options.only:
        rows |= starts(commands, ports, options.rounds)
        record(options, rows=rows)  # of what is stopped, what it has come through is there
    if not {"loads", "score"} & {*options.only}:
        return rows
    with running(commands["ours"], ours), running(commands["peer"], peer):
        for body in bodies[:20]:
            want = full.retrieve(body["histories"], K)
            for port in (ours, peer):
                answer = post(port, body)
                close = torch.allclose(torch.tensor(answer["scores"]), want[1], rtol=1e-4, atol=1e-4)
                if not close or (port == ours and not torch.equal(torch.tensor(answer["scores"]), want[1])):
                    raise SystemExit(f"port {port} gives something else; no time is printed")
        for judge in judged[:20]:
            want = full.scores(judge["histories"], torch.tensor(judge["items"]))
            for port in (ours, peer):
                answer = torch.tensor(post(port, judge, path="score")["scores"])
                close = torch.allclose(answer, want, rtol=1e-4, atol=1e-4)
                if not close or (port == ours and not torch.equal(answer, want)):
                    raise SystemExit(f"port {port} scores something else; no time is printed")
        if "score" in options.only:
            for title, count in (("score, saturated", CONNECTIONS), ("score, one client", 1)):
                rows |= turns(title, ports, folder, options, lambda name: 0, count, "score")
        if "loads" not in options.only:
            return rows
        with Checks(ours, bodies, full) as checks:
            for each in ports.values():
                wrk(each, folder, 2)
            rows |= turns("saturated", ports, folder, options, lambda name: 0)
            rate = min(rows["saturated"][name]["rate"] for name in ports) / 2
            rows |= turns(
                "half load", ports, folder, options,
                lambda name: CONNECTIONS / rate * 1e3 - rows["saturated"][name]["p50"] / 8,
            )  # fmt: skip
            rows |= turns("one client", ports, folder, options, lambda name: 0, connections=1)
            stop = threading.Event()
            attack = threading.Thread(target=hostile, args=(ours, stop))
            attack.start()
            rows |= turns("saturated, attacked", {"ours": ours}, folder, options, lambda name: 0)
            stop.set()
            attack.join()
        print(
            f"{checks.right} answers of ours were compared meanwhile, none was wrong, {checks.lost} were lost"
        )
        rows["compared"], rows["lost"] = checks.right, checks.lost
    return rows


def turns(
    title: str,
    ports: dict[str, int],
    folder: Path,
    options: argparse.Namespace,
    pause: Callable[[str], float],
    connections: int = CONNECTIONS,
    path: str = "retrieve",
) -> dict[str, Any]:
    """Medians over rounds, in which the servers take turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
    for number in range(options.rounds):
        for name in ports if number % 2 else reversed(ports):
            given = folder, options.seconds, max(pause(name), 0), connections, path
            found[name].append(wrk(ports[name], *given))
    return {title: shown(title, found)}


def shown(title: str, found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians, printed."""
    row = {name: {key: median(each[key] for each in rows) for key in rows[0]} for name, rows in found.items()}
    for name, each in row.items():
        print(
            f"{title:20s} {name:5s} {each['rate']:8.1f} requests/s  p50 {each['p50']:7.1f}  "
            f"p99 {each['p99']:7.1f}  p99.9 {each['p99_9']:7.1f} ms  "
            f"errors {each['socket_errors']:.0f} of sockets, {each['other_status']:.0f} other statuses",
            flush=True,
        )
    return row


def main() -> None:
    peer = {"nargs": 2, "help": argparse.SUPPRESS}
    only = {"nargs": "+", "choices": PARTS, "default": list(PARTS)}
    options = options_of(__doc__, seconds=10.0, rounds=3, peer=peer, only=only)
    if options.peer:
        serve_plainly(Path(options.peer[0]), int(options.peer[1]))
        return
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk")
    with tempfile.TemporaryDirectory() as folder:
        rows = run(options, Path(folder))
    record(options, rows=rows)


if __name__ == "__main__":
    main()
