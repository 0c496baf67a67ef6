"""Promise: a training whose tables outgrow memory is warned ahead, and asked to stop in time."""

from itertools import pairwise
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from tritonrec.capacity import MemoryWatch, Room
from tritonrec.capacity import watch as watching
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer

STEPS, GOES_ON = 400, 6  # after a wish to stop


def in_use(tables):
    return sum(
        group.table.memory()["key_structure"] + len(group.table) * 4 * group.table.row_width
        for group in tables.groups
    )


def grown(monkeypatch, limit, rows=25, ranks=1, **options):
    """Bytes of two tables after each step, with `rows` new ones in each, until a while after a wish to stop,
    and what was said. The limit is that of a machine of `ranks` ranks like this one; another has one less."""
    features = [FeatureConfig("a", 4), FeatureConfig("b", 3)]
    tables = HashTableCollection(features, RowOptimizer("adam", lr=0.1), merge=False, slots=8)
    groups = SimpleNamespace(stop=Event(), world_size=2 * ranks - 1, machines=2, shards=1)
    trainer = SimpleNamespace(tables=tables, communicators=groups)
    monkeypatch.setattr(
        watching, "memory_left", lambda own: Room(limit - ranks * in_use(tables), limit, "it")
    )
    said, sizes, left = [], [], GOES_ON
    watch = MemoryWatch(trainer, say=said.append, every=0.0, **{"reserve": 0, "margin": 8, **options})
    for step in range(STEPS):
        for group in tables.groups:
            group.table.lookup(torch.arange(step * rows, (step + 1) * rows, dtype=torch.int64), step)
        sizes.append(in_use(tables))
        watch.on_step_end(step + 1)
        left -= groups.stop.is_set()
        if not left:
            break
    assert groups.stop.is_set() == bool(watch.ended) == (len(sizes) < STEPS)
    return sizes, said


def number(line, before):
    """The number that stands behind `before`."""
    return int(line.partition(before)[2].split()[0].strip(",:").replace(",", ""))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.49, 0.51, 0.7, 0.9])
@pytest.mark.parametrize("ranks", [1, 3])
def test_stops_before_memory_ends(monkeypatch, share, ranks):
    free, said = grown(monkeypatch, 1 << 40)
    assert len(free) == STEPS and not said
    limit = ranks * int(free[-1] * share)
    sizes, said = grown(monkeypatch, limit, ranks=ranks)
    assert ranks * max(sizes) <= limit and said[-1].endswith(": stopping")
    assert len(sizes) > 10
    # a doubling of the key structure is foreseen: more memory than that is not left unused
    assert limit - ranks * sizes[-1] < ranks * 2.2 * (free[len(sizes) + 20] - sizes[-1]) + 4096


@pytest.mark.if_changed
def test_warns_ahead_and_again_at_half_the_way(monkeypatch):
    free, _ = grown(monkeypatch, 1 << 40)
    sizes, said = grown(monkeypatch, free[300], ahead=200)
    away = [number(line, "about ") for line in said[:-1]]
    assert len(away) >= 3 and 150 < away[0] <= 200
    assert all(later <= earlier / 2 for earlier, later in pairwise(away))
    assert all("grow by 50 a step" in line for line in said)
    ends = [number(line, "at step ") for line in said[:-1]]
    assert all(len(sizes) - GOES_ON <= end <= 301 for end in ends)


@pytest.mark.if_changed
def test_what_is_kept_for_a_checkpoint(monkeypatch):
    free, _ = grown(monkeypatch, 1 << 40)
    reserve = free[-1] // 4
    sizes, _ = grown(monkeypatch, free[-1] // 2 + reserve, reserve=reserve)
    assert max(sizes) <= free[-1] // 2


def test_nothing_is_said_where_nothing_grows(monkeypatch):
    sizes, said = grown(monkeypatch, 200, rows=0)
    assert len(sizes) == STEPS and not said


def test_growth_is_measured_anew_where_a_run_has_gone_back(monkeypatch):
    monkeypatch.setattr(watching, "memory_left", lambda own: Room(1 << 40, 1 << 40, "it"))
    monkeypatch.setattr(watching, "tables_added", lambda tables, rows, shards: 0)
    group = SimpleNamespace(table=[])
    groups = SimpleNamespace(stop=Event(), world_size=1, machines=1, shards=1)
    trainer = SimpleNamespace(tables=SimpleNamespace(groups=[group]), communicators=groups)
    watch = MemoryWatch(trainer, every=0.0)
    for step, rows in [(1, 10), (2, 20), (3, 30), (2, 20), (3, 25)]:
        group.table = range(rows)
        watch.on_step_end(step)
    assert watch._rates() == [5.0]


@pytest.mark.parametrize("own", [False, True], ids=["of the machine", "of the process"])
@pytest.mark.parametrize(
    ("world_size", "machines", "here"), [(1, 1, 1), (6, 1, 6), (6, 2, 3), (5, 2, 3), (3, 3, 1), (4, 0, 4)]
)
def test_ranks_of_a_machine_share_what_is_left_of_it(monkeypatch, world_size, machines, here, own):
    """To the step: a rank's tables take 1,000 bytes a step, of what is left for it."""
    left, said = 900_000, []
    monkeypatch.setattr(watching, "memory_left", lambda _: Room(left + 77, 1 << 40, "it", own))
    monkeypatch.setattr(watching, "tables_added", lambda tables, rows, shards: 100 * sum(rows))
    group = SimpleNamespace(table=[])
    groups = SimpleNamespace(stop=Event(), world_size=world_size, machines=machines, shards=1)
    trainer = SimpleNamespace(tables=SimpleNamespace(groups=[group]), communicators=groups)
    watch = MemoryWatch(trainer, every=0.0, reserve=77, say=said.append)
    for step in range(1, 4):
        group.table = range(10 * step)
        watch.on_step_end(step)
    steps = left // 1000 // (1 if own else here)
    assert [number(line, "about ") for line in said] == [steps] and number(said[0], "at step ") == steps + 2


def test_memory_that_is_gone_at_first_is_an_error(monkeypatch):
    with pytest.raises(
        MemoryError, match=r"0 MiB of the 1\.0 GiB of it are taken before the first step, and 2"
    ):
        grown(monkeypatch, 1 << 30, reserve=2 << 30)
    with pytest.raises(ValueError, match="negative"):
        grown(monkeypatch, 1 << 30, ahead=-1)
