"""Promise: the SASRec of the examples, in bfloat16, ends at the same bits in every mode, on any ranks."""

import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from speeds import slow_except

from tritonrec import checkpoint

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "sasrec.py"
DATA = "zipf:users=60,items=90,seed=2"


CUTS = slow_except([("nestpipe", 4)], product(("dbp", "fwp", "nestpipe"), (1, 4)))


def saved(folder):
    """The newest checkpoint there, whoever has saved it."""
    found = checkpoint.load(folder)
    return found.step, {**found.dense, **found.tables["item"]}, found.meta


def same(one, other):
    assert one[0] == other[0] and one[1].keys() == other[1].keys() and one[2] == other[2]
    return all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def train(folder, mode="nestpipe", micro_batches=4, epochs=3, patience=9, **options):
    """In this process; the state that it has saved at last."""
    spec = importlib.util.spec_from_file_location("sasrec_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(folder, DATA, epochs, patience, mode, micro_batches, **options)
    return saved(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return train(tmp_path_factory.mktemp("reference"), "reference", 1)


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("mode", "micro_batches"),
    CUTS,
)
def test_every_mode_ends_alike(tmp_path, reference, mode, micro_batches):
    assert same(train(tmp_path, mode, micro_batches), reference)


@pytest.mark.slow
def test_it_computes_in_bfloat16(tmp_path, reference):
    wide = train(tmp_path, precision="float32")
    assert reference[2]["dense_precision"] == "bf16" and wide[2]["dense_precision"] == "float32"
    assert not same((*wide[:2], {}), (*reference[:2], {}))


@pytest.mark.slow
def test_it_stops_early_and_stays_so_after_a_restart(tmp_path):
    first = train(tmp_path, epochs=30, patience=1)
    assert 1 < first[0] < 30 and first[2]["waited"] == 1
    assert same(train(tmp_path, epochs=30, patience=1), first)


@pytest.mark.slow
@pytest.mark.multi_rank
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_of_many_ranks_that_was_killed_goes_on_in_one(tmp_path, reference, ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    run = subprocess.Popen(
        [*command, str(EXAMPLE), str(tmp_path), "--data", DATA, "--epochs", "3", "--patience", "9"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.stdout.readline().startswith("step")
    # torchrun's ranks are in process groups of their own
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(tmp_path).encode() in each.read_bytes().split(b"\0"):
                os.kill(int(each.parent.name), signal.SIGKILL)
    run.wait()
    assert same(train(tmp_path), reference)
