"""Ways to keep rows on a disk: reads and writes of batches of distinct rows, Zipf 1.05, under a memory limit.

    python ci/benchmarks/measure_stores.py --rows 400000 --bytes 256 --memory 16 --json FILE

Each store runs in a process of its own, in a memory cgroup of `--memory` MiB for what it allocates beside the
interpreter (page cache included; needs root and cgroup v1's memory controller; without it there is no limit,
and the output says so). A batch reads its distinct rows, and writes them back. The bytes are those of
``/proc/self/io``: what reached the device. LMDB and RocksDB are skipped where they are not installed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
from frame import options_of, record
from numba import njit, types

CGROUP, PAGE = Path("/sys/fs/cgroup/memory"), 4096
_pread = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
_pwrite = types.ExternalFunction("pwrite", types.intp(types.intc, types.uintp, types.uintp, types.int64))


@njit(nogil=True)
def _each(write, fd, rows, memory, size):
    for i in range(len(rows)):
        if write:
            done = _pwrite(fd, memory + np.uint64(i * size), size, rows[i] * size)
        else:
            done = _pread(fd, memory + np.uint64(i * size), size, rows[i] * size)
        if done != size:
            return i
    return -1


class Slots:
    """One file of fixed slots; `ahead`: tells the kernel all reads first; `threads` share the calls."""

    def __init__(self, path, rows, size, threads=1, ahead=False):
        self.size, self.threads, self.ahead = size, threads, ahead
        self.file = os.fdopen(os.open(path / "rows", os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        block = bytes(np.ones(size << 14, np.uint8))
        for start in range(os.fstat(self.file.fileno()).st_size, rows * size, len(block)):
            self.file.write(block[: rows * size - start])
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self.pool = ThreadPoolExecutor(threads)

    def _run(self, write, rows, values):
        fd, at = self.file.fileno(), values.ctypes.data
        parts = np.array_split(np.arange(len(rows)), self.threads)
        run = lambda part: _each(write, fd, rows[part], np.uint64(at + part[0] * self.size), self.size)  # noqa: E731
        assert set(self.pool.map(run, [part for part in parts if len(part)])) == {-1}

    def read(self, rows, out):
        if self.ahead:
            for row in rows:
                os.posix_fadvise(self.file.fileno(), row * self.size, self.size, os.POSIX_FADV_WILLNEED)
        self._run(False, rows, out)

    def write(self, rows, values):
        self._run(True, rows, values)


class Direct(Slots):
    """The same file past the page cache: whole pages, read, changed and written."""

    def __init__(self, path, rows, size, threads):
        super().__init__(path, rows, size, threads)
        self.file = os.fdopen(os.open(path / "rows", os.O_RDWR | os.O_DIRECT), "r+b", buffering=0)
        self.memory = mmap.mmap(-1, PAGE << 15)
        self.pages = np.frombuffer(self.memory, np.uint8).reshape(-1, PAGE)

    def _pages(self, write, numbers):
        fd, at = self.file.fileno(), self.pages.ctypes.data
        parts = [part for part in np.array_split(np.arange(len(numbers)), self.threads) if len(part)]
        run = lambda part: _each(write, fd, numbers[part], np.uint64(at + part[0] * PAGE), PAGE)  # noqa: E731
        assert set(self.pool.map(run, parts)) == {-1}

    def read(self, rows, out):
        each = PAGE // self.size
        self.numbers, inverse = np.unique(rows // each, return_inverse=True)
        self._pages(False, self.numbers)
        self.at = self.pages[: len(self.numbers)].reshape(-1, each, self.size), inverse, rows % each
        out[:] = self.at[0][self.at[1], self.at[2]]

    def write(self, rows, values):  # follows the read of the same rows, whose pages it still has
        self.at[0][self.at[1], self.at[2]] = values
        self._pages(True, self.numbers)


class Mapped(Slots):
    def __init__(self, path, rows, size):
        super().__init__(path, rows, size)
        self.map = mmap.mmap(self.file.fileno(), rows * size)
        self.map.madvise(mmap.MADV_RANDOM)
        self.rows = np.frombuffer(self.map, np.uint8).reshape(rows, size)

    def read(self, rows, out):
        np.take(self.rows, rows, 0, out)

    def write(self, rows, values):
        self.rows[rows] = values


class Lmdb:
    def __init__(self, path, rows, size):
        import lmdb

        self.size = size
        self.base = lmdb.open(str(path), map_size=rows * size * 4, sync=False, writemap=True, readahead=False)
        for start in range(self.base.stat()["entries"], rows, 1 << 16):
            with self.base.begin(write=True) as to:
                values = (
                    (i.to_bytes(8, "big"), b"1" * size) for i in range(start, min(start + (1 << 16), rows))
                )
                to.cursor().putmulti(values, append=True)
        self.base.sync(True)

    def read(self, rows, out):
        with self.base.begin(buffers=True) as reader:
            for i, row in enumerate(rows.tolist()):
                out[i] = np.frombuffer(reader.get(row.to_bytes(8, "big")), np.uint8)

    def write(self, rows, values):
        order = np.argsort(rows)
        with self.base.begin(write=True) as to:
            for i in order.tolist():
                to.put(int(rows[i]).to_bytes(8, "big"), values[i].tobytes())


class Rocks:
    def __init__(self, path, rows, size):
        from rocksdict import Options, Rdict, WriteBatch, WriteOptions

        there, options = (path / "rocks").exists(), Options(raw_mode=True)
        self.base, self.batch, self.how = Rdict(str(path / "rocks"), options), WriteBatch, WriteOptions()
        self.how.disable_wal = True
        for start in range(0, 0 if there else rows, 1 << 16):
            batch = WriteBatch(raw_mode=True)
            for i in range(start, min(start + (1 << 16), rows)):
                batch.put(i.to_bytes(8, "big"), b"1" * size)
            self.base.write(batch, self.how)
        self.base.flush()

    def read(self, rows, out):
        found = self.base[[row.to_bytes(8, "big") for row in rows.tolist()]]
        for i, value in enumerate(found):
            out[i] = np.frombuffer(value, np.uint8)

    def write(self, rows, values):
        batch = self.batch(raw_mode=True)
        for i, row in enumerate(rows.tolist()):
            batch.put(row.to_bytes(8, "big"), values[i].tobytes())
        self.base.write(batch, self.how)


STORES = {
    "slots, 1 thread": Slots,
    "slots, 8 threads": lambda *a: Slots(*a, threads=8),
    "slots, 32 threads": lambda *a: Slots(*a, threads=32),
    "slots, reads announced": lambda *a: Slots(*a, ahead=True),
    "O_DIRECT pages, 8 threads": lambda *a: Direct(*a, threads=8),
    "O_DIRECT pages, 32 threads": lambda *a: Direct(*a, threads=32),
    "mmap": Mapped,
    "LMDB": Lmdb,
    "RocksDB": Rocks,
}


def batches(rows: int, count: int, size: int, random: np.random.Generator) -> list[np.ndarray]:
    """Distinct rows, ascending; popular keys came first, as in a table whose rows are in order of arrival."""
    weights = np.arange(1, rows + 1) ** -1.05
    sums = np.cumsum(weights)
    return [np.unique(np.searchsorted(sums, random.random(size) * sums[-1])) for _ in range(count)]


def io() -> dict[str, int]:
    return {
        k: int(v) for k, v in (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    }


def limited(mebibytes: int) -> bool:
    try:
        group = CGROUP / f"tritonrec-{os.getpid()}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(mebibytes << 20))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        return True
    except OSError:
        return False


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    random = np.random.default_rng(1)
    made = batches(options.rows, options.steps + 3, options.batch, random)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        with tempfile.TemporaryDirectory() as small:  # compiles
            warm = Slots(Path(small), 64, options.bytes)
            warm._run(False, np.arange(4), np.empty((4, options.bytes), np.uint8))
        made_by = multiprocessing.get_context("fork").Process(
            target=STORES[name], args=(Path(folder), options.rows, options.bytes)
        )
        made_by.start()
        made_by.join()
        for file in (each for each in Path(folder).rglob("*") if each.is_file()):  # none of it in memory
            with file.open("r+b") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        under = limited(options.memory)
        store = STORES[name](Path(folder), options.rows, options.bytes)
        read, write, before = [], [], io()
        for number, rows in enumerate(made):
            if number == 3:
                read, write, before = [], [], io()
            out = np.empty((len(rows), options.bytes), np.uint8)
            start = time.perf_counter()
            store.read(rows, out)
            middle = time.perf_counter()
            out[:, 0] = number
            store.write(rows, out)
            read.append((middle - start) / len(rows))
            write.append((time.perf_counter() - middle) / len(rows))
        after, moved = io(), sum(len(rows) for rows in made[3:]) * options.bytes
    return {
        "read_us": median(read) * 1e6, "write_us": median(write) * 1e6,
        "read_amplification": (after["read_bytes"] - before["read_bytes"]) / moved,
        "write_amplification": (after["write_bytes"] - before["write_bytes"]) / moved,
        "limited": under,
    }  # fmt: skip


def main() -> None:
    options = options_of(
        __doc__, path=Path(tempfile.gettempdir()), rows=400_000, bytes=256, batch=2000, steps=5,
        memory={"default": 16, "help": "MiB of the cgroup"},
        one={"choices": STORES, "help": "measure one store here"},
    )  # fmt: skip
    if options.one:
        print(json.dumps(measure(options.one, options)))
        return
    found = {}
    plain = [
        f"--{name}={getattr(options, name)}" for name in ("path", "rows", "bytes", "batch", "steps", "memory")
    ]
    for name in STORES:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, *plain], capture_output=True, text=True
        )
        if done.returncode:
            print(f"{name:28} left out: {done.stderr.strip().splitlines()[-1]}")
            continue
        found[name] = each = json.loads(done.stdout)
        print(f"{name:28}", "  ".join(f"{key} {value:8.2f}" for key, value in each.items()), flush=True)
    record(options, stores=found)


if __name__ == "__main__":
    main()
