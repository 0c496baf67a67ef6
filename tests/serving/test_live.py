"""Promise: at every published step a replica has the trainer's bits, and what is wrong is refused by name."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import replace

import pytest
import torch
from live_parts import (
    Training,
    assert_has,
    opened,
    settled,
    state_of,
    traced_once,  # noqa: F401, a fixture of this module
)

from tritonrec.serving.live import (
    CorruptDeltaError,
    Follower,
    GapError,
    OtherRunError,
    OutOfOrderError,
)
from tritonrec.serving.live.wire import digest_of, pack, unpack


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A sink with snapshots 1 and 5 and deltas 2 to 7, the state at each sequence number, and the run."""
    folder = tmp_path_factory.mktemp("live") / "sink"
    training, states = Training(), {}
    with opened(training, folder, snapshot_every=4) as publisher:
        settled(publisher)
        states[1] = state_of(training.trainer)
        for sequence in range(2, 8):
            training.run(publisher, 2)
            settled(publisher)
            states[sequence] = state_of(training.trainer)
            if sequence == 4:  # before the first snapshot is pruned
                shutil.copytree(folder, folder.with_name("first"))
            if sequence == 7:
                for number in (5, 6, 7):
                    name = f"delta-{number:012d}.00000"
                    shutil.copy(folder / name, folder.with_name("first") / name)
    training.close()
    return folder.with_name("first"), folder, states


@pytest.fixture
def copied(published, tmp_path):
    """Snapshot 1 and deltas 2 to 7, to be damaged."""
    shutil.copytree(published[0], tmp_path / "sink")
    return tmp_path / "sink", published[2]


def delta(folder, sequence):
    return folder / f"delta-{sequence:012d}.00000"


def held_back(folder, *sequences):
    """Take deltas away; the function returned puts them back."""
    kept = {delta(folder, each): delta(folder, each).read_bytes() for each in sequences}
    for path in kept:
        path.unlink()
    return lambda: [path.write_bytes(content) for path, content in kept.items()]


@pytest.mark.filterwarnings("error::FutureWarning")  # torch's own, which a user could do nothing about
def test_each_published_state_is_followed_in_every_bit(copied):
    folder, states = copied
    back = [held_back(folder, each) for each in range(7, 1, -1)]
    follower = Follower.open(folder)
    assert_has(follower.predictor, states[1])
    old = [follower.predictor]
    for sequence in range(2, 8):
        assert not follower.poll()
        back.pop()()
        assert follower.poll() and (follower.sequence, follower.step) == (sequence, 2 * (sequence - 1))
        assert_has(follower.predictor, states[sequence])
        old.append(follower.predictor)
    for sequence, predictor in enumerate(old, 1):  # who holds an old version has it whole
        assert_has(predictor, states[sequence])
    assert any(
        unpack(delta(folder, each).read_bytes(), "")[1].keys() & {"table/item/erased"} for each in range(2, 8)
    )
    assert 0 <= follower.lag_seconds() < 3600 and follower.published_at <= time.time()


def test_a_follower_begins_at_the_last_snapshot_and_older_ones_are_pruned(published):
    _, folder, states = published
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        *(f"delta-{each:012d}.00000" for each in range(2, 8)),
        *(f"snapshot-{each:012d}" for each in (1, 5)),
    ]
    assert_has(Follower.open(folder).predictor, states[7])


def test_a_snapshot_without_its_document_is_none_yet(copied):
    folder, states = copied
    (folder / f"snapshot-{9:012d}").mkdir()
    assert_has(Follower.open(folder).predictor, states[7])


