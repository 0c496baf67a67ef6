"""Promise: with ``impl="triton"`` every op of every stage runs on a Triton kernel, and no kernel of the CPU.

`test_plugin.py` runs this file with ``--emulate``.
"""

import contextlib
import threading
from collections import defaultdict
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
from numba.core.dispatcher import Dispatcher
from speeds import slow_except

from tritonrec.harness.cli.verify import SMALL
from tritonrec.harness.devices import Target
from tritonrec.harness.verify.cases import STORAGES, Case
from tritonrec.harness.verify.run_case import prepared
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.kernels import dispatch
from tritonrec.kernels.fixed_point import numba_fixed_point
from tritonrec.kernels.op import Op
from tritonrec.pipeline import PIPELINED, StageFailedError
from tritonrec.pipeline.executor import Executor

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")
JOB = replace(SMALL, target=Target("triton"))
STEPS = 3
EVERY = [*product(PIPELINED, (1, 2), STORAGES)]
QUICK = [("nestpipe", 1, "cached"), ("dbp", 1, "host"), ("fwp", 2, "device")]
OURS = "tritonrec.kernels", "tritonrec.data", "tritonrec.embedding", "tritonrec.pipeline", "tritonrec.nn"
ON_THE_HOST = {"prefetch"}
"""It clusters samples, on the CPU wherever the step computes."""
OF_HOST_TABLES = {"retrieve", "write_back"}
"""With tables in host memory they are the host's, on a GPU too: its index of keys and its rows."""
CHECKS = {"first_outside", "add_bits"}
"""Looks at row numbers in host memory before any op; a GPU asserts them itself."""
ALWAYS = {"route", "exchange", "compute", "gradient_exchange", "dense_reduce", "sparse_update"}
"""Stages that run kernels, wherever the tables are; others do for tables on the device, or two buffers."""


class Fallback(AssertionError):
    """An op of a stage is not on Triton."""


@contextlib.contextmanager
def watched():
    """Two dictionaries: stage -> ops that ran in it, and stage -> kernels of the CPU that were called there.

    `Fallback` where an op of a stage runs on another implementation than Triton's.
    """
    of_thread, ran, beside = threading.local(), defaultdict(set), defaultdict(set)
    act, choose = Executor._act, Op._implementation

    def acting(self, task, context):
        of_thread.stage = task.stage
        try:
            act(self, task, context)
        finally:
            of_thread.stage = None

    def chosen(self, which):
        if stage := getattr(of_thread, "stage", None):
            ran[stage].add(self.name)
            if which != "triton":
                raise Fallback(f"stage {stage}: {self.name} runs on {which}")
        return choose(self, which)

    def call(kernel, *args, **kwargs):
        name, stage = kernel.py_func.__module__, getattr(of_thread, "stage", None)
        if stage and name.startswith(OURS) and kernel.py_func.__name__ not in CHECKS:
            beside[stage].add(kernel.py_func.__name__)
        return super(Dispatcher, kernel).__call__(*args, **kwargs)

    with (
        mock.patch.object(Executor, "_act", acting),
        mock.patch.object(Op, "_implementation", chosen),
        mock.patch.object(Dispatcher, "__call__", call),
    ):
        yield ran, beside


def train(mode, ranks, storage):
    case = Case(mode, "batch", ranks, 4, True, "adam", STEPS, storage=storage)

    def run(communicators):
        with prepared(communicators, JOB, case) as (trainer, loader):
            for result in trainer.run(loader.batch(step) for step in range(STEPS)):
                assert result.losses.isfinite().all()

    run_ranks(ranks, run)


@pytest.mark.parametrize(("mode", "ranks", "storage"), slow_except(QUICK, EVERY))
def test_every_op_of_every_stage_is_a_triton_kernel(mode, ranks, storage):
    with watched() as (ran, beside):
        train(mode, ranks, storage)
    allowed = {*ON_THE_HOST, *(OF_HOST_TABLES if storage == "host" else ())}
    assert set(beside) <= allowed, dict(beside)
    expected = {*ALWAYS, *({"retrieve", "write_back"} if storage != "host" else ())}
    expected |= {"copy_kept_rows"} if mode != "fwp" else set()
    assert expected <= {stage for stage, names in ran.items() if names}, dict(ran)


@pytest.mark.parametrize(
    ("op", "stage"),
    [("gather_rows", "exchange"), ("unique_padded", "route"), ("sparse_adam", "sparse_update")],
)
def test_a_fallback_is_noticed(op, stage, monkeypatch):
    run = Op._run

    def fallen(self, arguments, impl):
        return run(self, arguments, "cpu" if self.name == op else impl)

    monkeypatch.setattr(Op, "_run", fallen)
    with watched(), pytest.raises(StageFailedError, match=rf"Fallback: stage {stage}: {op} runs on cpu"):
        train("nestpipe", 1, "host")


def test_a_kernel_of_the_cpu_is_noticed(monkeypatch):
    """Called past the ops, as the CPU's fused layers are."""
    run = Op._run

    def beside(self, arguments, impl):
        numba_fixed_point.to_fixed_point(torch.ones(2), 36, "beside")
        return run(self, arguments, impl)

    monkeypatch.setattr(Op, "_run", beside)
    with watched() as (_, found):
        train("nestpipe", 1, "device")
    assert {"route", "compute", "sparse_update"} <= {
        stage for stage, names in found.items() if "_round" in names
    }
