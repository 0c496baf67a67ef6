"""Promise: kernels run where no folder for compiled code can be written; one warning says how to have one."""

import os
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from numba.core.caching import NullCache

import tritonrec
from tritonrec.data import movielens
from tritonrec.kernels import caches, compilation

KERNEL = """
from tritonrec.kernels.caches import njit

@njit(cache=True, nogil=True)
def twice(number):
    return 2 * number

@njit(cache=True, nogil=True)
def thrice(number):
    return 3 * number
"""
USE = "import kernel; print(kernel.twice(3), kernel.thrice(3))"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A package and a kernel beside which nothing can be written, by root neither: a file is in the way."""
    folder = tmp_path_factory.mktemp("site-packages")
    package = folder / "tritonrec"
    shutil.copytree(
        Path(tritonrec.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "*.nb?")
    )
    (folder / "kernel.py").write_text(KERNEL)
    for sub in (folder, package, *(path for path in package.rglob("*") if path.is_dir())):
        (sub / "__pycache__").write_text("")
    return folder


def run(installed, tmp, code=USE, **environment):
    own = {
        name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    }
    own |= {"HOME": "/proc/nowhere", "PYTHONPATH": str(installed), "TMPDIR": str(tmp), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=own, cwd=tmp, capture_output=True, text=True, timeout=120
    )


def warnings_of(done):
    """What was said beside the notice that a slow machine gives while it compiles."""
    return [line for line in done.stderr.splitlines() if "compiling kernels" not in line]


@pytest.mark.if_changed
@pytest.mark.parametrize(
    "variable",
    [pytest.param({}, marks=pytest.mark.slow), {"NUMBA_CACHE_DIR": "/proc/nowhere"}],
    ids=["unset", "unwritable"],
)
def test_kernels_run_in_a_container_without_a_writable_home_and_are_kept(installed, tmp_path, variable):
    done = run(installed, tmp_path, **variable)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 9\n"
    (kept,) = tmp_path.iterdir()
    assert done.stderr.count("RuntimeWarning") == 1
    assert f"they go to {kept}. Set NUMBA_CACHE_DIR to a writable folder" in done.stderr
    before = {path: path.stat().st_mtime_ns for path in kept.rglob("*.nbc")}
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700 and len(before) == 2
    again = run(installed, tmp_path, **variable)
    assert again.stdout == done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in kept.rglob("*.nbc")}


@pytest.mark.slow
def test_every_module_of_kernels_can_be_imported_there(installed, tmp_path):
    files = [*sorted(installed.rglob("numba_*.py")), installed / "tritonrec/data/clustering.py"]
    names = [".".join(file.relative_to(installed).with_suffix("").parts) for file in files]
    assert len(names) > 20
    done = run(installed, tmp_path, f"import importlib\nfor name in {names}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1


def test_without_any_writable_folder_kernels_are_compiled_in_each_process(installed, tmp_path):
    nowhere = "import tempfile; tempfile.tempdir = '/proc/nowhere'; "
    done = run(installed, tmp_path, nowhere + USE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 9\n" and not list(tmp_path.iterdir())
    assert done.stderr.count("compiled again in each process. Set NUMBA_CACHE_DIR") == 1


def test_a_folder_that_is_set_is_used_without_a_word(installed, tmp_path):
    done = run(installed, tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "mine"))
    assert done.returncode == 0 and not warnings_of(done)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_only_the_first_rank_warns(installed, tmp_path):
    done = run(installed, tmp_path, RANK="1")
    assert done.returncode == 0 and not warnings_of(done)


def test_a_folder_of_somebody_else_is_not_taken(tmp_path, monkeypatch):
    """What lies there would be executed, and a link or a folder that others can write to may be theirs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    named = tmp_path / f"kernels-{os.geteuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    named.symlink_to(elsewhere)
    found = caches._private_folder("kernels")
    assert found not in (named, None) and found.stat().st_mode & 0o77 == 0
    named.unlink()
    named.mkdir()
    named.chmod(0o777)
    assert caches._private_folder("kernels") not in (named, None)
    named.chmod(0o700)
    assert caches._private_folder("kernels") == named
    monkeypatch.setattr(os, "geteuid", lambda: named.stat().st_uid + 1)
    (tmp_path / f"kernels-{os.geteuid()}").mkdir(mode=0o700)
    assert caches._private_folder("kernels").name.startswith("kernels-")
    assert not list((tmp_path / f"kernels-{os.geteuid()}").iterdir())


