"""Configurations come from a table: at most six for a class, nothing compiled or timed to choose one."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tritonrec.kernels import tuned

TABLES = sorted(tuned.FOLDER.glob("*/tuned/*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_committed_table_is_sound(path):
    table = json.loads(path.read_text())
    assert table["kernel"] == path.stem == path.parent.parent.name
    assert table["chosen_by"] and "default" in table["architectures"]
    for architecture, classes in table["architectures"].items():
        assert set(classes) <= set(table["architectures"]["default"]), architecture
        for klass, rows in classes.items():
            assert 1 <= len(rows) <= tuned.MOST_ROWS, (architecture, klass)
            names = table["architectures"]["default"][klass][0]["config"].keys()
            assert all(row["config"].keys() == names for row in rows), (architecture, klass)
            if architecture != "default":
                assert all(row["evidence"] for row in rows), (architecture, klass)


@pytest.fixture
def a_table(tmp_path, monkeypatch):
    """A kernel ``made_up`` with a table, in a folder of its own."""
    table = {
        "default": {"d16": [{"config": {"BLOCK": 1}}], "d32": [{"config": {"BLOCK": 2}}]},
        "sm_80": {"d16": [{"config": {"BLOCK": 80}}, {"config": {"BLOCK": 81}}]},
        "sm_100": {"d16": [{"config": {"BLOCK": 100}}]},
        "gfx90a": {"d16": [{"config": {"BLOCK": 90}}]},
    }
    folder = tmp_path / "made_up" / "tuned"
    folder.mkdir(parents=True)
    (folder / "made_up.json").write_text(json.dumps({"kernel": "made_up", "architectures": table}))
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    for cached in (tuned.table, tuned._chosen):
        cached.cache_clear()
    yield
    for cached in (tuned.table, tuned._chosen):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("architecture", "klass", "block"),
    [
        ("default", "d16", 1),
        ("sm_80", "d16", 80),
        ("sm_90", "d16", 80),  # the nearest earlier one, though 100 is near too
        ("sm_100", "d16", 100),
        ("sm_120", "d16", 100),
        ("sm_75", "d16", 1),
        ("gfx942", "d16", 90),
        ("gfx906", "d16", 1),
        ("gfx1100", "d16", 1),
        ("sm_80", "d32", 2),
        ("unknown", "d16", 1),
    ],
)
def test_the_nearest_earlier_architecture_serves(a_table, monkeypatch, architecture, klass, block):
    monkeypatch.setattr(tuned, "architecture", lambda device: architecture)
    assert tuned.config("made_up", klass, torch.device("cpu")) == {"BLOCK": block}


def test_a_caller_may_change_its_copy(a_table):
    tuned.config("made_up", "d16", torch.device("cpu")).pop("BLOCK")
    assert tuned.config("made_up", "d16", torch.device("cpu")) == {"BLOCK": 1}


def test_an_unknown_class_is_named(a_table):
    with pytest.raises(KeyError, match="has no class 'd64' for sm_90"):
        tuned.rows("made_up", "d64", "sm_90")


@pytest.mark.parametrize(
    ("width", "klass"),
    [(0, "d16"), (1, "d16"), (16, "d16"), (17, "d32"), (64, "d64"), (65, "d128"), (5000, "d128")],
)
def test_row_classes(width, klass):
    assert tuned.row_class(width, most=128) == klass


IMPORTS = """
import subprocess, sys, time
import triton, triton.compiler, triton.runtime.jit, triton.testing

def forbidden(*args, **kwargs):
    raise AssertionError("compiled, launched or timed at import")

triton.compile = triton.compiler.compile = forbidden
triton.runtime.jit.JITFunction.run = forbidden
triton.testing.do_bench = forbidden
triton.autotune = forbidden
import importlib, pkgutil
import tritonrec.kernels
names = [m.name for m in pkgutil.walk_packages(tritonrec.kernels.__path__, "tritonrec.kernels.")]
names = [name for name in names if name.split(".")[-1].startswith("triton_")]
for name in names:
    importlib.import_module(name)
from tritonrec.kernels import tuned
from triton.runtime.autotuner import Autotuner, Heuristics
for name in names:
    for value in vars(sys.modules[name]).values():
        assert not isinstance(value, (Autotuner, Heuristics)), name
assert tuned.table.cache_info().currsize == 0, "a table was read at import"
print(len(names))
"""


def test_nothing_is_compiled_or_timed_at_import():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 12
