"""Promise: a compiled kernel on disk is that of its signature and today's sources, or is compiled again."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest
from filelock import FileLock

from tritonrec.kernels import caches, kernel_cache
from tritonrec.kernels.hash_table import numba_hash_table
from tritonrec.kernels.kernel_cache import _Files, digest_of
from tritonrec.kernels.norm_linear_silu import numba_norm_linear_silu

SOURCES = {
    "kernel": """
from numba import njit
from . import module
from .constants import LIMIT
from .helper import helper
from .unused import unused

def kernel(number):
    def inside(other):
        return module.called(other)
    return helper(number) + inside(number) + LIMIT
""",
    "helper": "from numba import njit\nfrom .deep import deep\n\n@njit\ndef helper(x):\n    return deep(x)\n",
    "deep": "from numba import njit\n\n@njit\ndef deep(x):\n    return x\n",
    "module": "from .below import below\n\ndef called(x):\n    return below(x)\n",
    "below": """
from numba.extending import intrinsic
from .made import made

@intrinsic
def below(typingctx, x):
    return x(x), lambda *arguments: made(*arguments)
""",
    "made": "def made(*arguments):\n    return arguments[-1][0]\n",
    "constants": "LIMIT = 3\n",
    "unused": "def unused():\n    return 1\n",
}


@pytest.fixture
def digest_with(tmp_path, monkeypatch):
    """The digest of `kernel` in a package of `SOURCES`, some of them with other texts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def digest(**changed):
        package = tmp_path / f"package{len(made)}"
        made.append(package)
        package.mkdir()
        for name, text in {"__init__": "", **SOURCES, **changed}.items():
            (package / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return digest_of(importlib.import_module(f"{package.name}.kernel").kernel)

    yield digest
    for name in [name for name in sys.modules if name.startswith("package")]:
        if name.split(".")[0] in {package.name for package in made}:
            del sys.modules[name]


@pytest.mark.parametrize("file", [name for name in SOURCES if name not in ("unused", "constants")])
def test_a_change_of_any_file_that_a_kernel_may_hold_changes_its_digest(digest_with, file):
    assert digest_with() != digest_with(**{file: SOURCES[file] + "# changed\n"})


def test_a_changed_constant_changes_the_digest_and_what_no_kernel_names_does_not(digest_with):
    first = digest_with()
    assert first == digest_with() == digest_with(unused="def unused():\n    return 2\n")
    assert first != digest_with(constants="LIMIT = 4\n")


@pytest.mark.parametrize("kernel", [numba_hash_table.hash_find, numba_norm_linear_silu.forward])
def test_a_digest_is_that_of_the_package_alone_wherever_it_lies(kernel, monkeypatch):
    """A wheel's kernels are compiled in another folder, and a library's folder lies before or behind it."""
    folder = Path(kernel_cache.__file__).parent
    files, constants = kernel_cache._held_by(kernel.py_func)
    assert len(files) > 1 and all(Path(file).is_relative_to(folder) for file in files)
    expected = digest_of.__wrapped__(kernel.py_func)
    renamed = {f"{number}{file}": file for number, file in enumerate(sorted(files, reverse=True))}
    read = kernel_cache._digest_of_file
    monkeypatch.setattr(kernel_cache, "_held_by", lambda function: (set(renamed), constants))
    monkeypatch.setattr(kernel_cache, "_digest_of_file", lambda name: read(renamed[name]))
    assert digest_of.__wrapped__(kernel.py_func) == expected


def test_a_process_that_reads_between_any_two_operations_of_two_others_gets_its_own_kernel(
    tmp_path, monkeypatch
):
    """With numba's own files, named by a counter, the third process gets the kernel of another signature."""
    one, two, three = (_Files(tmp_path, "kernel", files_of) for _ in range(3))
    seen, replace = [], os.replace

    def interrupted(source, to):
        monkeypatch.setattr(os, "replace", replace)
        for moment in (lambda: None, lambda: replace(source, to)):
            moment()
            seen.append([three.load("int"), three.load("float")])
            two.save("float", "code for floats")
            seen.append([three.load("int"), three.load("float")])

    monkeypatch.setattr(os, "replace", interrupted)
    one.save("int", "code for integers")
    assert seen == [
        [None, None],
        [None, "code for floats"],
        ["code for integers", "code for floats"],
        ["code for integers", "code for floats"],
    ]
    assert not list(tmp_path.glob("*.tmp"))


def files_of(folder, sources, monkeypatch):
    files = _Files(folder, "kernel", files_of)
    monkeypatch.setattr(kernel_cache, "digest_of", lambda function: sources)
    return files


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "swapped", "folder"])
def test_a_damaged_file_is_no_kernel_and_is_written_again(tmp_path, monkeypatch, damage):
    files = files_of(tmp_path, "sources", monkeypatch)
    files.save("int", ["code", 1])
    files.save("float", ["code", 2])
    path, other = files.path("int"), files.path("float")
    content = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
        assert files.load("int") is None
        return
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 4
    path.write_bytes(
        {"cut": content[:-1], "empty": b"", "flipped": damaged, "swapped": other.read_bytes()}[damage]
    )
    assert files.load("int") is None and files.load("float") == ["code", 2]
    files.save("int", ["code", 3])
    assert files.load("int") == ["code", 3]