def test_a_folder_that_is_there_and_takes_no_files_cannot_be_written(tmp_path):
    assert caches._writable(tmp_path) and not list(tmp_path.iterdir())
    assert not caches._writable(Path("/proc"))  # by root neither


@pytest.fixture
def unprepared(monkeypatch):
    for function in (caches.prepare_triton, caches._instead):
        function.cache_clear()
    yield monkeypatch
    for function in (caches.prepare_triton, caches._instead):
        function.cache_clear()


@pytest.mark.parametrize("chosen", ["", "/proc/nowhere/triton"])
def test_triton_gets_a_folder_too(unprepared, tmp_path, chosen):
    unprepared.setenv("HOME", "/proc/nowhere")
    unprepared.setenv("TRITON_CACHE_DIR", chosen)
    unprepared.delenv("TRITON_HOME", raising=False)
    unprepared.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="Set TRITON_CACHE_DIR to a writable folder"):
        caches.prepare_triton()
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent == tmp_path


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME", "HOME"])
def test_triton_keeps_a_folder_that_can_be_written(unprepared, tmp_path, variable):
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        unprepared.delenv(name, raising=False)
    unprepared.setenv("HOME", "/proc/nowhere")
    unprepared.setenv(variable, str(tmp_path))
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caches.prepare_triton()
    assert dict(os.environ) == before


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NUMBA_DISABLE_JIT", "1", "RuntimeError: NUMBA_DISABLE_JIT is set, and"),
        ("NUMBA_NUM_THREADS", "0", "RuntimeError: numba cannot begin (NUMBA_NUM_THREADS is 0): Number of"),
    ],
)
def test_a_numba_that_cannot_work_is_told_why(name, value, said):
    code = """
import torch
from tritonrec import ops
assert ops.unique(torch.tensor([3, 1, 3]), impl="reference")[0].tolist() == [3, 1]
ops.unique(torch.tensor([3, 1, 3]))
"""
    environment = {**os.environ, name: value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith(said), done.stderr


@pytest.mark.parametrize("cache", ["/proc/nowhere/tritonrec", ""])
def test_a_data_cache_that_cannot_be_written_is_named(monkeypatch, cache):
    monkeypatch.setenv("TRITONREC_CACHE", cache)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    with pytest.raises(
        RuntimeError, match=r"cannot be cached in /proc/nowhere/.*tritonrec: .*Set TRITONREC_CACHE"
    ):
        movielens.fetch()


def test_a_data_cache_is_local(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for url in ("memory://cache", "s3:cache", "file://nas/cache"):
        monkeypatch.setenv("TRITONREC_CACHE", url)
        with pytest.raises(ValueError, match=url):
            movielens.fetch()
    monkeypatch.setenv("TRITONREC_CACHE", f"file://{tmp_path}/a%20cache")
    assert movielens.cache_directory() == tmp_path / "a cache"
    (tmp_path / "a cache").mkdir()
    os.mkfifo(tmp_path / "a cache/ml-100k.inter")
    with pytest.raises(ValueError, match=r"ml-100k.inter is a pipe"):
        movielens.fetch()
    assert os.listdir(tmp_path) == ["a cache"]


def test_a_home_that_nobody_knows_is_named(monkeypatch):
    monkeypatch.delenv("TRITONREC_CACHE", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(RuntimeError, match="Set TRITONREC_CACHE to a folder for data"):
        movielens.fetch()


def test_the_line_about_compilation_comes_once(capsys):
    said = compilation.Announcement()
    said._left = 0.01
    said.begin()
    said.begin()  # the compiler calls itself
    said._timer.join(10)
    said.end()
    said.end()
    said.begin()
    assert said._timer is None
    said.end()
    assert capsys.readouterr().err.count("compiling kernels") == 1


def test_a_long_compilation_is_said_though_short_ones_came_before(capsys):
    said = compilation.Announcement()
    said._left = 60.0
    for _ in range(2):
        said.begin()
        timer = said._timer
        said.end()
        assert timer.finished.is_set()  # it was cancelled
    said._left = 0.01
    said.begin()
    said._timer.join(30.0)
    said.end()
    assert "compiling kernels" in capsys.readouterr().err


def abs_of(number):
    return abs(number)


def test_a_kernel_without_a_cache_is_kept_nowhere():
    assert isinstance(caches.njit()(lambda number: number)._cache, NullCache)
    assert not isinstance(caches.njit(cache=True)(abs_of)._cache, NullCache)