@pytest.mark.if_changed
@pytest.mark.parametrize("mode", ["sequential", "nestpipe"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_replica_and_export_score_alike(tmp_path, mode, precision):
    training = Training(mode, precision)
    with opened(training, tmp_path / "sink") as publisher:
        settled(publisher)
        follower = Follower.open(tmp_path / "sink")
        training.run(publisher, 4)
        settled(publisher)
        assert follower.poll() and follower.step == 4
        full = training.exported(tmp_path / "now")
    history = [[3, 1, 4], [1, 5]]
    for got, want in zip(follower.predictor.retrieve(history, 4), full.retrieve(history, 4), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(follower.predictor.scores(history), full.scores(history))
    assert follower.predictor.manifest["tables"]["item"]["rows"] == len(full.item_ids)
    training.close()


def test_a_lost_or_late_delta_is_a_gap(copied):
    folder, states = copied
    back = held_back(folder, 4)
    with pytest.raises(GapError, match="delta 4 is missing"):
        Follower.open(folder)
    others = held_back(folder, 5, 6, 7)
    follower = Follower.open(folder)
    others()
    for _ in range(2):
        with pytest.raises(GapError, match="delta 4 is missing"):
            follower.poll()
        assert_has(follower.predictor, states[3])
    back()
    assert follower.poll() and follower.sequence == 7
    assert_has(follower.predictor, states[7])


def test_a_delta_that_fails_half_way_leaves_nothing_behind(copied):
    """Its rows were prepared; the next one has none."""
    folder, states = copied
    back, follower = held_back(folder, *range(3, 8)), Follower.open(folder)
    back()
    rewritten(folder, 3, {"dense": "0" * 64})
    with pytest.raises(CorruptDeltaError, match="other dense values"):
        follower.poll()
    header, tensors = unpack(delta(folder, 3).read_bytes(), "")
    dense = {name: each for name, each in tensors.items() if name.startswith("dense/")}
    rows = [(["item"], len(follower.predictor.tables["item"].ids))]
    after = {**follower.predictor.program.state_dict(), **{name[6:]: each for name, each in dense.items()}}
    delta(folder, 3).write_bytes(pack(replace(header, rows=rows, dense=digest_of(after)), dense))
    follower._advance()
    assert follower.sequence == 3 and follower._tables["item"].table is follower.predictor.tables["item"]
    assert torch.equal(follower.predictor.tables["item"].weights, states[2][0]["item"][1])


def test_a_digest_has_names_dtypes_shapes_and_bits():
    zeros = torch.zeros(2, 3, dtype=torch.int32)
    others = [zeros.view(3, 2), zeros.view(torch.float32), zeros + 1]
    values = [{"a": zeros}, {"b": zeros}, *({"a": each} for each in others)]
    assert len({digest_of(each) for each in values}) == len(values)


@pytest.mark.parametrize("writer", ["another", None])
def test_parts_of_two_writers_are_no_delta(copied, writer):
    folder, states = copied
    header, tensors = unpack(delta(folder, 2).read_bytes(), "")
    for part, own in enumerate((tensors, {})):
        of = replace(header, parts=2, part=part, writer=writer if part and writer else header.writer)
        (folder / f"delta-{2:012d}.{part:05d}").write_bytes(pack(of, own))
    held_back(folder, *range(3, 8))
    assert_has(Follower.open(folder).predictor, states[1 if writer else 2])


@pytest.mark.parametrize("given", [2, 6])
def test_a_repeated_or_moved_delta_is_refused(copied, given):
    folder, states = copied
    back = held_back(folder, 4, 5, 6, 7) if given == 2 else held_back(folder, 4, 5, 7)
    shutil.copy(delta(folder, given), delta(folder, 4))
    with pytest.raises(OutOfOrderError, match=f"says it is part 0 of delta {given}"):
        Follower.open(folder)
    delta(folder, 4).unlink()
    if given == 6:
        delta(folder, 6).unlink()
    follower = Follower.open(folder)
    shutil.copy(delta(folder, 2), delta(folder, 4))
    with pytest.raises(OutOfOrderError):
        follower.poll()
    assert_has(follower.predictor, states[3])
    if given == 2:
        back()
        assert follower.poll()
        assert_has(follower.predictor, states[7])


def test_a_delta_cut_or_altered_at_any_byte_is_refused(copied):
    folder, states = copied
    others = held_back(folder, 3, 4, 5, 6, 7)
    follower = Follower.open(folder)
    others()
    whole, draw = delta(folder, 3).read_bytes(), random.Random(5)
    sizes = [0, 1, 16, 17, 48, 49, 57, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(60))]
    for size in sizes:
        altered = bytearray(whole)
        altered[min(size, len(whole) - 1)] ^= 1 << draw.randrange(8)
        for content in (whole[:size], bytes(altered)):
            delta(folder, 3).write_bytes(content)
            with pytest.raises(CorruptDeltaError, match="part 0 of delta 3"):
                follower.poll()
    assert_has(follower.predictor, states[2])
    delta(folder, 3).write_bytes(whole)
    assert follower.poll()
    assert_has(follower.predictor, states[7])


def rewritten(folder, sequence, header=None, **tensors):
    """A delta with something else in it, whose checksum fits."""
    told, own = unpack(delta(folder, sequence).read_bytes(), "")
    own = {name: each for name, each in {**own, **tensors}.items() if each is not None}
    delta(folder, sequence).write_bytes(pack(replace(told, **(header or {})), own))


@pytest.mark.parametrize(
    "header, error, words",
    [
        ({"run": "other"}, OtherRunError, "of run other"),
        ({"schema": "other"}, OtherRunError, "of another model"),
        ({"before": 3}, OtherRunError, "two publishers"),
        ({"before_writer": "other"}, OtherRunError, "two publishers"),
        ({"epoch": 2}, OtherRunError, "two publishers"),
        ({"rows": [[["item"], 7]]}, CorruptDeltaError, "its trainer has 7"),
        ({"dense": "other"}, CorruptDeltaError, "other dense values"),
        ({"words": {"item": 3}}, CorruptDeltaError, "number of words"),
    ],
)
def test_what_does_not_lead_on_is_refused(copied, header, error, words):
    folder, states = copied
    others = held_back(folder, 3, 4, 5, 6, 7)
    follower = Follower.open(folder)
    others()
    whole = delta(folder, 3).read_bytes()
    rewritten(folder, 3, header)
    with pytest.raises(error, match=words):
        follower.poll()
    assert_has(follower.predictor, states[2])
    delta(folder, 3).write_bytes(whole)
    assert follower.poll()
    assert_has(follower.predictor, states[7])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", float("nan")), ("step", -5), ("step", 2.5), ("step", "6"), ("parts", True),
        ("words", {"item": -1}), ("rows", [[["item"], -3]]), ("published_at", float("nan")),
        ("published_at", -1.0),
    ],
)  # fmt: skip
def test_a_header_s_numbers_are_those_of_a_publication(published, name, value):
    told, own = unpack(delta(published[0], 3).read_bytes(), "")
    object.__setattr__(told, name, value)
    with pytest.raises(CorruptDeltaError, match="delta 3 cannot be read"):
        unpack(pack(told, own), "delta 3")


