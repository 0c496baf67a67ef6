"""A program in a process of its own, which may take so much memory and no more."""

import subprocess
import sys

import pytest

LIMIT = """
gc.collect()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
here = int(status["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (here + allowed, here + allowed))
"""
"""Of a program that has imported gc and resource: from here on `allowed` bytes more."""


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux")


def check(whole, *arguments, cache=None):
    """A program that takes the `whole` log runs out of memory, and any other comes to its end."""
    done = run(*arguments, cache=cache)
    if whole:
        assert done.returncode and ("malloc" in done.stderr or "MemoryError" in done.stderr), done.stderr
    else:
        assert done.stdout == "done\n", done.stderr


def run(program, *arguments, cache=None):
    """Its end, output and errors; `cache` is the library's folder of converted logs."""
    own = {} if cache is None else {"TRITONREC_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "MALLOC_ARENA_MAX": "1",
            "PYTHONPATH": ":".join(sys.path),
            **own,
        },
        capture_output=True,
        text=True,
        timeout=250,
    )