def test_files_of_other_sources_are_not_read_and_are_removed(tmp_path, monkeypatch):
    files_of(tmp_path, "a" * 64, monkeypatch).save("int", "old")
    (tmp_path / "kernels.b.c.nbc").touch()
    files = files_of(tmp_path, "b" * 64, monkeypatch)
    assert files.load("int") is None and len(list(tmp_path.glob("kernel.*.nbc"))) == 1
    files.save("int", "new")
    assert files.load("int") == "new"
    assert [path.name.split(".")[1] for path in tmp_path.glob("kernel.*.nbc")] == ["b" * 16]
    files.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.b.c.nbc"]


LOADED = """
import sys
import numpy as np
from tritonrec.kernels.caches import njit

@njit(cache=True)
def kernel(count):
    found = np.zeros(count, np.int64)
    found[1:] = 3
    return found

@njit(cache=True)
def caller(count):
    return kernel(count).sum()
"""


def said_in(folder, code):
    """Words that a process prints, which has the modules and the cache of a folder."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
             "NUMBA_CACHE_DIR": str(folder / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_a_kernel_on_disk_is_read_without_the_registries_of_a_compilation(tmp_path):
    """numba's own `load_overload` fills them, in a quarter of a second of each process."""
    (tmp_path / "kernel_of.py").write_text(LOADED)

    def run(code):
        return said_in(tmp_path, f"from kernel_of import *; {code}")

    compiles = "'numba.np.arraymath' in sys.modules"
    assert run(f"print(kernel(4).sum(), {compiles})") == ["9", "True"]
    assert run(f"print(kernel(4).sum(), {compiles})") == ["9", "False"]
    # a kernel that calls one from disk is compiled afterwards
    assert run(f"kernel(4); print({compiles}, caller(5), {compiles})") == ["False", "12", "True"]
    assert run("print(caller(5), sum(caller.stats.cache_hits.values()))") == ["12", "1"]


CHANGED = """
from tritonrec.kernels.caches import njit
from constant_of import HELD
from helper_of import helper

@njit(cache=True)
def kernel(number):
    return helper(number) + HELD
"""


@pytest.mark.slow
def test_a_process_after_a_change_of_a_helper_computes_with_the_change(tmp_path):
    """numba's own cache answers 8 each time: the file of the kernel is as it was."""
    (tmp_path / "kernel_of.py").write_text(CHANGED)

    def run(factor, held):
        head = "from tritonrec.kernels.caches import njit\n@njit(inline='always')\n"
        helper = f"{head}def helper(x): return {factor} * x\n"
        (tmp_path / "helper_of.py").write_text(helper)
        (tmp_path / "constant_of.py").write_text(f"HELD = {held}\n")
        code = "from kernel_of import kernel; print(kernel(3), sum(kernel.stats.cache_hits.values()))"
        return said_in(tmp_path, code)

    assert run(2, 2) == ["8", "0"]
    assert run(2, 2) == ["8", "1"]
    assert run(5, 2) == ["17", "0"]
    assert run(5, 4) == ["19", "0"]


