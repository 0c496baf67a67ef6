"""Promise: the process of the server starts, stops and reloads as signals say, and slow clients are let go.

`test_server.py` has the answers, without a port.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn
from live_parts import until
from served_models import SIZES, export_hstu, listening, process
from typer.testing import CliRunner

from tritonrec import optional
from tritonrec.harness.cli import app as commands
from tritonrec.nn import HSTU
from tritonrec.serving.server import ServerConfig, metrics
from tritonrec.serving.server.run import Source, serve

ROOT = Path(__file__).resolve().parents[2]
BODY = json.dumps({"histories": [[3, 7]], "k": 3}).encode()
HEAD = b"POST /retrieve HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return export_hstu(tmp_path_factory.mktemp("process"))


def ask(port, path="retrieve", body=BODY):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.loads(answer.read())


def sent(port, data):
    """What comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.if_changed
def test_slow_and_many_clients_are_let_go_and_others_are_answered(paths):
    config = ServerConfig(timeout=2.0, max_connections=5)
    begun = [b"", b"POST /ret", HEAD, HEAD + b"content-length: 100\r\n\r\n{"]
    with listening(paths[0], config) as port, ThreadPoolExecutor(4) as pool:
        for answer in pool.map(lambda each: sent(port, each), begun):
            assert answer.startswith(b"HTTP/1.1 408") and b'"slow_client"' in answer
        assert ask(port)["step"] == 1
        kept = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        answer = sent(port, kept + b"POST /again")  # behind a whole request a slow one
        assert answer.startswith(b"HTTP/1.1 200")
        assert sent(port, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 malformed")
        several = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(5)]
        answer = sent(port, b"GET /health HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503") and b'"too_many_connections"' in answer
        with suppress(OSError):  # a slow machine has let it go meanwhile
            several[4].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"too_many_connections" not in several[4].recv(65536)
        for each in several:
            each.close()
        until(
            lambda: (
                b"200 OK"
                in sent(port, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            )
        )


@pytest.mark.if_changed
def test_signals(paths, tmp_path):
    """SIGHUP serves another version, or the old one where it fails; SIGTERM answers what is there first."""
    link = tmp_path / "current"
    link.symlink_to(paths[0])
    with process(str(link), "--latency", "1500") as (running, port):
        assert ask(port)["step"] == 1
        link.unlink()
        running.send_signal(signal.SIGHUP)
        assert "was not reloaded" in running.stderr.readline()
        assert ask(port)["step"] == 1
        link.symlink_to(paths[1])
        running.send_signal(signal.SIGHUP)
        assert "reloaded, step 2" in running.stderr.readline()
        answers = []
        last = threading.Thread(target=lambda: answers.append(ask(port)))
        last.start()
        until(
            lambda: (
                b"tritonrec_queue_users 1.0"
                in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read()
            )
        )
        running.send_signal(signal.SIGTERM)
        last.join(60)
        assert answers[0]["step"] == 2 and running.wait(60) == 0


WORKER = """
import runpy, sys
made = runpy.run_path(sys.argv[1])["Metrics"]()
for each in (made.step, made.sequence, made.lag, made.queue, made.users):
    each.set(int(sys.argv[2]))
print(made.text().decode())
"""


def test_the_page_of_metrics_has_the_oldest_step_the_longest_lag_and_the_sums_of_all_workers(tmp_path):
    for value in "353":
        command = [sys.executable, "-c", WORKER, metrics.__file__, value]
        done = subprocess.run(
            command, env={**os.environ, metrics.DIRECTORY: str(tmp_path)}, stdout=subprocess.PIPE, text=True
        )
    found = dict(
        re.findall(r"^tritonrec_(step|sequence|lag_seconds|queue_users|users) (\S+)$", done.stdout, re.M)
    )
    assert found == {
        "step": "3.0",
        "sequence": "3.0",
        "lag_seconds": "5.0",
        "queue_users": "11.0",
        "users": "11.0",
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_worker_is_replaced(paths, tmp_path):
    """Others answer meanwhile; all of them count together, and reload."""
    link = tmp_path / "current"
    link.symlink_to(paths[0])
    with process(str(link), "--workers", "2") as (running, port):
        until(lambda: workers_of(running.pid) and len(workers_of(running.pid)) == 2)
        assert ask(port)["step"] == 1
        os.kill(workers_of(running.pid)[0], signal.SIGKILL)
        for _ in range(30):
            with suppress(OSError):  # a connection of the worker that died
                assert ask(port)["step"] == 1
        link.unlink()
        link.symlink_to(paths[1])
        until(lambda: len(workers_of(running.pid)) == 2)
        running.send_signal(signal.SIGHUP)
        until(lambda: {ask(port)["step"] for _ in range(20)} == {2}, 120)
        with pytest.raises(OSError, match="409"):
            ask(port, "user/ann/events", b'{"items": [1]}')
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) == 0


def workers_of(parent):
    """Processes that serve, without the resource tracker."""
    found = subprocess.run(
        ["ps", "-ww", "--ppid", str(parent), "-o", "pid=", "-o", "args="], capture_output=True, text=True
    ).stdout
    return [int(line.split()[0]) for line in found.splitlines() if "spawn_main" in line]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give a MODEL, or --follow URL"),
        (["nowhere"], "is no export"),
        (["MODEL", "--host", "0.0.0.0"], "give --token-file or the variable TRITONREC_TOKEN"),
        (["MODEL", "--token-file", "nowhere"], "cannot be read"),
        (["MODEL", "--cached", "nowhere"], "nowhere"),
        (
            ["MODEL", "--cached", "RUN"],
            "was not saved by this version of tritonrec train: serve without --cached",
        ),
        (["MODEL", "--memory", "much"], "memory must be bytes, or such as '512MiB'"),
        (["MODEL", "--host-memory", "much"], "host_memory must be bytes, or such as '512MiB'"),
        (["MODEL", "--host-memory", "1GiB"], "--host-memory goes with --cached and a --device"),
        (["MODEL", "--device", "gpu"], "there is no device 'gpu'"),
        (["--follow", "nowhere", "--device", "gpu"], "there is no device 'gpu'"),
        (["--follow", "mem://deltas"], "mem://deltas cannot be opened: Protocol not known: mem"),
        (["--follow", "redis://host/0"], "as a sink needs the package redis"),
        (["MODEL", "--device", "cuda", "--ranks", "2"], "--device does not go with --ranks"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(paths, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITONREC_TOKEN", raising=False)
    monkeypatch.setattr(optional, "find_spec", lambda name: None if name == "redis" else name)
    known = {"MODEL": paths[0], "RUN": paths[0].parent / "run"}
    words = [str(known.get(word, word)) for word in words]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(commands, ["serve", *words])
    assert result.exit_code == 2 and says in " ".join(result.output.split()), result.output


def test_the_end_of_an_answer_does_not_wait_for_the_client(paths, monkeypatch):
    """Head and body are two writes: Nagle's algorithm keeps the second one for 40 ms."""

    def run(_, sockets):
        here = sockets[0]
        with here, socket.create_connection(here.getsockname()), here.accept()[0] as accepted:
            delays.append(not accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    delays = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    serve(Source(paths[0]), ServerConfig(port=0))
    assert delays == [False]


def test_what_a_cache_cannot_be(paths):
    with pytest.raises(ValueError, match="much"):
        Source(paths[0], HSTU(SIZES), "much").open(ServerConfig())
    with pytest.raises(ValueError, match="needs one worker"):
        serve(Source(paths[0], HSTU(SIZES)), ServerConfig(workers=2))
