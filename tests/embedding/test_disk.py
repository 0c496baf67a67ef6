"""Promise: rows on disk are as they were written, within their memory; what fails is named and loses none."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trainer_parts import DIM, batches, parts, same, state, trainer

from tritonrec import checkpoint
from tritonrec.checkpoint import slices
from tritonrec.embedding import (
    DynamicTable,
    Eviction,
    FeatureConfig,
    HashTableCollection,
    Placement,
    PrecisionTiers,
    RowOptimizer,
    TablePolicy,
    numba_disk,
    row_file,
    snapshot,
)
from tritonrec.embedding.cached_storage import PLACE_BYTES, HostCachedStorage, HostStorage
from tritonrec.embedding.numba_disk import MOST_USES, choose
from tritonrec.embedding.row_file import RowFile
from tritonrec.embedding.snapshot import SnapshotRows
from tritonrec.pipeline import StageFailedError

WIDTH, PLACES = 6, 10


def on_disk(path, places=PLACES):
    return Placement("disk", path=str(path), memory=str(places * (4 * WIDTH + PLACE_BYTES)))


def stepped(table, steps, first=0):
    """Rows after steps of 4 keys of 40, each of which changes them."""
    for step in range(first, first + steps):
        keys = torch.randperm(40, generator=torch.Generator().manual_seed(step))[:4] * 7 - 100
        found = table.lookup(keys, step)
        rows = table.gather(found.handles, keys)
        table.update(found.handles, rows * 0.5 + torch.arange(WIDTH) + step)
    return table


def storage_on_disk(width, path, places):
    """Rows in a file, so many of them in memory; and the file."""
    file = RowFile(str(path), 4 * width)
    return HostCachedStorage(HostStorage(file, torch.device("cpu")), places), file


def broken(table, file):
    """The table's file is another one from here on; returns the file that it was."""
    own = table._rows._file
    before, own._file = own._file, file
    return before


def test_memory_holds_as_many_rows_as_fit_and_files_have_no_names(tmp_path):
    table = stepped(DynamicTable(WIDTH, placement=on_disk(tmp_path)), 60)
    memory = table.memory()
    assert memory["fp32_values"] == PLACES * 4 * WIDTH and len(table) == 40
    assert memory["disk"] >= 40 * 4 * WIDTH and os.listdir(tmp_path) == []
    counters = table.counters
    assert counters.disk_read and counters.disk_written and counters.found > counters.cached - 40 > 0
    assert same(table.export(), stepped(DynamicTable(WIDTH), 60).export())


def test_keys_beyond_their_memory_are_in_a_file_that_is_named_where_it_fails(tmp_path, monkeypatch):
    placement = replace(on_disk(tmp_path), index_memory="20KiB")
    table = stepped(DynamicTable(WIDTH, placement=placement), 60)
    assert table.memory()["key_structure"] == 12 << 10 and os.listdir(tmp_path) == []
    table, expected = (DynamicTable(WIDTH, placement=each) for each in (placement, Placement("host")))
    for each in (table, expected):
        each.load(torch.arange(1000), torch.rand(1000, WIDTH, generator=torch.Generator().manual_seed(1)))
    rows = table.memory()
    assert rows["key_structure"] == 0 and rows["disk"] >= 2048 * 16 + 1000 * 4 * WIDTH
    assert same(stepped(table, 60).export(), stepped(expected, 60).export())
    os.ftruncate(table._rows._index._now._file._file.fileno(), 0)
    with pytest.raises(OSError, match=r"file of keys in .* cannot be read: the file ends before it"):
        table.find(torch.arange(9))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"file of keys in .* cannot grow to .*: No space left on device"):
        DynamicTable(WIDTH, placement=replace(placement, index_memory="0"))


def cached(path, rows, places):
    """A placement of so many rows on the device, and in memory."""
    return replace(on_disk(path, places), storage="cached", cache_rows=rows)


