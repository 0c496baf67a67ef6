"""A table is saved part by part while it changes, and loaded part by part: nothing leaks, nothing is held."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from simulated import EXTREMES, on_ranks, random_table, same, save_on

from tritonrec import FeatureConfig, HashTableCollection, RowOptimizer, ops
from tritonrec.checkpoint import CheckpointError, CheckpointStream, Saver, load, save, slices, steps, writer
from tritonrec.checkpoint.rows import sort_by_part
from tritonrec.checkpoint.tensor_file import save_file
from tritonrec.embedding import DynamicTable, Eviction, PrecisionTiers, TablePolicy
from tritonrec.embedding.key_index import KeyIndex
from tritonrec.embedding.snapshot import SnapshotRows

ROOT = Path(__file__).parents[2]
POLICIES = {
    "plain": TablePolicy(),
    "lru-tiers": TablePolicy(eviction=Eviction("lru", capacity=500), precision=PrecisionTiers(2, every=3)),
    "lfu-admission": TablePolicy(eviction=Eviction("lfu", capacity=400), admission=2),
}


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of four kilobytes, so that a small table has many."""
    monkeypatch.setattr(slices, "PART_BYTES", 4096)


class Training:
    """Random steps of one rank's tables, two of them merged."""

    def __init__(self, policy: TablePolicy, rank: int = 0, world_size: int = 1, merge: bool = True):
        features = [FeatureConfig(name, 4, policy=policy) for name in ("item", "shop")]
        self.tables = HashTableCollection(features, RowOptimizer("adam"), seed=3, merge=merge)
        self.rank, self.world_size, self.step = rank, world_size, 0
        self.draw = torch.Generator().manual_seed(rank)
        for _ in range(6):
            self.train(300)

    def train(self, keys: int) -> None:
        for group in self.tables.groups:
            ids = torch.randint(0, 900, (keys,), generator=self.draw).unique()
            parts = []
            for name, member in group.features:
                own = ids[ops.owner_of(ids, self.world_size) == self.rank]
                parts.append(group.layout.pack(member, own, name))
            table, keys_of_step = group.table, torch.cat(parts)
            found = table.lookup(keys_of_step, self.step)
            values = torch.randn(len(keys_of_step), table.row_width, generator=self.draw)
            values[:, 2 * table.row_width // 3 :].abs_()  # Adam's squares
            if found.low_precision is not None:
                table.round_low_precision(values, found.low_precision)
            table.update(found.handles, values)
        self.step += 1

    def erase(self, keys: int) -> None:
        for group in self.tables.groups:
            some = group.table.export()[0]
            group.table.erase(some[torch.randperm(len(some), generator=self.draw)[:keys]])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.if_changed
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_change_during_a_save_are_saved_as_they_were(
    tmp_path, monkeypatch, small_parts, policy, world_size, merge, delta
):
    """Byte for byte the files of a save with nothing beside it, at every point of which rows change."""
    trainings, stills = (
        [Training(POLICIES[policy], rank, world_size, merge) for rank in range(world_size)] for _ in "ab"
    )

    def save_all(rank, gather, folder, step, tables, **options):
        options |= {"rank": rank, "world_size": world_size, "gather": gather}
        return save(tmp_path / folder, step, {}, tables, {}, **options)

    def based(rank, gather, folder):
        """Options of a delta on a full checkpoint in the folder."""
        return {"base": save_all(rank, gather, folder, 4, bases[rank])} if delta else {}

    bases = [each.tables.state() for each in trainings]
    for each in trainings + stills if delta else []:
        each.tables.track_changes()
        each.train(500)
        each.erase(150)
    states = [each.tables.state() for each in trainings]

    def still(rank, gather):
        options = based(rank, gather, "a")
        tables = states[rank]
        if delta:
            tables, options["erased"] = stills[rank].tables.take_changes()
        return save_all(rank, gather, "a", 5, tables, **options)

    for result in on_ranks(world_size, still):
        assert not isinstance(result, Exception), result
    reads, read = [], SnapshotRows.read

    def busy(rank, gather):
        options, tables = based(rank, gather, "b"), trainings[rank].tables
        if delta:
            snapshot, options["erased"] = tables.snapshot_of_changes()
        else:
            snapshot = tables.snapshot()
        mine = [rows for rows in snapshot.values() if isinstance(rows, SnapshotRows)]
        for rows in mine:
            rows.read = lambda part, order, rows=rows: change(rank, read(rows, part, order))
        trainings[rank].train(40)
        return save_all(rank, gather, "b", 5, snapshot, **options)

    def change(rank, columns):
        reads.append(rank)
        for _ in range(3):  # an erased row's handle is free again, and goes to a new row
            trainings[rank].train(60)
            trainings[rank].erase(15)
        return columns

    monkeypatch.setattr(writer, "THREADS", 1)  # which makes the changes too
    for result in on_ranks(world_size, busy):
        assert not isinstance(result, Exception), result
    assert len(reads) > 4 * world_size
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    state = trainings[0].tables.state()
    assert not all(same(state[name], states[0][name]) for name in state)  # they did change


def random_rows(count: int, seed: int = 1) -> tuple[DynamicTable, torch.Tensor]:
    table = DynamicTable(4, 6, chunk_rows=64)
    keys = random_table(seed, count)["keys"]
    table.load(keys, torch.randn(len(keys), 6, generator=torch.Generator().manual_seed(seed)))
    return table, keys


def test_a_row_is_copied_once_and_only_if_it_was_not_read_before():
    table, keys = random_rows(500)
    before = dict(zip(keys.tolist(), table.gather(table.find(keys), keys).tolist(), strict=True))
    snapshot, ids, handles, _ = table.snapshot()
    (rows,) = snapshot.by_table(table.layout, ids, handles).values()
    rows.arrange(sort_by_part([1 << 15]))
    first, second = rows.keys(0), rows.keys(1)
    assert len(first) + len(second) == len(keys) and min(len(first), len(second)) > 100

    def update(some):
        table.update(table.find(some), torch.randn(len(some), 6))

    update(second[:30])
    update(second[20:50])
    table.erase(second[45:70])
    assert len(snapshot._places) == 70
    found = {name: each.clone() for name, each in rows.read(0, slices.order_of(first)).items()}
    update(first)
    table.erase(first[:20])
    table.lookup(torch.arange(40) + 10**6, 0)
    table.update(table.find(torch.arange(40) + 10**6), torch.randn(40, 6))
    assert len(snapshot._places) == 70
    for part, columns in ((first, found), (second, rows.read(1, slices.order_of(second)))):
        assert sorted(columns["keys"].tolist()) == sorted(part.tolist())
        assert columns["rows"].tolist() == [before[key] for key in columns["keys"].tolist()]
    rows.close()
    update(second[70:])
    assert table._snapshots == () and len(snapshot._places) == 70


def test_a_closed_saver_and_a_failed_save_copy_nothing_more(tmp_path):
    table = Training(POLICIES["plain"]).tables
    with Saver(tmp_path) as saver:
        saver.save(3, {}, table.snapshot(), {})
        saver.wait()
        with pytest.raises(ValueError, match="the next checkpoint is full"):
            saver.save(4, {}, table.snapshot(), {}, erased={})
        saver.save(2, {}, table.snapshot(), {})  # an earlier step than the last one
        with pytest.raises(ValueError, match="holds step 3 already"):
            saver.wait()
    assert all(group.table._snapshots == () for group in table.groups)


@pytest.mark.parametrize("policy", ["plain", "lfu-admission", "ttl"])
def test_a_delta_reads_and_sorts_the_changed_rows_alone(tmp_path, monkeypatch, policy):
    """No list of all rows is made, and no key is put in order that did not change."""
    training = Training(POLICIES.get(policy, TablePolicy(eviction=Eviction("ttl", ttl=50))))
    training.train(20)  # with a policy the rows of the last step change once more
    tables = training.tables
    sorted_keys, order_of = [], slices.order_of

    def noted(keys):
        sorted_keys.append(len(keys))
        return order_of(keys)

    monkeypatch.setattr(slices, "order_of", noted)
    with Saver(tmp_path, full_every=4) as saver:
        tables.track_changes()
        saver.save(1, {}, tables.snapshot(), {})
        saver.wait()
        rows = sum(len(group.table) for group in tables.groups)
        for step in (2, 3):
            training.train(20)
            training.erase(3)
            sorted_keys.clear()
            with monkeypatch.context() as patch:
                patch.setattr(KeyIndex, "items", lambda *_: pytest.fail("a search of the whole table"))
                changed, erased = tables.snapshot_of_changes()
            saver.save(step, {}, changed, {}, erased=erased, owned=True)
            saver.wait()
            expected = sum(len(each["keys"] if isinstance(each, dict) else each) for each in changed.values())
            expected += sum(map(len, erased.values()))
            assert sum(sorted_keys) == expected and 40 < expected < rows / 4
    loaded = load(tmp_path)
    assert loaded.step == 3 and loaded.tables.keys() == tables.state().keys()
    for name, columns in tables.state().items():
        assert same(loaded.tables[name], columns)


def test_a_load_puts_rows_in_place_and_logs_the_difference(tmp_path, small_parts):
    """Of two trainings: after one has loaded the other's rows its changes are the difference of both."""
    one, other = Training(POLICIES["lru-tiers"]), Training(POLICIES["lru-tiers"])
    other.train(500)
    other.erase(200)
    save(tmp_path, 1, {}, other.tables.snapshot(), {})
    stream = CheckpointStream(tmp_path)
    before = one.tables.state()
    one.tables.track_changes()
    sizes = {name: stream.most_rows(name) for name in stream.columns}
    place = one.tables.prepare_parts(one.tables.empty_state(), sizes, stream.parts)
    assert all(same(columns, before[name]) for name, columns in one.tables.state().items())
    place()
    wanted = other.tables.state()
    assert all(same(columns, wanted[name]) for name, columns in one.tables.state().items())
    changed, erased = one.tables.take_changes()
    for name, columns in wanted.items():
        gone = set(before[name]["keys"].tolist()) - set(columns["keys"].tolist())
        assert set(erased[name].tolist()) == gone and gone
        assert same(changed[name], columns)
    for _ in range(4):  # and both go on alike
        one.draw.manual_seed(9)
        other.draw.manual_seed(9)
        one.step = other.step
        one.train(200)
        other.train(200)
    wanted = other.tables.state()
    assert all(same(columns, wanted[name]) for name, columns in one.tables.state().items())


def test_a_load_draws_no_initial_rows_and_refuses_a_key_given_twice(tmp_path, monkeypatch):
    tables = Training(POLICIES["plain"]).tables
    columns = tables.state()
    monkeypatch.setattr(DynamicTable, "initial_rows", lambda *_: pytest.fail("rows that are overwritten"))
    sizes = {name: len(each["keys"]) for name, each in columns.items()}
    tables.prepare_parts(columns, sizes, lambda name: [columns[name]])()
    assert all(same(each, columns[name]) for name, each in tables.state().items())
    with pytest.raises(ValueError, match="given twice"):
        tables.prepare_parts(
            tables.empty_state(),
            sizes,
            lambda name: [columns[name], {c: v[:1] for c, v in columns[name].items()}],
        )
    assert all(same(each, columns[name]) for name, each in tables.state().items())


@pytest.mark.parametrize(
    "saved_by, world_size", [((1, 1, 1), 1), ((2, 1, 3), 1), ((3, 2, 1), 2), ((1, 1, 1), 5)]
)
def test_each_file_is_read_once(tmp_path, small_parts, saved_by, world_size):
    """Layers whose parts have other bounds, and a table of one part below another of many."""
    table = random_table(4, 40)
    base = save_on(saved_by[0], tmp_path, 1, {"t": table})[0]
    expected = dict(zip(table["keys"].tolist(), table["rows"].tolist(), strict=True))
    for step, ranks in enumerate(saved_by[1:], 2):
        table = random_table(step, 900 // step)
        gone = torch.tensor([key for key in list(expected)[::7] if key not in set(table["keys"].tolist())])
        base = save_on(ranks, tmp_path, step, {"t": table}, base=base, erased={"t": gone})[0]
        expected = {key: row for key, row in expected.items() if key not in set(gone.tolist())}
        expected |= dict(zip(table["keys"].tolist(), table["rows"].tolist(), strict=True))
    found = {}
    for rank in range(world_size):
        loaded = load(tmp_path, rank=rank, world_size=world_size)
        assert len(set(loaded.files)) == len(loaded.files) > 2
        part = loaded.tables["t"]
        found |= dict(zip(part["keys"].tolist(), part["rows"].tolist(), strict=True))
        parts = list(CheckpointStream(tmp_path).parts("t", rank, world_size))
        assert (
            len(parts) > 2
            and sorted(key for each in parts for key in each["keys"].tolist()) == part["keys"].tolist()
        )
    assert found == expected


def test_a_file_whose_keys_are_not_in_order_is_refused(tmp_path, monkeypatch):
    order_of = slices.order_of
    monkeypatch.setattr(slices, "order_of", lambda keys: order_of(keys)[::-1].copy())
    save(tmp_path, 1, {}, {"t": random_table(5, 60)}, {})
    with pytest.raises(CheckpointError, match="its keys are not in the order of slices 0 to 65535"):
        load(tmp_path)


@pytest.mark.parametrize("most", [1 << 40, 100])
def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path, monkeypatch, most):
    class Disk(io.FileIO):
        """Writes so many bytes at a time."""

        def write(self, part):
            return super().write(part[:most])

    tensors = random_table(6, 33) | {
        "half": torch.randn(33, 5).half(), "other": torch.randn(33, 2, 3).bfloat16(),
        'é"': torch.ones(33) > 0, "none": torch.empty(0, dtype=torch.int64), "number": torch.tensor(2.5),
        "wide": torch.empty(33, 0),
    }  # fmt: skip
    metadata = {"part": '{"table": "é\\"", "begin": 0}'}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode, buffering: Disk(path, mode))
        size, digest = save_file(tensors, tmp_path / "ours", metadata)
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata)
    content = (tmp_path / "ours").read_bytes()
    assert content == (tmp_path / "theirs").read_bytes()
    assert size == len(content) and digest == hashlib.sha256(content).hexdigest()