SLOW = """
import sys, time
from pathlib import Path
from numba.core import event
from numba.extending import overload
from tritonrec.kernels.caches import njit

class Compiled(event.Listener):
    def on_start(self, started):
        pass
    def on_end(self, ended):
        print(ended.data["dispatcher"].__name__, flush=True)

event.register("numba:compile", Compiled())

def slowly(number): ...

@overload(slowly)
def _slowly(number):
    time.sleep(1.5)
    return lambda number: 3 * number

@njit(cache=True)
def kernel(number):
    return slowly(number)

here, number = Path(sys.argv[1]), int(sys.argv[2])
(here / f"ready{number}").touch()
while len(list(here.glob("ready*"))) < 3:
    time.sleep(0.01)
assert kernel(7) == 21
"""


@pytest.mark.if_changed
def test_of_processes_that_want_one_kernel_one_compiles_it(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(tmp_path / "slow.py"), str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    printed = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(names.count("kernel") for names in printed) == [0, 0, 1]
    assert not list(tmp_path.rglob("*.lock"))


def test_a_kernel_that_cannot_be_compiled_keeps_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    @caches.njit(cache=True)
    def wrong(number):
        return number + "1"

    with pytest.raises(numba.TypingError):
        wrong(3)
    assert not list(tmp_path.rglob("*.lock"))


def test_nobody_waits_for_ever(tmp_path, monkeypatch):
    """A process that was stopped keeps its turn: the others compile too, and take nothing from it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "PATIENCE", 0.1)

    @caches.njit(cache=True)
    def kernel(number):
        return 3 * number

    begun, turns = kernel_cache.KernelCache._begin_turn, []

    def after_another(self, key):
        turns.append(FileLock(self._cache_file.path(key).with_suffix(".lock"), is_singleton=False))
        turns[-1].acquire()
        return begun(self, key)

    monkeypatch.setattr(kernel_cache.KernelCache, "_begin_turn", after_another)
    assert kernel(7) == 21
    assert turns[0].is_locked and Path(turns[0].lock_file).exists() and list(tmp_path.rglob("*.nbc"))


def test_a_processor_has_the_targets_whose_features_it_has():
    def targets(name, *features):
        return kernel_cache.targets_of(("x86_64-linux", name, ",".join(features)))

    avx2, avx512 = ([f"+{each}" for each in found] for found in (kernel_cache.AVX2, kernel_cache.AVX512))
    assert targets("znver4", *avx2, *avx512) == ["x86-64-v4", "x86-64-v3"]
    assert targets("znver4", *avx2, *avx512, "+sha") == ["x86-64-v4", "x86-64-v3"]
    assert targets("haswell", *avx2, *(each.replace("+", "-") for each in avx512)) == ["x86-64-v3"]
    assert targets("core2", *avx2[1:]) == []
    assert targets("x86-64-v3") == ["x86-64-v3"]


def test_an_array_of_another_module_counts_by_its_file(digest_with):
    kernel = "from . import module\n\ndef kernel(number):\n    return number + module.TABLE[0]\n"
    one, other = (
        digest_with(kernel=kernel, module=f"import numpy as np\n\nTABLE = np.array([{n}])\n") for n in (1, 2)
    )
    assert one != other


def test_a_turn_ends_where_its_file_is_gone(tmp_path):
    def kernel(number):
        return number

    kept = kernel_cache.KernelCache(kernel)
    kept._cache_file = SimpleNamespace(path=lambda key: tmp_path / "kernel.nbc")
    assert kept._begin_turn("some key")
    (tmp_path / "kernel.lock").unlink()
    kept.end_turns()
    assert kept._begin_turn("some key") and (tmp_path / "kernel.lock").exists()
    kept.end_turns()
    assert not (tmp_path / "kernel.lock").exists()


def test_a_file_that_others_may_write_is_no_kernel(tmp_path, monkeypatch):
    """It is unpickled and executed."""
    files = _Files(tmp_path, "kernel", files_of)
    files.save("key", [1])
    path = files.path("key")
    assert files.load("key") == [1]
    path.chmod(0o666)
    assert files.load("key") is None
    path.chmod(0o644)
    assert files.load("key") == [1]
    real = os.stat_result(path.stat())
    foreign = os.stat_result((*real[:4], 12345, *real[5:]))
    monkeypatch.setattr("pathlib.Path.stat", lambda self, **_: foreign if self == path else os.stat(self))
    assert files.load("key") is None
    monkeypatch.undo()
    path.unlink()
    os.mkfifo(path)
    assert files.load("key") is None