def test_behind_a_cache_rows_that_are_erased_and_rounded_are_those_of_memory(tmp_path):
    policy, found = TablePolicy(precision=PrecisionTiers(2, 3)), []
    for placement in (Placement("host"), cached(tmp_path, 3, 9)):
        table, draw, low = DynamicTable(4, WIDTH, policy=policy, placement=placement), torch.Generator(), []
        draw.manual_seed(8)
        for number in range(60):
            keys = torch.randperm(30, generator=draw)[:5] * 7 - 100
            looked = table.lookup(keys, number)
            rows = table.gather(looked.handles, keys) * 0.5 + number % 4
            table.round_low_precision(rows, looked.low_precision)
            table.update(looked.handles, rows, looked.low_precision)
            if number % 3 == 0:
                table.erase(table.keys()[torch.randperm(len(table), generator=draw)[:3]])
            keys = table.keys()
            low.append(table._rows.in_low_precision(table.find(keys)))
        found.append([*table.export(), *low])
    assert same(*found) and any(each.any() and not each.all() for each in low)


def test_behind_a_cache_rows_of_recent_lookups_are_in_memory(tmp_path):
    table = stepped(DynamicTable(WIDTH, placement=cached(tmp_path, 2, 16)), 60)
    for number in range(30):
        if number == 10:
            before = table.counters.disk_read
        keys = torch.arange(4) + 4 * (number % 3)
        table.gather(table.lookup(keys * 7 - 100, 60 + number).handles, keys)
    assert table.counters.disk_read == before > 0
    memory = table.memory()
    assert memory["fp32_values"] == (2 + 16) * 4 * WIDTH and memory["disk"] >= 40 * 4 * WIDTH