def test_a_lost_tombstone_and_foreign_values_are_refused(copied):
    folder, states = copied
    erasing = next(
        each for each in range(2, 8) if "table/item/erased" in unpack(delta(folder, each).read_bytes(), "")[1]
    )
    whole = delta(folder, erasing).read_bytes()
    name = next(each for each in unpack(whole, "")[1] if each.startswith("dense/"))
    ids = unpack(whole, "")[1]["table/item/ids"]
    for tensors in (
        {"table/item/erased": None},
        {name: None},
        {name: torch.zeros(2, dtype=torch.float32)},
        {"table/item/ids": ids[[0, *range(len(ids) - 1)]]},
        {"table/other/ids": ids},
    ):
        delta(folder, erasing).write_bytes(whole)
        rewritten(folder, erasing, **tensors)
        with pytest.raises(CorruptDeltaError, match=f"delta {erasing}"):
            Follower.open(folder)
    delta(folder, erasing).write_bytes(whole)
    assert_has(Follower.open(folder).predictor, states[7])


def test_a_snapshot_passes_over_a_damaged_delta_with_a_warning(published, tmp_path):
    _, folder, states = published
    shutil.copytree(folder, tmp_path / "sink")
    (tmp_path / "sink" / "snapshot-000000000005" / "live.json").rename(tmp_path / "live.json")
    others = held_back(tmp_path / "sink", 3, 4, 5, 6, 7)
    follower = Follower.open(tmp_path / "sink")
    assert follower.sequence == 2
    others()
    (tmp_path / "live.json").rename(tmp_path / "sink" / "snapshot-000000000005" / "live.json")
    delta(tmp_path / "sink", 3).write_bytes(b"tritonrec")
    with pytest.warns(RuntimeWarning, match="snapshot 5 is loaded instead"):
        assert follower.poll()
    assert_has(follower.predictor, states[7])


def test_a_snapshot_proves_the_deltas_before_it(published, tmp_path):
    _, folder, _ = published
    shutil.copytree(folder, tmp_path / "sink")
    shutil.move(tmp_path / "sink" / "snapshot-000000000005", tmp_path / "later")
    held_back(tmp_path / "sink", 6, 7)
    follower = Follower.open(tmp_path / "sink")
    assert follower.sequence == 5 and not follower.prove()
    shutil.move(tmp_path / "later", tmp_path / "sink" / "snapshot-000000000005")
    assert follower.prove()
    follower.predictor.tables["item"].weights[2, 1] += 1
    with pytest.raises(CorruptDeltaError, match="table item"):
        follower.prove()


@pytest.mark.parametrize("name", ["live.json", "manifest.json", "dense.pt2", "item.00000.00000.safetensors"])
def test_a_damaged_snapshot_is_refused(copied, name):
    folder, _ = copied
    path = folder / "snapshot-000000000001" / name
    if not path.exists():
        path = next(path.parent.glob("*.pt2"))  # an empty table has no shards
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptDeltaError, match="snapshot 1"):
        Follower.open(folder)
