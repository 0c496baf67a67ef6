"""Small exported models for tests of the server, two versions of an HSTU and a DLRM; servers that listen."""

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import uvicorn
from live_parts import until
from trainer_parts import adam_trainer

from tritonrec import FeatureConfig
from tritonrec.data import ClickLoader, NextItemLoader, Vocabulary, load, load_clicks
from tritonrec.nn import DLRM, HSTU, DLRMConfig, HSTUConfig
from tritonrec.serving import Predictor, export
from tritonrec.serving.server.app import create_app
from tritonrec.serving.server.guard import Impatient
from tritonrec.serving.server.model import Served

LONGEST = 12
SIZES = HSTUConfig(dim=16, layers=1, heads=2, qk_dim=8, v_dim=8, max_seq_len=LONGEST)


def export_hstu(folder: Path, words: bool = False, timed: bool = False) -> list[Path]:
    """Exports after one step and after two."""
    torch.manual_seed(7)
    model = HSTU(replace(SIZES, relative_bias=timed))
    loader = NextItemLoader(load("zipf:users=50,items=60,median_length=9,seed=3"), 16, LONGEST, 3, 0)
    paths = [folder / "one", folder / "two"]
    with adam_trainer(model, [FeatureConfig("item", 16)], lr=0.1) as trainer:
        if words:
            trainer.vocabularies = {"item": Vocabulary(f"item {n}" for n in range(60))}
        for step, path in enumerate(paths):
            trainer.step(loader.batch(step))
            trainer.save(folder / "run")
            export(folder / "run", path, model)
    return paths


def export_dlrm(folder: Path) -> tuple[Path, ClickLoader]:
    """An export, and clicks for it."""
    loader = ClickLoader(load_clicks("criteo:samples=300,scale=0.0001,seed=4"), 16, 0)
    names = list(loader.batch(0).lookups())
    torch.manual_seed(5)
    model = DLRM(
        DLRMConfig(dim=8, dense=loader.batch(0).dense.shape[1], features=tuple(names), bottom=(8,), top=(8,))
    )
    with adam_trainer(model, [FeatureConfig(name, 8) for name in names]) as trainer:
        trainer.step(loader.batch(0))
        trainer.save(folder / "run")
    export(folder / "run", folder / "clicks", model)
    return folder / "clicks", loader


@contextmanager
def listening(path, config):
    """The port of a server in a thread, or process."""
    full = Predictor.load(path)
    full.retrieve([3, 7], 3)  # compiles
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(lambda: Served(lambda: full), config), port=0, http=partial(Impatient, limits=config),
            log_level="error", timeout_keep_alive=1,
        )
    )  # fmt: skip
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def process(*words):
    """A server in a process of its own, and its port."""
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "tritonrec", "serve", *map(str, words), "--port", "0"]
    running = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        line = running.stdout.readline()
        found = re.match(r"serving at http://127.0.0.1:(\d+)", line)
        assert found, running.stderr.read()
        yield running, int(found[1])
    finally:
        running.kill()
        running.communicate()


def ask(port, body, path="predict"):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