@pytest.mark.if_changed
def test_nothing_is_left_in_the_directory_by_a_process_that_was_killed(tmp_path):
    code = (
        "import os, signal; from tritonrec.embedding import DynamicTable, Placement\n"
        f"t = DynamicTable(4, placement=Placement('disk', path={str(tmp_path)!r}))\n"
        "t._rows._storage.grow(1 << 16); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code])
    assert ended.returncode == -signal.SIGKILL and os.listdir(tmp_path) == []


def test_rows_that_were_not_updated_are_not_written_again(tmp_path):
    table = stepped(DynamicTable(WIDTH, placement=on_disk(tmp_path)), 60)
    for first in range(0, 40, 4):  # the last rows of these updates leave
        table.lookup(torch.arange(first, first + 4) * 7 - 100, 60 + first)
    written = table.counters.disk_written
    for first in range(0, 40, 4):
        table.lookup(torch.arange(first, first + 4) * 7 - 100, 100 + first)
    assert table.counters.disk_written == written and table.counters.disk_read > 100


def test_rows_lie_beyond_four_gibibytes(tmp_path):
    """In a file with holes, whose rows are in places that a number of 32 bits does not reach."""
    row_bytes = 4 << 10
    file = RowFile(str(tmp_path), row_bytes)
    rows = torch.tensor(
        [3, 2**32 // row_bytes + 3, 2**33 // row_bytes + 3, 2**33 // row_bytes + 4, 2**21 + 7]
    )
    values = torch.randn(5, row_bytes // 4, dtype=torch.float32)
    file.write(rows, values, torch.arange(5))
    order = torch.tensor([4, 2, 3, 0, 1])
    got = torch.zeros_like(values)
    file.read(rows[order], got, order)
    assert torch.equal(got, values)
    assert os.fstat(file._file.fileno()).st_size > 2**33 and os.fstat(file._file.fileno()).st_blocks < 2**12


def test_a_storage_reaches_them_too(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda file, start, size: os.ftruncate(file, start + size))
    storage, file = storage_on_disk(512, tmp_path, 3)
    handles = torch.tensor([5, 2**21 + 5, 2**22 + 5, 2**22 + 6])
    storage.add(handles, 2**22 + 7)
    values = torch.randn(4, 512, dtype=torch.float32)
    storage.update(handles, values)  # of the first ones in memory, of the others in the file
    assert (file.read_rows, file.written_rows) == (0, 1)
    assert torch.equal(storage.gather(handles.flip(0)), values.flip(0))


def test_a_full_disk_is_named_and_loses_no_row(tmp_path):
    table = stepped(DynamicTable(WIDTH, placement=on_disk(tmp_path)), 60)
    expected = table.export()
    before = broken(table, open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
    message = r"in '.*' has a row at byte .* written: No space left on device; free space"
    with pytest.raises(OSError, match=message) as full:
        for first in range(0, 40, 4):
            table.lookup(torch.arange(first, first + 4) * 7 - 100, 60 + first)
    assert full.value.errno == errno.ENOSPC
    broken(table, before)
    assert same(table.export(), expected)


def test_a_table_that_cannot_grow_has_no_new_row(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    table = stepped(DynamicTable(WIDTH, placement=on_disk(tmp_path)), 60)
    expected = table.export()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"cannot grow to .* bytes: No space left"):
        table.lookup(torch.arange(10_000) + 1000, 60)
    assert same(table.export(), expected)


def test_a_row_that_moves_in_pieces_is_whole(tmp_path, monkeypatch):
    file, values, found = RowFile(str(tmp_path), 24), torch.randn(5, 6), torch.zeros(5, 6)
    file.grow(5)
    monkeypatch.setattr(numba_disk, "move", lambda *given: given[-1])  # leaves every row to a call of its own
    for name in ("pwritev", "preadv"):
        own = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, parts, at, own=own: own(fd, [parts[0][:7]], at))
    rows, places = torch.tensor([3, 0, 4, 1, 2]), torch.arange(5)
    file.write(rows, values, places)
    file.read(rows, found, places)
    assert torch.equal(found, values)


@pytest.mark.parametrize(("seconds", "told"), [(1.1, 1), (0.9, 0)])
def test_a_slow_disk_is_named_once(tmp_path, monkeypatch, seconds, told):
    file, now = RowFile(str(tmp_path), 24), iter(range(9))
    file.grow(5)
    monkeypatch.setattr(row_file, "time", SimpleNamespace(monotonic=lambda: seconds * next(now)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (0, 5):  # the clock of no rows is that of a busy machine
            for move in (file.write, file.read):
                move(torch.arange(rows), torch.zeros(5, 6), torch.arange(rows))
    heard = [str(each.message) for each in said if "slow, or busy" in str(each.message)]
    assert len(heard) == told and all("5 rows of a table took 1.1 s to be written" in each for each in heard)


def test_what_moves_rows_is_compiled_before_a_disk_is_timed(tmp_path, monkeypatch):
    kinds = {"move": [], "announce": []}
    for name, found in kinds.items():
        own = getattr(numba_disk, name)
        monkeypatch.setattr(
            numba_disk, name,
            lambda *given, own=own, found=found: found.append([*map(type, given)]) or own(*given),
        )  # fmt: skip
    file = RowFile(str(tmp_path), 24)
    file.grow(5)
    file.write(torch.arange(5), torch.zeros(5, 6), torch.arange(5))
    assert all(len(found) == 2 and found[0] == found[1] for found in kinds.values())


def test_many_rows_may_take_longer(tmp_path, monkeypatch):
    file, now = RowFile(str(tmp_path), 4), iter(range(9))
    monkeypatch.setattr(row_file, "time", SimpleNamespace(monotonic=lambda: 2.0 * next(now)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file.write(torch.arange(2000), torch.zeros(2000, 1), torch.arange(2000))
        with pytest.raises(RuntimeWarning, match="1,999 rows"):
            file.read(torch.arange(1999), torch.zeros(1999, 1), torch.arange(1999))


def test_a_file_that_ends_early_is_named(tmp_path):
    table = stepped(DynamicTable(WIDTH, placement=on_disk(tmp_path)), 60)
    os.ftruncate(table._rows._file._file.fileno(), 4 * WIDTH * 20 + 2)
    with pytest.raises(OSError, match="cannot be read: the file ends before it; check that disk"):
        table.export()


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "made: No such file .*; make the directory first"), ("file", "Not a directory; name a")],
)
def test_a_directory_that_takes_no_file_is_named(tmp_path, name, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=message):
        DynamicTable(WIDTH, placement=on_disk(tmp_path / name))


def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refused(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(
        OSError, match="Read-only file system; name a directory on a disk that can be written"
    ):
        DynamicTable(WIDTH, placement=on_disk(tmp_path))


def test_a_directory_of_another_user_is_named(tmp_path):
    """Of root a process gives its rights up; any other user may not write to a folder of its own."""
    DynamicTable(WIDTH, placement=on_disk(tmp_path))  # compiles, for which another user finds no folder
    with tempfile.TemporaryDirectory() as path:  # others may not enter the folders above `tmp_path`
        os.chmod(path, 0o555)
        message, end = os.pipe()
        if not (child := os.fork()):
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                for each in (tempfile.gettempdir(), path):  # one that takes files first
                    DynamicTable(WIDTH, placement=on_disk(each))
            except OSError as error:
                os.write(end, str(error).encode())
            finally:
                os._exit(0)
        os.close(end)
        with os.fdopen(message) as said:
            told = said.read()
        os.waitpid(child, 0)
    assert f"file of rows in {path!r} cannot be made: Permission denied; name a directory that this" in told


def test_training_stops_at_a_full_disk_and_goes_on_from_the_last_checkpoint_elsewhere(tmp_path):
    placement = Placement("disk", path=str(tmp_path), memory="700")
    expected = parts()
    with trainer(expected, "nestpipe") as training:
        list(training.run(batches()))
    made = parts(placement=placement)
    with trainer(made, "nestpipe") as training:
        list(training.run(batches()[:3]))
        training.save(tmp_path / "saved")
        broken(made[1].groups[0].table, open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
        with pytest.raises(StageFailedError, match="No space left on device; free space there"):
            list(training.run(batches()[3:]))
    assert checkpoint.steps(tmp_path / "saved")
    made = parts(placement=placement)
    with trainer(made, "nestpipe") as training:
        training.load(tmp_path / "saved")
        list(training.run(batches()[3:]))
    assert same(state(made), state(expected))


def test_the_hand_passes_over_a_row_for_each_use_and_over_the_last_lookups():
    recent, uses = np.array([8, 9, 6, 7, 3], np.int32), np.array([0, 2, 1, 0, 0], np.uint8)
    chosen = np.empty(9, np.int64)
    count, hand = choose(recent, uses, 1, 9, chosen[:1])
    assert (count, chosen[0], hand) == (1, 3, 4) and uses.tolist() == [0, 2, 0, 0, 0]
    count, hand = choose(recent, uses, hand, 9, chosen)  # all but place 1, each once
    assert chosen[:count].tolist() == [4, 0, 2] and recent.tolist() == [9, 9, 9, 9, 9]
    recent, uses = np.zeros(3, np.int32), np.full(3, MOST_USES, np.uint8)
    assert choose(recent, uses, 0, 1, chosen[:3])[0] == 3  # however often they were used


def test_a_load_of_more_rows_than_memory_looks_for_places_until_there_are_none(tmp_path, monkeypatch):
    """Lookups find places again from the second one on: those of the last two are spared."""
    table, asked = DynamicTable(WIDTH, placement=on_disk(tmp_path)), []

    def counted(recent, uses, hand, before, chosen):
        count, hand = choose(recent, uses, hand, before, chosen)
        asked.append((len(chosen), count))
        return count, hand

    monkeypatch.setattr(numba_disk, "choose", counted)
    rows = torch.rand(40 * PLACES, WIDTH)
    for ids in torch.arange(len(rows)).split(PLACES // 2):
        table.load(ids, rows[ids])
    assert sum(size > count for size, count in asked) == 1 and sum(count for _, count in asked) == PLACES
    asked.clear()
    assert torch.equal(table.export()[1], rows)
    last = torch.arange(len(rows) - 3, len(rows))
    for step in range(3):
        table.lookup(last - 3 * step, step)
    assert [count for _, count in asked] == [0, 3, 3]
    assert torch.equal(table.export()[1], rows)


def test_the_place_of_a_row_that_is_gone_is_given_away_without_a_write(tmp_path):
    (storage, file), handles = storage_on_disk(WIDTH, tmp_path, 13), torch.arange(9)
    storage.add(handles, 9)
    storage.update(handles, torch.randn(9, WIDTH, dtype=torch.float32))
    storage.release(handles)
    storage.prefetch(handles[:0])
    storage.add(handles, 9)
    assert file.written_rows == 0


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO])
def test_a_save_goes_on_without_a_copy_of_rows_where_the_disk_is_full_alone(tmp_path, monkeypatch, number):
    file = RowFile(str(tmp_path), 4 * WIDTH)
    monkeypatch.setattr(row_file, "SPOOLED", 0)

    def grow(file, rows):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(RowFile, "grow", grow)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            file.spool(9)
    else:
        with pytest.warns(RuntimeWarning, match="has no space for a copy of 216 bytes"):
            assert file.spool(9) is None


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("storage", "space"), [("disk", "enough"), ("disk", "none for a copy"), ("cached", "enough")]
)
def test_a_save_that_copies_rows_in_the_order_of_the_file_writes_the_same_files(
    tmp_path, monkeypatch, storage, space
):
    """Of merged tables with evicted rows, while rows are updated and erased."""
    monkeypatch.setattr(row_file, "SPOOLED", 0)
    monkeypatch.setattr(snapshot, "COPIED", 5 * 4 * 2 * DIM)  # five rows
    monkeypatch.setattr(snapshot, "SORTED", 11)
    monkeypatch.setattr(slices, "PART_BYTES", 64)
    copies, grow = [], RowFile.grow

    def grown(file, rows):
        if file.nbytes == 0 and file is not own:
            copies.append(rows)
            if space != "enough":
                raise OSError(errno.ENOSPC, "no space")
        grow(file, rows)

    digests = []
    on_disk = {"path": str(tmp_path), "memory": "1KiB"}
    for placement in (Placement("host"), Placement(storage, cache_rows=9, **on_disk)):
        features = [
            FeatureConfig(name, DIM, policy=TablePolicy(Eviction("lru", capacity=60, every=2)))
            for name in ("a", "b")
        ]
        tables = HashTableCollection(features, RowOptimizer("adagrad", lr=0.5), placement=placement)
        group, draw = tables.groups[0], torch.Generator().manual_seed(3)
        table = group.table
        own = table._rows._file

        def step(number, group=group, table=table, draw=draw):
            keys = group.layout.pack(number % 2, torch.randint(0, 500, (40,), generator=draw).unique(), "a")
            found = table.lookup(keys, number)
            table.update(found.handles, table.gather(found.handles, keys) + torch.rand(1, generator=draw))

        for number in range(12):
            step(number)
        taken = tables.snapshot()
        for number in range(12, 15):
            step(number)
        if placement.path:
            monkeypatch.setattr(RowFile, "grow", grown)
        folder = tmp_path / placement.storage
        asked = []
        arrange, later = SnapshotRows.arrange, iter(range(15, 99))

        def while_training(rows, sort, step=step, arrange=arrange, later=later, asked=asked):
            step(next(later))
            asked.append([])
            arrange(rows, sort)
            asked.append([])
            step(next(later))

        read = RowFile.read

        def noted(file, rows, memory, places, own=own, asked=asked, read=read):
            if file is own and asked:
                asked[-1] += rows.tolist()
            read(file, rows, memory, places)

        monkeypatch.setattr(RowFile, "read", noted)
        monkeypatch.setattr(SnapshotRows, "arrange", while_training)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            checkpoint.save(folder, 0, {}, taken, {})
        monkeypatch.setattr(SnapshotRows, "arrange", arrange)
        monkeypatch.setattr(RowFile, "read", read)
        digests.append({each.name for each in folder.rglob("*.safetensors")})
    assert digests[0] == digests[1] and len(digests[0]) > 9
    assert len(copies) == 2 and min(copies) > 20
    if space == "enough":  # each row of a table is read once, in the order of the file
        assert all(each == sorted(set(each)) and len(each) > 20 for each in asked[::2])
    said = [each for each in warned if "no space for a copy" in str(each.message)]
    assert len(said) == 2 * (space != "enough")


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", None])
def test_a_directory_in_memory_is_warned_of(tmp_path, monkeypatch, kind):
    """By the kind of the file system whose number the file has."""
    found, mounts = os.stat(tmp_path).st_dev, tmp_path / "mountinfo"
    number = f"{os.major(found)}:{os.minor(found)}"
    line = "36 35 {} / {} rw,noatime shared:1 master:2 - {} none rw,size=64k"
    if kind:
        other = "ext4" if kind == "tmpfs" else "tmpfs"
        mounts.write_text("\n".join((line.format("0:1", "/a", other), line.format(number, "/b", kind))))
    own = row_file.in_memory
    monkeypatch.setattr(row_file, "in_memory", lambda file: own(file, mounts))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        RowFile(str(tmp_path), 24)
    assert sum("in memory (tmpfs)" in str(each.message) for each in warned) == (kind == "tmpfs")


def test_a_table_stays_where_it_is_when_the_program_changes_its_folder(tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    monkeypatch.chdir(tmp_path)
    placement = Placement("disk", path="rows", memory="2000", index_memory="1KiB")
    table = DynamicTable(WIDTH, placement=placement)
    monkeypatch.chdir("/")
    for step in range(40):  # the file of keys is made again as they grow
        table.lookup(torch.arange(2000) + 2000 * step, step)
    assert len(table) == 80_000


def test_a_path_is_one_as_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~", f"file://{tmp_path}"):
        table = DynamicTable(WIDTH, placement=Placement("disk", path=path, memory="2000"))
        assert table._rows._file.path == str(tmp_path)


@pytest.mark.filterwarnings("error")
def test_limits_of_files_are_named_and_none_is_left_open(tmp_path, monkeypatch):
    for number, advice in [(errno.EMFILE, r"ulimit -n"), (errno.EFBIG, r"ulimit -f")]:
        with monkeypatch.context() as patch:
            error = OSError(number, os.strerror(number))
            patch.setattr(row_file, "in_memory", lambda _file, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(OSError, match=rf"cannot be made: .*{advice}"):
                RowFile(str(tmp_path), 24)
    made = RowFile(str(tmp_path), 24)
    descriptor = made._file.fileno()
    del made
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_forked_process_does_not_write_the_rows_of_its_parent(tmp_path):
    table = stepped(DynamicTable(WIDTH, placement=on_disk(tmp_path)), 60)
    read, write = os.pipe()
    child = os.fork()
    if not child:  # its lookups would write the rows that they find in memory, as old as they are by then
        try:
            stepped(table, 20, first=60)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    told = os.read(read, 10_000).decode()
    os.close(read)
    assert (
        f"is that of process {os.getpid()}, from which this one was forked" in told and str(tmp_path) in told
    )
    stepped(table, 20, first=60)
    assert same(table.export(), stepped(DynamicTable(WIDTH), 80).export())
