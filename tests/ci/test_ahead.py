"""Promise: with kernels compiled ahead, as a wheel brings them, first calls compile nothing."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import ahead
import pytest
from ahead import PROGRAMS, ROOT
from numba.core.codegen import get_host_cpu_features
from speeds import slow_except

from tritonrec.kernels.kernel_cache import TARGETS, targets_of

HERE = targets_of(("", "", get_host_cpu_features()))
UNIQUE = (
    PROGRAMS["`unique`"].replace("ops.unique", "found = ops.unique") + "\nassert found[0].tolist() == [5, 3]"
)
KERNELS = [
    "tritonrec.kernels.unique.numba_unique._count_keys",
    "tritonrec.kernels.unique.numba_unique._read_counts",
]

pytestmark = pytest.mark.skipif(not HERE, reason="a processor of no target")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The kernels of `unique` for all targets."""
    return ahead.compile_ahead(tmp_path_factory.mktemp("ahead") / "kernels", list(TARGETS), [UNIQUE])


@pytest.fixture
def package(files, tmp_path):
    return ahead.package_with(files[0].parent, tmp_path / "package")


def compiled(package, tmp_path, target="", **changed):
    return ahead.counted(UNIQUE, package, tmp_path / "cache", target, **changed)["compiled"]


@pytest.mark.if_changed
def test_every_launch_has_a_call_on_the_cpu(tmp_path):
    """By these the wheels' kernels are found; the test below, of the kernels themselves, is slow."""
    noted = tmp_path / "noted.pickle"
    code = "import sys, ahead; ahead.note(*sys.argv[1:]); print('done')"
    assert ahead._run(code, str(noted), json.dumps([PROGRAMS["all ops, each once"]])) == "done"
    assert len(pickle.loads(noted.read_bytes())) > 100


@pytest.mark.slow
@pytest.mark.parametrize("target", slow_except([""], ["", *HERE]))
def test_nothing_is_compiled_on_a_processor_of_a_target(package, tmp_path, target):
    assert compiled(package, tmp_path, target) == []
    assert not list((tmp_path / "cache").rglob("*.nbc"))


DOCTOR = "from tritonrec.harness.doctor import facts; print(facts()['kernels of the CPU'])"


@pytest.mark.slow
def test_the_doctor_says_whether_there_are_any(package):
    def said():
        done = subprocess.run(
            [sys.executable, "-c", DOCTOR], capture_output=True, text=True, cwd=package,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *sys.path])},
        )  # fmt: skip
        return done.stdout

    assert said() == f"compiled ahead; this processor runs those for {' and '.join(HERE)}\n"
    shutil.rmtree(package / "tritonrec/kernels/compiled")
    assert said() == "compiled at their first call, and kept\n"


@pytest.mark.slow
def test_files_hold_no_path_of_the_machine_that_compiled_and_can_be_read_by_others(files):
    assert len(files) == len(KERNELS) * len(TARGETS)
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o644
        assert str(ROOT).encode() not in file.read_bytes()


@pytest.mark.slow
def test_without_a_folder_that_can_be_written_they_are_read_too(package, tmp_path):
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir())):
        (folder / "__pycache__").write_text("")  # in the way of numba's own folders, of root's too
    code = f"import sys, tempfile; tempfile.tempdir = '/proc/nowhere'; {UNIQUE}"
    nowhere = {"HOME": "/proc/nowhere", "NUMBA_CACHE_DIR": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}
    assert ahead.counted(code, package, **nowhere)["compiled"] == []
    shutil.rmtree(package / "tritonrec/kernels/compiled")
    assert sorted(ahead.counted(code, package, **nowhere)["compiled"]) == KERNELS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_ops_a_training_step_and_the_warmup_compile_nothing(tmp_path):
    folder = tmp_path / "kernels"
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci/compile/ahead.py"), str(folder), "--target", HERE[0]],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{HERE[0]}: {len(PROGRAMS)} programs compile nothing" in done.stdout
    assert len(list(folder.iterdir())) > 100
