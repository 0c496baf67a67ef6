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
import sys
for name in {absent}:
    sys.modules[name] = None  # import it, and there is none
import importlib.util, tritonrec.optional as optional
found = importlib.util.find_spec
optional.find_spec = lambda name: None if name in {absent} else found(name)
from tritonrec.harness.cli import main
sys.argv = ["tritonrec", *{arguments}]
main()
"""
DATA = ["train", "--data", "zipf:users=20,items=20", "--steps", "2", "--world-size", "1"]


def without(arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
    """A command where no optional package is installed."""
    script = WITHOUT.format(absent=[*EXTRAS], arguments=arguments)
    return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)


def test_training_and_its_checkpoint_need_none(tmp_path):
    done = without([*DATA, "--checkpoint", "saved", "--json", "run.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        ([*DATA, "--trace", "run.pftrace"], "perfetto", "traces"),
        ([*DATA, "--trace", "run.pftrace", "--png", "run.png"], "perfetto", "traces"),
        (["simulate", "--png", "curve.png"], "matplotlib", "traces"),
        (["bench", "--chart", "chart.png"], "matplotlib", "traces"),
        (["fuzz"], "hypothesis", "fuzz"),
        (["emulate", "pytest"], "pytest", "test"),
    ],
)
def test_an_absence_is_one_sentence_before_any_work(arguments, package, extra, tmp_path):
    done = without(arguments, tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert f"needs the package {package}: pip install {package}" in line
    assert f"tritonrec[{extra}]" in line
    assert not any(tmp_path.iterdir())


def test_every_extra_installs_its_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        assert package.replace("_", "-") in " ".join(project["optional-dependencies"][extra])
        assert package.replace("_", "-") not in " ".join(project["dependencies"])
