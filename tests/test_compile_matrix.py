"""Kernels compile for accelerators that are not here, and what gets worse is named."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import compile_matrix
import pytest

ROOT = Path(__file__).resolve().parent.parent

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
            asked_for = {"ATOMIC", "SHARED", "rows.add_kernel"} & set(key.split())
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


def test_lost_matrix_instructions_are_named(baseline):
    key = next(key for key, rows in baseline["kernels"].items() if rows["sm_90"]["matrix"])
    found = compared(baseline, changed(baseline, key, matrix=0, kind=""))
    assert len(found) == 1 and found[0].startswith(f"{key} for sm_90: lost its matrix instructions")


def test_fewer_spills_and_more_registers_pass(baseline):
    worse = changed(baseline, "silu.forward_kernel", stack=8)
    assert compared(worse, changed(baseline, "silu.forward_kernel", registers=255)) == []


def test_a_kernel_that_is_gone_or_new_is_named(baseline):
    fewer = copy.deepcopy(baseline)
    del fewer["kernels"]["silu.forward_kernel"]
    assert len(compared(baseline, fewer)) == 4
    assert all(
        "silu.forward_kernel" in line and "no longer compiled" in line for line in compared(baseline, fewer)
    )
    assert all("not in the baseline" in line for line in compared(fewer, baseline))


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


def test_a_kernel_that_nothing_compiles_is_at_fault(baseline):
    assert compile_matrix.faults({**baseline, "uncovered": ["extra.lonely_kernel"]}) == [
        "extra.lonely_kernel: no case in ci/compile/launches.py compiles it"
    ]


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


def test_tf32_is_at_fault_with_and_without_matrix_instructions(baseline):
    with_products = next(key for key, rows in baseline["kernels"].items() if rows["sm_90"]["matrix"])
    for key in ("silu.forward_kernel", with_products):
        assert compile_matrix.faults(changed(baseline, key, tf32=True)) == [f"{key} for sm_90: uses TF32"]


@pytest.mark.parametrize("target", compile_matrix.TARGETS)
def test_a_block_has_the_shared_memory_of_its_target(baseline, target):
    limit = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}[target]
    now = copy.deepcopy(baseline)
    row = now["kernels"]["silu.forward_kernel"][target]
    row["shared"] = limit
    assert compile_matrix.faults(now) == []
    row["shared"] += 1
    assert compile_matrix.faults(now) == [
        f"silu.forward_kernel for {target}: {limit + 1} bytes of shared memory, a block may have {limit}"
    ]


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


@pytest.mark.if_changed
def test_a_kernel_without_a_case_is_named(tmp_path):
    (tmp_path / "extra.py").write_text(EXTRA)
    (tmp_path / "program.py").write_text(NEW_KERNEL)
    done = matrix(tmp_path / "extra.py", program=tmp_path / "program.py")
    assert done.returncode == 0, done.stderr[-2000:]
    names = done.stdout.split()
    extra = "tritonrec.kernels.silu.triton_extra."
    assert {extra + "lonely_kernel", extra + "only_called_here"} <= set(names)
    assert not any("triton_silu" in name or name.endswith("triton_float.exp") for name in names)


def test_the_page_keeps_what_is_not_generated():
    page = "above\n<!-- t -->\nold\n<!-- end t -->\nbelow"
    assert compile_matrix.put_between(page, "t", "new") == "above\n<!-- t -->\nnew\n<!-- end t -->\nbelow"
    with pytest.raises(ValueError, match="no part between <!-- u -->"):
        compile_matrix.put_between(page, "u", "new")


def test_the_page_shows_the_baseline(baseline):
    assert compile_matrix.table(baseline) in compile_matrix.DOCS.read_text()
