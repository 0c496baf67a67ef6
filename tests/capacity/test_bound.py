"""Promise: a step that needs more memory than is left is an error that says so, and no end by the kernel."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import njit

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer, nn
from tritonrec.capacity import MemoryWatch, Room, bound, resident_bytes
from tritonrec.capacity import watch as watching
from tritonrec.data import Batch, KeyedJaggedTensor
from tritonrec.data.jagged import Lookup, offsets_of

resource = pytest.importorskip("resource", reason="Windows has no such limit")
MIB, DIM = 1 << 20, 1024


def said_by(code):
    """What a process of its own prints."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def limits():
    return resource.getrlimit(resource.RLIMIT_DATA)


@njit
def of_numba(size):
    return np.empty(size, np.uint8).size


WAYS = {
    "torch": lambda size: torch.empty(size, dtype=torch.uint8),
    "numpy": lambda size: np.empty(size, np.uint8),
    "numba": of_numba,
    "python": bytearray,
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
def test_an_allocation_beyond_the_bound_raises(way):
    WAYS[way](8)
    before = limits()
    bound.bound_data(256 * MIB)
    try:
        WAYS[way](64 * MIB)
        with pytest.raises((MemoryError, RuntimeError)) as refused:
            WAYS[way](1024 * MIB)
    finally:
        bound.lift_bound()
    assert bound.tells_of_memory(refused.value) and limits() == before
    WAYS[way](1024 * MIB)


@pytest.mark.if_changed
def test_a_limit_of_the_users_is_kept():
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_DATA, (5 << 30, 6 << 30))\n"
        "from tritonrec.capacity import bound\n"
        "for more in (1 << 40, 1 << 20): bound.bound_data(more); print(r.getrlimit(r.RLIMIT_DATA)[0] >> 30)\n"
        "bound.lift_bound(); print(r.getrlimit(r.RLIMIT_DATA) == (5 << 30, 6 << 30))"
    )
    above, below, after = said_by(code).split()
    assert int(above) == 5 and int(below) < 5 and after == "True"


def test_nothing_is_bound_beside_an_accelerator(monkeypatch):
    before = limits()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    bound.bound_data(MIB)
    assert limits() == before


class Bags(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, 1)

    def forward(self, batch, rows, seed):
        return self.linear(rows["item"], torch.arange(batch.num_samples + 1)).sum(1)


def batch(step, large):
    ids = torch.arange(150_000 if step == large else 9) + 7 * step
    lengths = torch.ones(len(ids), dtype=torch.int64)
    lookup = Lookup(ids, offsets_of(lengths))
    return Batch(step, ids.clone(), KeyedJaggedTensor.from_dict({"item": lookup}))


@pytest.mark.parametrize("large", [0, 4])
def test_a_step_that_is_larger_than_what_is_left_is_named(large):
    """By a chunk of rows of 768 MiB, which leaves enough for what is small."""
    model, before = Bags(), limits()
    tables = HashTableCollection([FeatureConfig("item", DIM, pooling="sum")], RowOptimizer("adam", lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(model, tables, optimizer, Communicators.local()) as trainer:
        watch = MemoryWatch(trainer, resident_bytes() + 600 * MIB, reserve=0)
        message = r"step [0-4] or one read ahead needs .*iB that were left of .* this process .*: use smaller"
        with pytest.raises(MemoryError, match=message):
            for result in watch.run(batch(step, large) for step in range(9)):
                assert result.step < large and limits() != before
    assert limits() == before


def trained(results, said=None, **options):
    """A watch of a trainer whose results these are."""
    groups = SimpleNamespace(world_size=6, machines=2, shards=6, stop=SimpleNamespace(set=lambda: None))
    tables = SimpleNamespace(groups=[])
    trainer = SimpleNamespace(tables=tables, communicators=groups, next_step=3, run=lambda batches: results())
    return MemoryWatch(trainer, say=(said or []).append, every=0.0, **options)


@pytest.mark.parametrize(("left", "share"), [(1000, 900 // 3), (220, 120 // 3), (100, 50 // 3), (-5, 0)])
@pytest.mark.parametrize("own", [False, True])
def test_ranks_of_a_machine_share_all_but_half_of_the_reserve(monkeypatch, left, share, own):
    bounds, room = [], [Room(10_000, 10_000, "it", own)] * 2 + [Room(left, 10_000, "it", own)] * 9
    monkeypatch.setattr(watching, "memory_left", lambda limit: room.pop(0))
    monkeypatch.setattr(watching, "bound_data", bounds.append)
    watch = trained(lambda: iter([SimpleNamespace(step=0)]), reserve=200)
    list(watch.run([]))
    first = (10_000 - 100) // (1 if own else 3) + bound.stacks()
    assert bounds == [first, max(left - min(left, 200) // 2, 0) if own else share] or left < 0
    watch.on_step_end(2)  # in a loop of one's own nothing is bound
    assert len(bounds) == 2


def test_other_errors_are_as_they_are_and_leave_no_bound():
    before = limits()

    def fails():
        yield SimpleNamespace(step=0)
        assert limits() != before
        raise KeyError("item")

    with pytest.raises(KeyError, match="item"):
        list(trained(fails, reserve=0).run([]))
    assert limits() == before
    for _ in trained(fails, reserve=0).run([]):
        break
    assert limits() == before


@pytest.mark.if_changed
def test_a_look_finds_room_for_its_own_threads():
    """Though nothing is left of the bound before, as after a step that took all of it."""
    code = (
        "import threading\n"
        "from tritonrec.capacity import bound\n"
        "held, more = threading.Event(), True\n"
        "bound.bound_data(8 << 20)\n"
        "while more:\n"
        "    try: threading.Thread(target=held.wait, daemon=True).start()\n"
        "    except RuntimeError: more = False\n"
        "bound.bound_data(1 << 30); print('bound')"
    )
    assert said_by(code) == "bound\n"


@pytest.mark.if_changed
def test_a_lane_starts_its_parallel_loops_under_any_bound():
    """Of a machine of many cores, whose stacks are more than what is left: OpenMP would end the process."""
    code = (
        "import threading, torch\n"
        "from tritonrec.capacity import bound\n"
        "torch.set_num_threads(48)\n"
        "numbers = torch.ones(1 << 22, dtype=torch.float32)\n"
        "bound.bound_data(64 << 20)\n"
        "lane = threading.Thread(target=numbers.add_, args=(1,)); lane.start(); lane.join(); print('ran')"
    )
    assert said_by(code) == "ran\n"
