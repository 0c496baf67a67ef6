"""A program in a process of its own, which may take so much memory and no more."""

import subprocess
import sys

LIMIT = """
gc.collect()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
here = int(status["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (here + allowed, here + allowed))
"""
"""Of a program that has imported gc and resource: from here on `allowed` bytes more."""


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
