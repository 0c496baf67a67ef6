"""py-spy beside a run: its flame graph of all threads of all ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

from ...distributed.signals import end_with_parent
from ...files import ScratchFolder, atomic_write

START_SECONDS, STOP_SECONDS = 30.0, 60.0

NOT_INSTALLED = "py-spy is not installed: pip install 'tritonrec[profile]', or leave it out with --no-flame"
NOT_PERMITTED = (
    "py-spy may not look into other processes here: run as root; or allow it with `sudo sysctl "
    "kernel.yama.ptrace_scope=0`, until the next boot; or start the container with --cap-add SYS_PTRACE; or "
    "leave it out with --no-flame"
)

_SAMPLING = b"Sampling process"
_DENIED = ("permission denied", "operation not permitted", "no python processes found")


class FlameError(RuntimeError):
    """There is no flame graph; the message says why, and what to do."""


def _heed_interrupts_and_parent() -> None:
    """A job in the background of a shell ignores SIGINT, by which py-spy is asked for its file."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


class PySpy:
    """A py-spy that samples a process until `finish`; a context manager, entered when it samples.

    Args:
        pid: the process.
        rate: samples per second of every thread that is not idle.
        native: sample C and C++ frames too, for which py-spy pauses the process; else it does not, as
            sleeping threads wake up from a pause and then seem to be at work.
        subprocesses: sample the process's children too.

    Raises `FlameError` on entering where py-spy is missing, may not look into the process, or fails.
    """

    def __init__(self, pid: int, rate: int = 100, native: bool = False, subprocesses: bool = False):
        tool = _find()
        if tool is None:
            raise FlameError(NOT_INSTALLED)
        self._folder = ScratchFolder()
        self._svg, self._log = (Path(self._folder.name) / name for name in ("flame.svg", "log"))
        self._command = [
            tool, "record", "--pid", str(pid), "--threads", "--function", "--rate", str(rate),
            "--duration", "unlimited", "--format", "flamegraph", "--output", str(self._svg),
            "--native" if native else "--nonblocking", *(["--subprocesses"] if subprocesses else []),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PySpy:
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=_heed_interrupts_and_parent,
                )
            deadline = time.monotonic() + START_SECONDS
            while _SAMPLING not in self._log.read_bytes():
                if self._process.poll() is not None:
                    raise self._failure()
                if time.monotonic() > deadline:
                    raise FlameError(f"py-spy did not begin to sample within {START_SECONDS:.0f} s")
                time.sleep(0.02)
        except OSError as error:
            self._close()
            raise FlameError(f"py-spy cannot be started: {error}") from error
        except BaseException:
            self._close()
            raise
        return self

    def finish(self, target: Path) -> None:
        """Stop sampling and write the flame graph, whole or not at all."""
        assert self._process is not None, "py-spy has not been started"
        self._process.send_signal(signal.SIGINT)  # the way it is asked to write its file
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise FlameError(f"py-spy did not write its samples within {STOP_SECONDS:.0f} s") from None
        if self._process.returncode or not self._svg.exists():
            raise self._failure()
        with atomic_write(target) as part:
            shutil.copyfile(self._svg, part)

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _failure(self) -> FlameError:
        assert self._process is not None
        said = self._log.read_text(errors="replace")
        if any(words in said.lower() for words in _DENIED):
            return FlameError(NOT_PERMITTED)
        lines = [line.strip() for line in said.partition("Stack backtrace")[0].splitlines() if line.strip()]
        return FlameError(f"py-spy ended with status {self._process.returncode}: {' '.join(lines[-3:])}")


def _find() -> str | None:
    """The py-spy of the search path, or of this Python's environment."""
    places = [os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")]
    return shutil.which("py-spy", path=os.pathsep.join(places))
