"""Promise: `import tritonrec` offers the names a user starts from, and loads their packages on first use."""

import subprocess
import sys
from importlib import import_module

import pytest

import tritonrec

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("name", tritonrec.__all__)
def test_a_name_is_that_of_its_package(name):
    if name in tritonrec.PACKAGE_OF:
        owner = import_module(f"tritonrec.{tritonrec.PACKAGE_OF[name]}")
        assert name in owner.__all__ and getattr(tritonrec, name) is getattr(owner, name)
    elif name != "__version__":
        assert getattr(tritonrec, name) is import_module(f"tritonrec.{name}")


def test_all_names_are_listed_before_their_first_use():
    script = (
        "import sys, tritonrec; print('torch' in sys.modules, set(tritonrec.__all__) <= set(dir(tritonrec)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="module 'tritonrec' has no attribute 'Trainr'"):
        tritonrec.Trainr  # noqa: B018
