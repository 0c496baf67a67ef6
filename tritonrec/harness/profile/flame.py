"""py-spy beside a run: a flame graph of all threads of all ranks, and its counts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from ...distributed.signals import end_with_parent
from ...files import ScratchFolder, atomic_write

START_SECONDS, STOP_SECONDS = 30.0, 60.0

NOT_INSTALLED = "py-spy is not installed: pip install 'tritonrec[profile]', or leave it out with --no-flame"
NOT_PERMITTED = (
    "py-spy may not look into other processes here: run as root; or allow it with `sudo sysctl "
    "kernel.yama.ptrace_scope=0`, until the next boot; or start the container with --cap-add SYS_PTRACE; or "
    "leave it out with --no-flame"
)
NO_SAMPLE = "py-spy met no thread at work: raise --flame-seconds or --rate"
WAITS = {
    ("wait", "threading.py"),
    ("_wait_for_tstate_lock", "threading.py"),
    ("_worker", "concurrent/futures/thread.py"),
}
"""Functions, and their files, that do nothing themselves but wait."""

_SAMPLING = b"Sampling process"
_DENIED = ("permission denied", "operation not permitted", "no python processes found")
_COUNT = r" \([\d,]+ samples?, [\d.]+%\)"  # behind the name of each frame
_PYTHON = re.compile(r"(?P<name>.+) \((?P<place>([^()]+\.py|<[^()]+>):\d+)\)")
_SVG, _FLAME = "{http://www.w3.org/2000/svg}", "{http://github.com/jonhoo/inferno}"


class FlameError(RuntimeError):
    """There is no flame graph; the message says why, and what to do."""


def _heed_interrupts_and_parent() -> None:
    """A shell's background job ignores SIGINT, and so do its children; py-spy writes its file at one."""
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

    def finish(self, target: Path, title: str, processes: Mapping[int, str]) -> None:
        """Stop sampling and write the flame graph, whole or not at all.

        Args:
            target: where the SVG goes.
            title: what stands above it.
            processes: process id -> name, to be shown for their command lines.
        """
        assert self._process is not None, "py-spy has not been started"
        self._process.send_signal(signal.SIGINT)  # the way it is asked to write its file
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise FlameError(f"py-spy did not write its samples within {STOP_SECONDS:.0f} s") from None
        if self._process.returncode or not self._svg.exists():
            raise self._failure()
        if not count(self._svg.read_bytes()).working:
            raise FlameError(NO_SAMPLE)
        with atomic_write(target) as part:
            part.write_text(_named(self._svg.read_text(), title, processes))

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


def _named(svg: str, title: str, processes: Mapping[int, str]) -> str:
    def process(match: re.Match[str]) -> str:
        return f"<title>{escape(processes.get(int(match[1]), f'process {match[1]}'))}{match[2]}</title>"

    svg = re.sub(rf"<title>process (\d+):[^<]*?({_COUNT})</title>", process, svg)
    return re.sub(r'(<text id="title"[^>]*>)[^<]*', lambda match: match[1] + escape(title), svg)


@dataclass(frozen=True)
class Function:
    """A Python function in a flame graph, with the C and C++ functions that it calls.

    Attributes:
        name, place: the function, and its file with the line where it begins.
        own: samples in which it ran itself. total: those in which it or a callee ran.
    """

    name: str
    place: str
    own: int
    total: int


@dataclass(frozen=True)
class Samples:
    """The counts of a flame graph.

    Attributes:
        working, waiting: samples of threads at work, and of threads that waited, which py-spy cannot always
            tell.
        functions: by falling number of own samples, those in which a thread waited left out.
    """

    working: int
    waiting: int
    functions: list[Function]


def count(svg: bytes) -> Samples:
    """Add up the samples of each function in a flame graph of py-spy.

    Raises FlameError where it is no such graph.
    """
    frames = sorted(_frames(svg))  # callers come before what they call
    callers: list[list[int]] = []  # of each frame, outermost first
    own = [width for _, _, width, _ in frames]
    for index, (_, depth, width, _) in enumerate(frames):
        above = [*callers[-1], index - 1] if index else []
        while above and frames[above[-1]][1] >= depth:
            above.pop()
        if above:
            own[above[-1]] -= width
        callers.append(above)
    owns, totals = Counter[str](), Counter[str]()
    working = waiting = 0
    for (*_, name), samples, above in zip(frames, own, callers, strict=True):
        stack = [
            each for each in (*(frames[caller][-1] for caller in above), name) if _PYTHON.fullmatch(each)
        ]
        if stack and _waits(stack[-1]):
            waiting += samples
            continue
        working += samples
        if stack:
            owns[stack[-1]] += samples
            totals.update(dict.fromkeys(stack, samples))
    found = [Function(*_parts(name), owns[name], total) for name, total in totals.items()]
    found.sort(key=lambda each: (-each.own, -each.total, each.name, each.place))
    return Samples(working, waiting, found)


def _parts(frame: str) -> tuple[str, str]:
    """Name and place of a Python function."""
    match = _PYTHON.fullmatch(frame)
    assert match is not None, frame
    return match["name"], match["place"]


def _waits(frame: str) -> bool:
    name, place = _parts(frame)
    return (name.rpartition(".")[2], place.partition(":")[0]) in WAITS


def _frames(svg: bytes) -> list[tuple[int, float, int, str]]:
    """(first sample, depth, samples, name) of each frame; a graph of py-spy hangs from its root downwards."""
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError as error:
        raise FlameError(f"py-spy wrote no flame graph: {error}") from error
    frames = []
    for group in root.iter(f"{_SVG}g"):
        title, box = group.find(f"{_SVG}title"), group.find(f"{_SVG}rect")
        if title is not None and box is not None and f"{_FLAME}w" in box.attrib:
            name = re.sub(f"{_COUNT}$", "", title.text or "")
            first, width = int(box.attrib[f"{_FLAME}x"]), int(box.attrib[f"{_FLAME}w"])
            frames.append((first, float(box.attrib["y"]), width, name))
    return frames
