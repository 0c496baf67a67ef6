"""Requests per second and memory of a served DLRM: one process, tables spread over ranks, copies of all.

    python ci/benchmarks/measure_spread.py
    python ci/benchmarks/measure_spread.py --rows 20000 --seconds 3 --json FILE

26 tables of so many rows, 32 columns; each request has so many impressions, known and unknown ids, from eight
connections, in batches of 512 at most. Every answer is compared with the Predictor's in every bit. The
servers take turns; a rate, and the processor's time for a request in all processes of a server, is the median
over rounds. Memory is the proportional share (PSS) of all processes, and of the largest.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from frame import options_of, record

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer
from tritonrec.data import ClickLoader, ClickLog
from tritonrec.nn import DLRM, DLRMConfig
from tritonrec.serving import Predictor, export

FEATURES, DENSE, DIM, CONNECTIONS, BODIES, BATCH = 26, 13, 32, 8, 32, 512
SERVERS = {"one process": [], "2 ranks": ["--ranks", "2"], "2 workers": ["--workers", "2"]}


def exported(folder: Path, rows: int) -> Path:
    """A model whose every table has a row for each of `rows` ids, after a few steps."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(rows, generator=draw) for _ in range(FEATURES)], 1)
    names = tuple(f"f{n}" for n in range(FEATURES))
    labels = torch.randint(0, 2, (rows,), generator=draw)
    log = ClickLog(torch.randn(rows, DENSE, generator=draw).numpy(), ids.numpy(), labels.numpy(), names, rows)
    torch.manual_seed(3)
    model = DLRM(DLRMConfig(names, DENSE, DIM, (64,), (64,)))
    tables = HashTableCollection([FeatureConfig(name, DIM) for name in names], RowOptimizer("sgd", lr=0.1))
    loader = ClickLoader(log, 20_000, 0)
    with Trainer(
        model, tables, torch.optim.SGD(model.parameters(), lr=0.1), Communicators.local()
    ) as trainer:
        for step in range(loader.steps_per_epoch):
            trainer.step(loader.batch(step))
        trainer.save(folder / "run")
    export(folder / "run", folder / "out", model, format="safetensors")
    return folder / "out"


def bodies(path: Path, rows: int, impressions: int) -> list[tuple[bytes, list[float]]]:
    """Requests and their answers."""
    full, draw, found = Predictor.load(path), torch.Generator().manual_seed(5), []
    for _ in range(BODIES):
        dense = torch.randn(impressions, DENSE, generator=draw)
        names = full.manifest["dense"]["features"]
        ids = {name: torch.randint(0, rows + rows // 8, (impressions,), generator=draw) for name in names}
        body = {"dense": dense.tolist(), "features": {name: each.tolist() for name, each in ids.items()}}
        found.append((json.dumps(body).encode(), full.predict(dense, ids).tolist()))
    return found


def family(process: int) -> list[int]:
    """A process and those below it."""
    shown = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    pairs, below = [tuple(map(int, line.split())) for line in shown.splitlines()], {process}
    for _ in range(4):
        below |= {child for child, parent in pairs if parent in below}
    return [*below]


def shares(process: int) -> list[int]:
    """PSS in bytes."""
    texts = [Path(f"/proc/{each}/smaps_rollup").read_text() for each in family(process)]
    return [int(re.search(r"^Pss:\s+(\d+) kB", text, re.M)[1]) * 1024 for text in texts]  # type: ignore[index]


def processor_seconds(process: int) -> float:
    """Of all processes of a server."""
    texts = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in family(process)]
    return sum(int(text[11]) + int(text[12]) for text in texts) / os.sysconf("SC_CLK_TCK")


def measured(path: Path, words: list[str], requests: list[Any], seconds: float) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "tritonrec",
        "serve",
        str(path),
        "--port",
        "0",
        "--batch",
        str(BATCH),
        *words,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        found = re.search(r":(\d+)$", server.stdout.readline())
        if found is None:
            raise SystemExit(f"{command} does not serve")
        port = int(found[1])

        def load(number: int, until: float) -> int:
            connection, count = http.client.HTTPConnection("127.0.0.1", port, timeout=300), 0
            while time.monotonic() < until or not count:
                body, want = requests[(number * 7 + count) % len(requests)]
                connection.request("POST", "/predict", body, {"content-type": "application/json"})
                if json.loads(connection.getresponse().read())["probabilities"] != want:
                    raise SystemExit(f"{words}: an answer differs; no time is printed")
                count += 1
            return count

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            [*pool.map(load, range(CONNECTIONS), [0.0] * CONNECTIONS)]  # compiles
            began, before = time.monotonic(), processor_seconds(server.pid)
            count = sum(pool.map(load, range(CONNECTIONS), [began + seconds] * CONNECTIONS))
            rate = count / (time.monotonic() - began)
            spent = (processor_seconds(server.pid) - before) / count * 1e3
        memory = shares(server.pid)
        server.send_signal(signal.SIGTERM)
    return {"rate": rate, "processor_ms": spent, "all_bytes": sum(memory), "largest_bytes": max(memory)}


def main() -> None:
    options = options_of(__doc__, rows=120_000, impressions=64, seconds=8.0, rounds=3)
    with tempfile.TemporaryDirectory() as folder:
        path = exported(Path(folder), options.rows)
        requests = bodies(path, options.rows, options.impressions)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
        for _ in range(options.rounds):
            for name, words in SERVERS.items():
                runs[name].append(measured(path, words, requests, options.seconds))
    rows = []
    for name, each in runs.items():
        row = {what: median(run[what] for run in each) for what in each[0]}
        ratios = [run["rate"] / one["rate"] for run, one in zip(each, runs["one process"], strict=True)]
        rows.append({"server": name, **row, "ratio": median(ratios), "ratios": ratios})
        print(
            f"{name:12} {row['rate']:7.1f} requests/s, {median(ratios):.2f} of one process "
            f"({min(ratios):.2f} to {max(ratios):.2f}); {row['processor_ms']:.1f} ms of the processor; "
            f"PSS {row['all_bytes'] / 2**20:,.0f} MiB in all, "
            f"{row['largest_bytes'] / 2**20:,.0f} of the largest process"
        )
    record(options, rows=rows)


if __name__ == "__main__":
    main()
