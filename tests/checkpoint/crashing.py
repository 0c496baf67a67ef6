"""A process that forks ranks which save step after step, and has one of them killed with SIGKILL.

Each line of its input is a run, JSON of the arguments of `run`; each line of its output says how it went.
Forking from a process that has imported everything, and used no thread, makes a run take milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tritonrec import ops
from tritonrec.checkpoint import CheckpointStream, Saver, single_rank, steps, writer

FULL_EVERY = 3
KEYS = torch.cat([torch.arange(-30, 30) * 2**40, torch.tensor([-(2**63), 2**63 - 1, -1, 1])])


def table_at(step: int) -> dict[str, torch.Tensor]:
    """The table after `step` steps, a pure function: keys come and go, rows change every third step."""
    number = torch.arange(len(KEYS))
    present = (number * 7 + step) % 5 != 0
    value = (number + step) // 3
    return {
        "keys": KEYS[present],
        "rows": torch.stack([value, number], dim=1)[present].float(),
        "score": value[present],
    }


def dense_at(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5,), step)}


def change_at(step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The rows of `step` that are not those of the step before, and the keys that went."""
    before, now = table_at(step - 1), table_at(step)
    scores = dict(zip(before["keys"].tolist(), before["score"].tolist(), strict=True))
    pairs = zip(now["keys"].tolist(), now["score"].tolist(), strict=True)
    changed = torch.tensor([scores.get(key) != score for key, score in pairs])
    erased = before["keys"][~torch.isin(before["keys"], now["keys"])]
    return {column: values[changed] for column, values in now.items()}, erased


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_point(point: int) -> list[str]:
    """Kill this process at the given file operation, before it or in the middle of what it writes.

    Returns the list of operations, which grows as they come. Nothing is flushed: a killed process loses no
    written byte, only a machine does.
    """
    os.fsync = lambda descriptor: None
    passed: list[str] = []

    def arrives(what: str) -> bool:
        passed.append(what)
        return len(passed) == point

    def before(module: Any, name: str) -> None:
        original = getattr(module, name)

        def wrapped(*arguments, **options):
            if arrives(name):
                die()
            return original(*arguments, **options)

        setattr(module, name, wrapped)

    def half_way(module: Any, name: str, path_of: Callable[..., Path]) -> None:
        original = getattr(module, name)

        def wrapped(*arguments, **options):
            result = original(*arguments, **options)
            if arrives(name):
                path = path_of(*arguments)
                os.truncate(path, path.stat().st_size // 2)
                die()
            return result

        setattr(module, name, wrapped)

    for name in ("fsync", "replace", "unlink", "mkdir", "rmdir"):
        before(os, name)
    half_way(writer, "save_file", lambda tensors, path, header: path)
    half_way(Path, "write_text", lambda path, text: path)
    return passed


def gather_over(links: list[socket.socket], rank: int) -> Callable[[str], list[str]]:
    """`Gather` over one socket to each other rank on rank 0, and one to rank 0 elsewhere."""
    streams = [link.makefile("rw") for link in links]

    def receive(stream) -> Any:
        line = stream.readline()
        if not line.endswith("\n"):
            raise ConnectionError("a rank is gone")
        return json.loads(line)

    def send(stream, value) -> None:
        stream.write(json.dumps(value) + "\n")
        stream.flush()

    def gather(text: str) -> list[str]:
        if rank:
            send(streams[0], text)
            return receive(streams[0])
        texts = [text, *(receive(stream) for stream in streams)]
        for stream in streams:
            send(stream, texts)
        return texts

    return gather if links else single_rank


def save_steps(
    directory: Path, rank: int, world_size: int, gather, count: int, report: int, follows: bool
) -> None:
    """Go on from the newest checkpoint for `count` steps, writing a byte to `report` after each."""
    first = (steps(directory) or [0])[-1] + 1
    saver = Saver(directory, rank=rank, world_size=world_size, gather=gather, full_every=FULL_EVERY)
    if follows and first > 1:
        stream = CheckpointStream(directory)
        saver.follow(stream.saved, stream.layers)
    for step in range(first, first + count):
        full = saver.next_is_full()
        table, gone = (table_at(step), KEYS[:0]) if full else change_at(step)
        mine = ops.owner_of(table["keys"], world_size) == rank
        part = {column: values[mine] for column, values in table.items()}
        erased = None if full else {"t": gone[ops.owner_of(gone, world_size) == rank]}
        saver.save(step, dense_at(step), {"t": part}, {"step": step}, erased=erased)
        saver.wait()
        os.write(report, b".")


def run(
    directory: str,
    world_size: int,
    victims: list[int],
    point: int = 0,
    after: float = 0,
    count: int = 2,
    follows: bool = False,
) -> dict[str, Any]:
    """One run of `world_size` ranks. `victims` die at file operation `point`, or `after` so many seconds.

    `follows`: the first save is of changes to what is there.

    Returns how many steps a rank reported as saved, how each rank ended, and the operations of rank 0 and 1
    where nobody died.
    """
    pairs = [socket.socketpair() for _ in range(world_size - 1)]
    reports = [os.pipe() for _ in range(world_size)]
    logs = [os.pipe() for _ in range(world_size)]
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            own = [pair[0] for pair in pairs] if rank == 0 else [pairs[rank - 1][1]]
            for link in (link for pair in pairs for link in pair if link not in own):
                link.close()
            passed = kill_at_point(point if rank in victims else 0)
            code = 3
            try:
                gather = gather_over(own, rank)
                save_steps(Path(directory), rank, world_size, gather, count, reports[rank][1], follows)
                os.write(logs[rank][1], json.dumps(passed).encode())
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for link in (link for pair in pairs for link in pair):
        link.close()
    timers = [threading.Timer(after, os.kill, (children[victim], signal.SIGKILL)) for victim in victims]
    for timer in timers if after else []:
        timer.start()
    endings = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for timer in timers if after else []:
        timer.cancel()
        timer.join()
    for _, write in reports + logs:
        os.close(write)
    saved = max(len(os.read(read, 1 << 16)) for read, _ in reports)
    texts = [os.read(read, 1 << 20) for read, _ in logs]
    for read, _ in reports + logs:
        os.close(read)
    return {"saved": saved, "endings": endings, "passed": [json.loads(text or b"[]") for text in texts]}


def main() -> None:
    torch.set_num_threads(1)
    ops.owner_of(KEYS, 2)  # compiled or loaded once, before forking
    ops.owner_of(KEYS, 1 << 16)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