KILLED = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from test_streamed import *
slices.PART_BYTES = 4096
training = Training(POLICIES["plain"])
save({target!r}, 1, {{}}, training.tables.snapshot(), {{}})
torch.save(training.tables.state(), {state!r})
training.train(200)
reads, read = [], SnapshotRows.read
def dies(self, *arguments):
    reads.append(1)
    if len(reads) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, *arguments)
SnapshotRows.read = dies
save({target!r}, 2, {{}}, training.tables.snapshot(), {{}})
"""


@pytest.mark.if_changed
def test_a_crash_between_parts_leaves_the_checkpoint_before(tmp_path, small_parts):
    target, state = tmp_path / "run", tmp_path / "state.pt"
    program = KILLED.format(folder=str(Path(__file__).parent), target=str(target), state=str(state))
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run([sys.executable, "-c", program], env={**os.environ, **paths}, timeout=120)
    assert ended.returncode == -9
    assert steps(target) == [1]
    assert list((target / "step-000000000002").iterdir())  # some parts were there
    found = load(target)
    for name, columns in torch.load(state).items():
        assert same(found.tables[name], columns)
    training = Training(POLICIES["plain"])
    save(target, 2, {}, training.tables.snapshot(), {})
    assert load(target).step == 2 and len(list((target / "step-000000000002").iterdir())) > 6


@pytest.mark.slow
def test_neither_a_save_nor_a_load_holds_the_table_once_more(tmp_path):
    """Payloads beyond the table, at the peak of a process of its own; 80 MiB of rows, parts and threads."""
    measure = [sys.executable, ROOT / "ci/benchmarks/measure_checkpoint.py", "--folder", tmp_path]
    measure += ["--rows", "320000", "--dim", "64", "--peak"]
    for what, most in (("save", 0.6), ("load", 0.4)):  # of what was saved
        found = subprocess.run([*measure, what], check=True, timeout=120, capture_output=True, text=True)
        assert 0 <= float(found.stdout.split()[-1]) < most, what


def test_extreme_keys_have_a_part():
    order, bounds = sort_by_part([1 << 15])(torch.tensor(EXTREMES))
    assert (
        sorted(order.tolist()) == list(range(len(EXTREMES)))
        and bounds[0] == 0
        and bounds[-1] == len(EXTREMES)
    )


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_new_rows_of_a_load_that_fails_are_gone(monkeypatch, error):
    """They have no values yet; rows that were there stay as they were."""
    table, keys = random_rows(50)
    before = table.state()["rows"]
    more = torch.cat([keys[:10], torch.arange(40) + 10**6])

    def fails(*_):
        raise error

    monkeypatch.setattr(table._rows, "update", fails)
    for load_rows in (
        lambda: table.load(more, torch.ones(50, 6)),
        lambda: table.load_state({"rows": {"keys": more, "rows": torch.ones(50, 6)}}),
    ):
        with pytest.raises(error):
            load_rows()
        assert same(table.state()["rows"], before) and len(table) == len(keys)
