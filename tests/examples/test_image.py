"""Promise: the image of the Dockerfile is built, and a training in it prints README.md's digits, where a
daemon of Docker answers. `test_release.py` lints it always.
"""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3000)  # it compiles the kernels
def test_the_image_trains_what_the_readme_shows():
    def docker(*words):
        return subprocess.run(["docker", *words], cwd=ROOT, capture_output=True, text=True)

    try:
        answered = docker("version").returncode == 0
    except FileNotFoundError:
        answered = False
    if not answered:
        pytest.skip("no daemon of Docker answers")
    built = docker("build", "-f", "docs/examples/Dockerfile", "-t", "tritonrec:0.1", ".")
    assert built.returncode == 0, built.stderr[-3000:]
    ran = docker("run", "--rm", "tritonrec:0.1", "python", "docs/examples/train.py")
    readme = (ROOT / "README.md").read_text()
    assert ran.returncode == 0 and ran.stdout and ran.stdout in readme, ran.stdout + ran.stderr[-3000:]
