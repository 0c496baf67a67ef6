"""Importing the library is light: nothing that compiles, draws or reads tables, and no driver."""

from __future__ import annotations

import os
import subprocess
import sys

HEAVY = ("triton", "numba", "matplotlib", "pandas", "perfetto", "torch._inductor")


def loaded_by(statements: list[str], candidates: tuple[str, ...]) -> list[list[str]]:
    """Which of `candidates` a fresh process has imported after each of the statements.

    The process sees no accelerator and has no leave to interpret Triton kernels.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | hidden
    report = f"print(*(name for name in {candidates!r} if name in sys.modules))"
    program = "\n".join(["import sys", *(f"{statement}; {report}" for statement in statements)])
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


TOOLS = tuple(f"tritonrec.{name}" for name in ("resilience", "serving", "slipstream", "torchrec"))
TOOLS += tuple(f"tritonrec.harness.{name}" for name in ("emulator", "fuzz", "lab", "simulator", "verify"))
FIRST_CALL = "import torch; _ = tritonrec.ops.unique(torch.tensor([5, 3, 5]))"
STEP = (
    "import tritonrec.harness.train.evaluate; from tritonrec.harness.job import Job; "
    "from tritonrec.distributed import Communicators; "
    "from tritonrec.pipeline import Trainer; job = Job('zipf:users=20,items=20'); "
    "_ = Trainer(*job.build('adam'), Communicators.local()).step(job.loader().batch(0))"
)


def test_imports_and_first_calls_load_nothing_heavy_and_a_training_step_no_tool():
    """Each loads no more than those before it and what it needs itself, so one process shows them all.

    Clustering is a numba function of its own, so numba may be loaded; compiling waits for the first call.
    torch._dynamo takes longer to import than all else of a first call.
    """
    light = ["import tritonrec", "import tritonrec.ops"]
    packages = [f"import tritonrec.{name}" for name in
                ("nn", "trace", "checkpoint", "embedding", "data", "pipeline")]  # fmt: skip
    heavy = f"import matplotlib.pyplot, pandas, torch._dynamo, {TOOLS[2]}"
    *found, call, step, every = loaded_by(
        [*light, *packages, FIRST_CALL, STEP, heavy], (*HEAVY, "torch._dynamo", *TOOLS)
    )
    for statement, loaded in zip([*light, *packages], found, strict=True):
        assert set(loaded) <= (set() if statement in light else {"numba"}), statement
    assert "torch._dynamo" not in call and not {*TOOLS} & {*step}
    assert {"matplotlib", "pandas", "torch._dynamo", TOOLS[2]} <= {*every}, "a heavy import is not seen"


def test_the_command_line_tells_options_without_torch_and_no_command_loads_what_compiles_graphs():
    """torch._dynamo takes as long as torch itself: `torch.export.pt2_archive` and optimizers load it."""

    def called(*words: str) -> str:
        return (
            f"import contextlib, typer.testing; _ = typer.testing.CliRunner().invoke(cli.app, {list(words)})"
        )

    told = [called("train", "--help"), called("train", "--steps", "-5")]
    every = "_ = [cli.load(name) for name in cli.COMMANDS]"
    *light, loaded, seen = loaded_by(
        ["import tritonrec.harness.cli as cli", *told, every, "import torch._dynamo"],
        ("torch", "torch._dynamo", *HEAVY),
    )
    assert light == [[]] * 3 and "torch" in loaded
    assert "torch._dynamo" not in loaded and "torch._dynamo" in seen
