"""The server as processes: uvicorn, its workers, and signals."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import parent_process
from threading import Thread
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from ...files import ScratchFolder
from ...files.places import Place, place_of
from ...kernels.dispatch import usable_device
from ...nn import NextItemModel
from ...settings import bytes_of
from ..approximate import ApproximatePredictor, Index
from ..manifest import read_manifest
from ..predictor import Predictor
from ..programs import CLICK
from ..spread import SpreadPredictor
from ..spread_rows import SpreadFollower, SpreadRowsPredictor
from .app import DEFAULTS, create_app
from .guard import Impatient
from .metrics import DIRECTORY
from .model import Served
from .settings import ServerConfig

log = logging.getLogger("tritonrec.server")


@dataclass(frozen=True)
class Source:
    """Where the model is.

    Args:
        path: of the export; None where `follow` is alone. model: of the trained configuration, for cached
            inference within `memory`. follow: the URL that a trainer publishes to. device: that computes.
            host_memory: behind `memory`, which is the device's then.
    """

    path: Place | str | None
    model: NextItemModel | None = None
    memory: str = "2GiB"
    follow: str | None = None
    approximate: Index | None = None
    device: str = "cpu"
    host_memory: str = "0"

    def open(self, config: ServerConfig) -> Served:
        """Read it."""
        load = None if self.path is None else partial(self._load, config)
        cache = self.model, self.memory, self.host_memory
        served = Served(load, *cache, self.device, config.workers == 1, config.max_users)
        version = served.version
        if version is not None and version.users is None and config.max_users != DEFAULTS.max_users:
            raise ValueError(
                "--max-users goes with users' events, which one process with a model of the next item keeps"
            )
        return served

    def _load(self, config: ServerConfig) -> Predictor:
        assert self.path is not None
        exact = Predictor.load(self.path) if config.ranks == 1 else _spread(self.path, config)
        if self.approximate is None:
            return exact
        found = ApproximatePredictor(exact, self.approximate)
        log.warning("%s finds %.4f of the best 100 items of drawn histories", self.approximate, found.recall)
        return found


def _spread(path: Place | str, config: ServerConfig) -> Predictor:
    """With tables in other processes: those of a DLRM whole, of other models row by row."""
    dense, timeout = read_manifest(place_of(path))["dense"], timedelta(seconds=config.timeout)
    kind = SpreadPredictor if dense and dense["kind"] == CLICK else SpreadRowsPredictor.load
    return kind(path, config.ranks, timeout)


def _app(source: Source, config: ServerConfig, token: str | None, served: Served | None = None) -> FastAPI:
    """Of one worker."""
    if config.workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.workers))
        Thread(target=_end_with_parent, daemon=True).start()
    follow: Callable[[], Any] | None = None
    if source.follow is not None:
        from ..live import Follower

        follow = partial(Follower.open, source.follow)
        if config.ranks > 1:
            follow = partial(SpreadFollower, source.follow, config.ranks, timedelta(seconds=config.timeout))
    return create_app(lambda: served or source.open(config), config, token, follow)


def _end_with_parent() -> None:
    """A worker whose parent was killed would keep the port."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


class Workers(Multiprocess):
    """SIGHUP is for each worker, and one that has ended is replaced.

    None is asked whether it is well: uvicorn waits for the answer of one that loads, or has just died.
    """

    def keep_subprocess_alive(self) -> None:
        """As of its base."""
        for at, worker in enumerate(self.processes):
            if worker.process.is_alive():
                continue
            if worker.exitcode == STARTUP_FAILURE:
                log.error("worker %s could not start, so the server ends", worker.pid)
                self.should_exit.set()
                return
            log.warning("worker %s has ended (%s), another one starts", worker.pid, worker.exitcode)
            self.processes[at] = Process(self.config, self.sockets)
            self.processes[at].start()

    def handle_hup(self) -> None:
        """As of its base."""
        for worker in self.processes:
            if worker.pid is not None:
                os.kill(worker.pid, signal.SIGHUP)


def serve(source: Source, config: ServerConfig = DEFAULTS, token: str | None = None) -> None:
    """Serve until SIGTERM or SIGINT; requests that are there are answered, new ones refused.

    Raises ValueError for a host that others reach where there is no `token`, and as `Predictor.load`.
    """
    if token is None and not config.is_loopback:
        raise ValueError(
            f"{config.host} can be reached by others: give --token-file or the variable TRITONREC_TOKEN"
        )
    if config.ranks > 1 and config.workers > 1:
        raise ValueError("--ranks does not go with --workers: each worker would have ranks of its own")
    if config.ranks > 1 and source.approximate is not None:
        raise ValueError("--ranks does not go with --approximate: an index needs all rows in one place")
    if source.device != "cpu" and (config.ranks > 1 or source.approximate is not None):
        raise ValueError("--device does not go with --ranks and --approximate, which search on the CPU")
    if bytes_of(source.memory) != bytes_of(Source.memory) and source.model is None:
        raise ValueError("--memory goes with --cached: keys and values of users are in it")
    if config.max_lag and source.follow is None:
        raise ValueError("--max-lag goes with --follow: a folder has no lag")
    if config.workers > 1 and config.max_users != DEFAULTS.max_users:
        raise ValueError("--max-users does not go with --workers, which keep no events of users")
    host_memory = bytes_of(source.host_memory, "host_memory")
    if (usable_device(source.device).type == "cpu" or source.model is None) and host_memory:
        raise ValueError("--host-memory goes with --cached and a --device, whose memory it stands behind")
    if config.workers > 1 and source.model is not None:
        raise ValueError("a cache of users' keys and values needs one worker: each would have its own")
    if source.follow is not None:
        from ..live.sinks import sink_of

        sink_of(source.follow)  # a trainer that is late is waited for, a package that is missing is not
    options: dict[str, Any] = {
        "host": config.host, "port": config.port, "workers": config.workers, "factory": True,
        "http": partial(Impatient, limits=config), "ws": "none", "lifespan": "on",
        "log_level": "warning", "access_log": False, "server_header": False,
        "timeout_keep_alive": 5, "timeout_graceful_shutdown": int(config.timeout) + 5,
    }  # fmt: skip
    served = None
    if config.workers == 1:
        served = source.open(config)  # before there is a socket, and an error is one sentence
    elif source.path is not None:
        read_manifest(place_of(source.path))
    server = uvicorn.Config(partial(_app, source, config, token, served), **options)
    listening = server.bind_socket()
    # asyncio does so for a socket that names TCP as its protocol, and uvicorn's does not: the end of an
    # answer would wait until the client acknowledges its head, 40 ms on Linux.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.listen(2048)  # who comes before the workers are there waits
    print(f"serving at http://{config.host}:{listening.getsockname()[1]}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when all is answered
    if config.workers == 1:
        uvicorn.Server(server).run([listening])
        return
    with ScratchFolder() as folder:
        os.environ[DIRECTORY] = folder
        Workers(server, [listening]).run()
