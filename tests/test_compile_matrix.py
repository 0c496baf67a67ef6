"""Kernels compile for accelerators that are not here, and what gets worse is named."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILE = ROOT / "ci" / "compile"
sys.path.insert(0, str(COMPILE))

import compile_matrix  # noqa: E402

# One kernel of integers, one of rows, one elementwise, one of matrix products, for the target of the H200.
A_PART = "--targets", "sm_90", "--only"


def matrix(*arguments, program="ci/compile/compile_matrix.py", folder=ROOT):
    """The script in a process of its own: there Triton compiles, where the other tests let it interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("only", ["silu", "unique", "linear bf16", "hstu_attention fp32 d64 options"])
def test_some_kernels_are_as_committed(only):
    done = matrix("--check", *A_PART, only)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 at fault" in done.stdout


SPILLS = """
import sys
sys.path[:0] = ["ci/compile"]
import launches
launches.modules()
from tritonrec.kernels.silu import triton_silu
triton_silu.BLOCK = 65536
import compile_matrix
sys.argv = ["compile_matrix.py", *sys.argv[1:]]
sys.exit(compile_matrix.main())
"""


@pytest.mark.slow
def test_a_configuration_that_spills_fails_by_name(tmp_path):
    (tmp_path / "spills.py").write_text(SPILLS)
    done = matrix("--check", *A_PART, "silu", program=tmp_path / "spills.py")
    assert done.returncode == 1, done.stderr[-2000:]
    assert "silu.forward_kernel for sm_90: spills" in done.stdout
    assert "'BLOCK': 65536" in done.stdout


@pytest.fixture(scope="module")
def baseline():
    return json.loads(compile_matrix.BASELINE.read_text())


def changed(report, key, **values):
    new = copy.deepcopy(report)
    new["kernels"][key]["sm_90"] |= values
    return new


def compared(before, now):
    return compile_matrix.regressions(before, now, list(compile_matrix.TARGETS))


def test_the_baseline_covers_every_target_and_is_sound(baseline):
    assert compile_matrix.faults(baseline) == []
    assert compared(baseline, baseline) == []
    targets: dict[str, set[str]] = {}  # of all launches of a kernel; a target may have tiles of its own
    for key, rows in baseline["kernels"].items():
        targets.setdefault(key.split()[0], set()).update(rows)
    # attention in one pass is for products without matrix instructions, which gfx942 has for float32
    targets["hstu_attention.sequences_kernel"].add("gfx942")
    assert all(found == set(compile_matrix.TARGETS) for found in targets.values()), targets


def test_nothing_of_the_baseline_uses_atomics_where_a_sum_has_an_order(baseline):
    for key, rows in baseline["kernels"].items():
        if key.split(".")[0] in (
            "hstu_attention",
            "linear",
            "rows",
            "relative_aggregate",
            "softmax_attention",
        ):
            # deterministic=False of attention, and int64 sums, which have no order
            asked_for = {"ATOMIC", "SHARED"} & set(key.split())
            assert asked_for or all(row["atomics"] == 0 for row in rows.values()), key


@pytest.mark.parametrize(
    ("what", "values", "message"),
    [
        ("silu.forward_kernel", {"stack": 8}, "silu.forward_kernel for sm_90: spills 8 bytes, was 0"),
        ("silu.forward_kernel", {"atomics": 2}, "silu.forward_kernel for sm_90: has atomics now: 2"),
    ],
)
def test_what_got_worse_is_named(baseline, what, values, message):
    found = compared(baseline, changed(baseline, what, **values))
    assert len(found) == 1 and found[0].startswith(message)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shared": 300_000}, "300000 bytes of shared memory, a block may have 232448"),
        ({"tf32": True}, "uses TF32"),
        ({"error": "CompilationError: at 3:4"}, "does not compile: CompilationError: at 3:4"),
    ],
)
def test_faults_need_no_baseline(baseline, values, message):
    found = compile_matrix.faults(changed(baseline, "silu.forward_kernel", **values))
    assert found == [f"silu.forward_kernel for sm_90: {message}"]


@pytest.mark.parametrize(
    ("check", "change", "status"),
    [
        (True, {}, 0),
        (True, {"stack": 8}, 1),
        (False, {"stack": 8}, 0),  # only beside a baseline
        (True, {"tf32": True}, 1),
        (False, {"error": "CompilationError: at 3:4"}, 1),
    ],
)
def test_its_exit_status(baseline, monkeypatch, capsys, check, change, status):
    now = changed(baseline, "silu.forward_kernel", **change)
    monkeypatch.setattr(compile_matrix, "compile_all", lambda *_: now)
    monkeypatch.setattr(sys, "argv", ["compile_matrix.py", *["--check"] * check])
    assert compile_matrix.main() == status
    assert f"{status} at fault" in capsys.readouterr().out


NEW_KERNEL = """
import sys
sys.path[:0] = ["ci/compile"]
import launches
import tritonrec.kernels.silu.triton_silu as module

path = sys.argv[1]
import importlib.util
spec = importlib.util.spec_from_file_location("tritonrec.kernels.silu.triton_extra", path)
extra = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extra)
known = launches.modules()
launches.modules = lambda: [*known, extra]
print(*launches.uncovered([module.forward_kernel, module.backward_kernel]), sep="\\n")
"""
EXTRA = """
import triton
from tritonrec.kernels.silu.triton_silu import sigmoid

@triton.jit
def only_called_here(x):
    return sigmoid(x)

@triton.jit
def lonely_kernel(x_ptr):
    only_called_here(x_ptr)
"""


def test_a_kernel_without_a_case_is_named(tmp_path):
    (tmp_path / "extra.py").write_text(EXTRA)
    (tmp_path / "program.py").write_text(NEW_KERNEL)
    done = matrix(tmp_path / "extra.py", program=tmp_path / "program.py")
    assert done.returncode == 0, done.stderr[-2000:]
    names = done.stdout.split()
    extra = "tritonrec.kernels.silu.triton_extra."
    assert {extra + "lonely_kernel", extra + "only_called_here"} <= set(names)
    assert not any("triton_silu" in name or name.endswith("triton_float.exp") for name in names)


def test_the_page_shows_the_baseline(baseline):
    assert compile_matrix.table(baseline) in compile_matrix.DOCS.read_text()
