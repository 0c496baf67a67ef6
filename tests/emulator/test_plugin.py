"""``pytest --emulate`` and ``tritonrec emulate`` run Triton kernels as compiled code, and print what ran."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tritonrec.harness.cli import app

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FEW = "test_threads.py", "test_hot_keys.py", "test_wide_products.py", "test_cached_pages.py"
SPLIT = "test_split_products.py"
SOFTMAX = "test_softmax_attention.py::test_error_is_that_of_plain_float32[triton-other_keys_causal]"
RELATIVE = "test_relative_aggregate.py::test_error_is_that_of_plain_float32[triton-odd_dim]"
KERNELS = [str(HERE / name) for name in ("test_triton_kernels.py", SPLIT, *FEW)]
QUICK = [
    *(str(HERE / name) for name in (*FEW, f"{SPLIT}::test_attention_of_float32")),
    str(ROOT / "tests/kernels/test_unique.py::test_equals_a_dict"),
    *(str(ROOT / f"tests/kernels/{name}") for name in (SOFTMAX, RELATIVE)),
]
"""What only an emulation can run, and programs that meet at atomics in any order."""
TRAINING = [
    *(str(HERE / name) for name in ("test_training.py", "test_graphs.py", SPLIT)),
    str(ROOT / "tests/kernels/test_hash_table_used.py::test_kernels_read_as_many_bytes_of_any_table"),
]
"""Whose eighty kernels take minutes to compile."""


def run(*command, **changes):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1", **changes}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_small_triton_kernels_pass_in_three_schedules(arch):
    options = ["--emulate", arch, "--emulate-schedules", "3"]
    done = run("pytest", "-q", *KERNELS, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout
    assert f"emulated {arch}" in done.stdout
    assert "product_kernel" in done.stdout


@pytest.mark.if_changed
@pytest.mark.timeout(900)  # with cold caches, on a shared core
@pytest.mark.parametrize(
    ("tests", "kernel"),
    [
        (QUICK, "segment_sum.segment_sum_kernel"),
        pytest.param(TRAINING, "sparse_optimizers.elementwise_kernel", marks=pytest.mark.slow),
    ],
    ids=["kernels", "training"],
)
def test_the_command_runs_tests_on_emulated_kernels(tests, kernel):
    done = run("tritonrec", "emulate", "--", "pytest", "-q", "-m", "not slow", *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "emulated sm_90" in done.stdout
    assert kernel in done.stdout


@pytest.mark.slow
def test_without_the_option_nothing_is_emulated():
    done = run("pytest", "-q", *KERNELS, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulated" not in done.stdout and " passed" not in done.stdout


@pytest.mark.slow
def test_the_interpreter_and_the_emulator_exclude_each_other():
    code = (
        "from tritonrec.harness.emulator import Emulation, emulated\n"
        "try:\n with emulated(Emulation()): pass\nexcept ValueError as e: print(e)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "TRITON_INTERPRET=1 is set" in done.stdout, done.stderr


def test_the_command_hands_on_its_options(tmp_path):
    test = tmp_path / "test_silu.py"
    test.write_text(
        "import torch\nfrom tritonrec import ops\n\n\ndef test_equal():\n    x = torch.randn(100)\n"
        "    assert torch.equal(ops.silu(x, impl='triton'), ops.silu(x, impl='cpu'))\n"
    )
    done = run("tritonrec", "emulate", "--arch", "sm_80", "--schedules", "2", "--", "pytest", "-q", str(test))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout and "emulated sm_80" in done.stdout
    assert "silu.forward_kernel" in done.stdout


@pytest.mark.slow
def test_the_command_runs_a_script_and_hands_on_its_failure(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport torch\nfrom tritonrec import ops\nops.silu(torch.randn(9), impl='triton')\n"
        "sys.exit(len(sys.argv))\n"
    )
    done = run("tritonrec", "emulate", "--", "python", str(script), "one", "two")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "silu.forward_kernel" in done.stdout


@pytest.mark.parametrize("command", [[], ["ls"], ["python"]])
def test_the_command_refuses_what_it_cannot_run(command):
    done = CliRunner().invoke(app, ["emulate", "--", *command])
    assert done.exit_code == 2
    assert "pytest" in done.output
