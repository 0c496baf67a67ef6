"""Without a GPU, real or emulated, Triton kernels are interpreted; one pool of ranks serves all tests."""

import atexit
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import changed
import pytest
import torch
from hypothesis import settings
from speeds import longest_first, thinned

from tritonrec.kernels import dispatch

if not torch.cuda.is_available() and dispatch.emulated is None:  # decided before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

# ignored in a shell's background, and by nohup
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if signal.getsignal(number := getattr(signal, name, signal.SIGINT)) is signal.SIG_IGN:
        signal.signal(number, handler)

settings.register_profile("tests", deadline=None)  # a busy machine fails no test
settings.register_profile("few", settings.get_profile("tests"), max_examples=20)
settings.load_profile("tests")


ROOT = Path(__file__).resolve().parent.parent
IF_CHANGED = "if_changed"
LEFT_OUT = pytest.StashKey[dict[str, list[str]]]()
CONCERNED = pytest.StashKey[list[str]]()
"""Files whose tests marked `if_changed` run."""


def pytest_addoption(parser):
    parser.addoption(
        "--changed-since", metavar="REF",
        help="leave out tests of tools of which no file, and no import, differs from this commit",
    )  # fmt: skip
    parser.addoption(
        "--most-cases", type=int, metavar="N",
        help="of a test with more than N parametrized cases run N of them and a sixteenth of the others, "
        "of a property a fifth of its examples, and none marked `if_changed` that nothing concerns that has "
        "changed since --changed-since",
    )  # fmt: skip
    parser.addoption("--draw", metavar="TEXT", default="", help="which cases: others for another text")
    parser.addoption("--long", action="store_true", help="with --most-cases: those marked `if_changed` too")


def pytest_configure(config):
    if config.getoption("--most-cases") is not None:  # before properties are read, which keep their profile
        settings.load_profile("few")
    config.stash[LEFT_OUT], config.stash[CONCERNED] = {}, []
    if hasattr(config, "workerinput"):
        config.stash[LEFT_OUT], config.stash[CONCERNED] = config.workerinput["changed"]
    elif reference := config.getoption("--changed-since"):
        try:
            files, sources = changed.changed_files(ROOT, reference), changed.Sources(ROOT)
        except (OSError, subprocess.CalledProcessError) as error:
            raise pytest.UsageError(f"--changed-since {reference}: {error}") from None
        marked = sorted(
            file
            for file in sources.files
            if file.startswith("tests/") and sources.mentions([file], IF_CHANGED)
        )
        config.stash[LEFT_OUT] = changed.left_out(ROOT, files, sources)
        config.stash[CONCERNED] = sorted(changed.concerned(ROOT, files, marked, sources))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Of pytest-xdist, whose processes read no sources again."""
    node.workerinput["changed"] = node.config.stash[LEFT_OUT], node.config.stash[CONCERNED]


def pytest_ignore_collect(collection_path, config):
    """Not even imported."""
    files = {file for each in config.stash[LEFT_OUT].values() for file in each}
    return True if files and collection_path.relative_to(ROOT).as_posix() in files else None


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--most-cases") is not None:
        terminalreporter.write_line(f"cases as drawn by --draw '{config.option.draw}'")
    if tools := config.stash[LEFT_OUT]:
        listed = ", ".join(f"{tool} ({len(files)} files)" for tool, files in tools.items())
        since = config.getoption("--changed-since")
        terminalreporter.write_line(
            f"left out, as nothing that they import has changed since {since}: tests of {listed}"
        )


def runs(item, files):
    return item.path in files or not item.get_closest_marker(IF_CHANGED)


@pytest.hookimpl(trylast=True)  # behind `-m` and `-k`, whose choice is thinned out
def pytest_collection_modifyitems(config, items):
    longest_first(items, ROOT / "tests")
    if (most := config.getoption("--most-cases")) is None:
        return
    files = None if config.getoption("--long") else {ROOT / file for file in config.stash[CONCERNED]}
    kept = thinned([item for item in items if files is None or runs(item, files)], most, config.option.draw)
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection():
    """Modules and tests stay to the end: garbage is not looked for among them."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # behind pytest's own last collections


def _enter_on_main_thread(patch, enter=mock._patch.__enter__):
    """Of two ranks in threads that patch one name at once, the second puts back what the first has set."""
    assert threading.current_thread() is threading.main_thread(), f"{patch.attribute} is patched by a thread"
    return enter(patch)


mock._patch.__enter__ = _enter_on_main_thread


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """Of Triton, where kernels are interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter

        interpreter.quicken()


MESHES = (1, 2, 3, 4, (2, 2), (4, 2), (4, 4), (4, 1, 2))


@pytest.fixture(scope="session")
def pool():
    """A `RankPool` of four ranks, which is restarted after a rank has failed.

    On Linux, where even stopped ranks end with this process, they are stopped between calls: a thread of each
    of their groups, dozens, wakes up a hundred times a second.
    """
    from tritonrec.distributed import RankDiedError, RankPool

    class SharedPool(RankPool):
        failed = False

        def run(self, *args: Any, **options: Any) -> list[Any]:
            if self.failed:
                self.restart()
            self.send_to_ranks(signal.SIGCONT)
            try:
                results = super().run(*args, **options)
            except RankDiedError:
                self.failed = True
                self.close()
                raise
            self.send_to_ranks(signal.SIGSTOP)
            return results

        def send_to_ranks(self, number: int) -> None:
            for process in self.processes if sys.platform == "linux" else ():
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, number)

        def close(self) -> None:
            self.send_to_ranks(signal.SIGCONT)
            super().close()

        def restart(self) -> None:
            super().restart()
            self.failed = False

    with SharedPool(MESHES) as pool:
        yield pool


KEPT = "PYTEST_", "TRITON_CACHE_DIR"
"""How variables begin that pytest sets, or the library once for a process."""


@pytest.fixture(scope="module", autouse=True)
def same_environment():
    """A file leaves no variable behind; the process that forks ranks would be started again for it."""
    before = dict(os.environ)
    yield
    for name in {*before, *os.environ}:
        if name.startswith(KEPT) or os.environ.get(name) == before.get(name):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@pytest.fixture
def limited_files():
    """Inside of what it returns no file may grow beyond so many bytes, as on a full disk; around no more than
    that, for pytest's own report goes to a file as well.
    """

    @contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def two_threads():
    """torch cuts long work between two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
