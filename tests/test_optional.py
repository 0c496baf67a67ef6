"""Promise: training needs no package that only pictures, traces or measurements do, and each absence is one
sentence, before any work."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tritonrec.optional import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
WITHOUT = """
import os, sys
for name in {absent}:
    sys.modules[name] = None  # import it, and there is none
import importlib.util, tritonrec.optional as optional
found = importlib.util.find_spec
optional.find_spec = lambda name: None if name in {absent} else found(name)
from tritonrec.harness.cli import main
for arguments in {commands}:
    sys.argv = ["tritonrec", *arguments]
    try:
        main()
    except SystemExit as end:
        print("exit", end.code, sorted(os.listdir()), file=sys.stderr)
"""
DATA = ["train", "--data", "zipf:users=20,items=20", "--steps", "2", "--world-size", "1"]


def without(folder: Path, *commands: list[str]) -> list[str]:
    """What each of the commands says on stderr where no optional package is installed, and its exit status
    with the files it leaves.
    """
    script = WITHOUT.format(absent=[*EXTRAS], commands=commands)
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)
    return done.stderr.strip().splitlines()


@pytest.mark.if_changed
def test_training_and_its_checkpoint_need_none_and_an_absence_is_one_sentence_before_any_work(tmp_path):
    expected = [
        ([*DATA, "--trace", "run.pftrace"], "perfetto", "traces"),
        (["lab", "--png", "run.png", "--trace", "traces"], "matplotlib", "traces"),
        (["lab"], "perfetto", "traces"),
        (["profile"], "perfetto", "traces"),
        (["verify", "--trace", "traces"], "perfetto", "traces"),
        (["serve-bench", "--trace", "traces"], "perfetto", "traces"),
        (["reproduce", "consistency", "--folder", "figures"], "matplotlib", "traces"),
        (["simulate", "--png", "curve.png"], "matplotlib", "traces"),
        (["fuzz"], "hypothesis", "fuzz"),
        (["serve", "nowhere"], "fastapi", "serve"),
        (["emulate", "pytest"], "pytest", "test"),
        (["warmup", "--target", "sm_90"], "triton", "triton"),
    ]
    trained = [*DATA, "--checkpoint", "saved", "--json", "run.json"]
    lines = without(tmp_path, *(arguments for arguments, *_ in expected), trained)
    refused, printed = lines[: 2 * len(expected)], lines[2 * len(expected) :]
    assert refused[1::2] == ["exit 2 []"] * len(expected), lines
    for line, (_, package, extra) in zip(refused[::2], expected, strict=True):
        assert f"needs the package {package}: pip install {package}" in line
        assert f"tritonrec[{extra}]" in line
    assert printed[-1] == "exit 0 ['run.json', 'saved']", printed


def test_every_extra_installs_its_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        assert package.replace("_", "-") in " ".join(project["optional-dependencies"][extra])
        assert package.replace("_", "-") not in " ".join(project["dependencies"])
