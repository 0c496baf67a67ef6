"""Promise: a loader goes on only where its batches are those of the loader that was saved."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_splits import LOG, plain_clicks
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tritonrec.data import (
    ClickLoader,
    ClickStream,
    DynamicBatchLoader,
    DynamicStream,
    ImpressionLoader,
    ImpressionStream,
    Interactions,
    JaggedBatch,
    LogFormat,
    NextItemLoader,
    NextItemStream,
    NumberedLoader,
    Split,
)
from tritonrec.data.convert_sequences import write_sequences
from tritonrec.data.convert_windows import write_windows
from tritonrec.data.epochs import digest_of

WITH_VALIDATION = Split.leave_one_out(True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Shards of sequences, of windows and of clicks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("shards")
    for name in ("sequences", "windows", "clicks"):
        (folder / name).mkdir()
    write_sequences([LOG], folder / "sequences", rows_per_file=13, rows_per_group=4)
    write_windows([LOG], folder / "windows", 4, 3, rows_per_group=5)
    clicks = plain_clicks()
    table = pa.table({"label": clicks.labels, "age": clicks.dense[:, 0], "item": clicks.categories[:, 0],
                      "other": 1 - clicks.labels, "time": clicks.dense[:, 0]})  # fmt: skip
    pq.write_table(table, folder / "clicks" / "day.parquet", row_group_size=10)
    other = replace(LOG, item=LOG.item + 1)  # as many rows in the same groups
    for name in ("sequences", "windows"):
        (folder / f"other {name}").mkdir()
    write_sequences([other], folder / "other sequences", rows_per_file=13, rows_per_group=4)
    write_windows([other], folder / "other windows", 4, 3, rows_per_group=5)
    return folder


NAMED = LogFormat(label=("label",), dense=("age", "time"), categories=("item",))


def next_item(log=LOG, batch_size=8, max_seq_len=5, negatives=2, seed=1, **changes):
    return NextItemLoader(log, batch_size, max_seq_len, negatives, seed, **changes)


def impressions(log=LOG, batch_size=8, max_history=4, max_exposed=3, seed=1, **changes):
    return ImpressionLoader(log, batch_size, max_history, max_exposed, seed, **changes)


def clicks(log=None, batch_size=8, seed=1, **changes):
    return ClickLoader(log or plain_clicks(), batch_size, seed, **changes)


def one_item_changed() -> Interactions:
    item = LOG.item.copy()
    item[5] += 1
    return replace(LOG, item=item)


def cases(folders):
    """By loader: the one that was saved, one of other ranks or layout, and changed ones by what is named."""
    sequences, windows, day = (folders / name for name in ("sequences", "windows", "clicks"))

    def stream(batch_size=8, max_seq_len=5, negatives=2, seed=1, folder=sequences, **changes):
        return NextItemStream(folder, batch_size, max_seq_len, negatives, seed, **changes)

    fewer = plain_clicks(102)
    return {
        "next item": (
            next_item(),
            [next_item(rank=1, world_size=3), next_item(balance=True)],
            {
                "batch_size": next_item(batch_size=9),
                "seed": next_item(seed=2),
                "max_seq_len": next_item(max_seq_len=6),
                "num_negatives": next_item(negatives=1),
                "split": next_item(split=WITH_VALIDATION),
                "data": next_item(one_item_changed()),
            },
        ),
        "impressions": (
            impressions(),
            [impressions(rank=1, world_size=3)],
            {
                "batch_size": impressions(batch_size=9),
                "seed": impressions(seed=2),
                "max_history": impressions(max_history=5),
                "max_exposed": impressions(max_exposed=2),
                "split": impressions(split=WITH_VALIDATION),
                "tasks": impressions(label_threshold=2),
                "data": impressions(one_item_changed()),
            },
        ),
        "clicks": (
            clicks(),
            [clicks(rank=1, world_size=3)],
            {
                "batch_size": clicks(batch_size=9),
                "seed": clicks(seed=2),
                "data": clicks(fewer),
                "kind": next_item(),
                "rows": clicks(rows=(3, 92)),
            },
        ),
        "dynamic": (
            DynamicBatchLoader(next_item(), 30),
            [],
            {
                "target_tokens": DynamicBatchLoader(next_item(), 31),
                "chunk_samples": DynamicBatchLoader(next_item(), 30, chunk_samples=4),
                "world_size": DynamicBatchLoader(next_item(world_size=2), 30),
                "seed": DynamicBatchLoader(next_item(seed=2), 30),
            },
        ),
        "stream": (
            stream(),
            [stream(rank=1, world_size=4)],
            {
                "batch_size": stream(batch_size=9),
                "seed": stream(seed=2),
                "max_seq_len": stream(max_seq_len=6),
                "num_negatives": stream(negatives=1),
                "split": stream(split=WITH_VALIDATION),
                "catalogue": stream(catalogue=torch.arange(10_000, 10_500)),
                "readers": stream(readers=32),
                "buffer_rows": stream(buffer_rows=1 << 10),
                "shuffle": stream(shuffle=False),
                "values": stream(folder=folders / "other sequences"),
            },
        ),
        "dynamic stream": (
            DynamicStream(stream(), 30),
            [],
            {
                "target_tokens": DynamicStream(stream(), 31),
                "world_size": DynamicStream(stream(world_size=2), 30),
                "seed": DynamicStream(stream(seed=2), 30),
            },
        ),
        "windows": (
            ImpressionStream(windows, 8, seed=1),
            [ImpressionStream(windows, 8, seed=1, rank=1, world_size=2)],
            {
                "batch_size": ImpressionStream(windows, 9, seed=1),
                "seed": ImpressionStream(windows, 8, seed=2),
                "kind": stream(),
                "values": ImpressionStream(folders / "other windows", 8, seed=1),
            },
        ),
        "stream of clicks": (
            ClickStream(day, 8, seed=1, columns=NAMED),
            [ClickStream(day, 8, seed=1, rank=1, world_size=2, columns=NAMED)],
            {
                "batch_size": ClickStream(day, 9, seed=1, columns=NAMED),
                "samples": ClickStream(day, 8, seed=1, split=WITH_VALIDATION, columns=NAMED),
                "label": ClickStream(day, 8, seed=1, columns=replace(NAMED, label=("other",))),
                "dense": ClickStream(day, 8, seed=1, columns=replace(NAMED, dense=("time", "age"))),
                "format": ClickStream(day, 8, seed=1, columns=replace(NAMED, log_counts=True)),
            },
        ),
    }


LOADERS = [
    "next item", "impressions", "clicks", "dynamic",
    "stream", "dynamic stream", "windows", "stream of clicks",
]  # fmt: skip


@pytest.mark.parametrize("loader", LOADERS)
def test_what_its_place_depends_on_is_compared(loader, folders):
    saved, same, others = cases(folders)[loader]
    state = json.loads(json.dumps(saved.state_dict()))
    for each in [saved, *same]:
        each.load_state_dict(state)
    for name, other in others.items():
        with pytest.raises(ValueError, match=rf"the position is one of a \w+ with .*{name} "):
            other.load_state_dict(state)


def test_a_message_names_every_difference_and_both_values():
    state = next_item().state_dict()
    with pytest.raises(ValueError, match="with batch_size 8, seed 1, and this one has 9, 5: use the same"):
        next_item(batch_size=9, seed=5).load_state_dict(state)
    with pytest.raises(
        ValueError, match="with split leave-one-out, and this one has leave-one-out:validation: use"
    ):
        next_item(split=WITH_VALIDATION).load_state_dict(state)


def test_a_digest_tells_values_types_shapes_and_columns_apart():
    zeros = torch.zeros(2, 2, dtype=torch.int64)
    halves = torch.zeros(4, 2, dtype=torch.int32)
    columns = [(zeros,), (zeros.flatten(),), (halves,), (zeros[:1], zeros[1:]), (zeros + 1,)]
    assert len({digest_of(*each) for each in columns}) == len(columns)
    assert digest_of(zeros) == digest_of(zeros.numpy()[::-1])


def test_an_earlier_version_saved_less():
    stream = next_item()
    state = {name: value for name, value in stream.state_dict().items() if name != "split"}
    next_item(split=Split()).load_state_dict(state)


def collate(rows: list[int]) -> JaggedBatch:
    ids = torch.tensor(rows)
    offsets = torch.arange(len(ids) + 1)
    return JaggedBatch.from_sequences(0, ids, offsets, ids, ids, ids, ids[:, None])


def numbered(samples=40, batch_size=4, ranks=2, seed=0, shuffle=True, drop_last=False) -> NumberedLoader:
    rows = np.arange(samples).tolist()
    sampler = DistributedSampler(rows, ranks, 0, shuffle=shuffle, seed=seed)
    return NumberedLoader(
        DataLoader(rows, batch_size, sampler=sampler, collate_fn=collate, drop_last=drop_last)
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"samples": 44}, "samples 40, and this one has 44"),
        ({"batch_size": 5}, "batch_size 4, and this one has 5"),
        ({"ranks": 4}, "num_replicas 2, and this one has 4"),
        ({"seed": 1}, "seed 0, and this one has 1"),
        ({"shuffle": False}, "shuffle True, and this one has False"),
        ({"drop_last": True}, "drop_last False, and this one has True"),
    ],
)
def test_a_data_loader_tells_what_it_can(change, name):
    loader = numbered()
    for _ in range(3):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    numbered().load_state_dict(state)
    other = numbered(**change)
    with pytest.raises(ValueError, match=name):
        other.load_state_dict(state)
    assert other.step == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"shuffle": True},
        {"shuffle": True, "generator": torch.Generator()},
        {"sampler": SubsetRandomSampler(range(9))},
        {"sampler": WeightedRandomSampler([1.0] * 9, 9)},
        {"batch_sampler": BatchSampler(RandomSampler(range(9)), 4, False)},
    ],
)
def test_an_order_that_nobody_can_draw_again_has_no_position(settings):
    loader = NumberedLoader(DataLoader(range(9), collate_fn=collate, **settings))
    next(loader)
    with pytest.raises(ValueError, match=r"a \w+Sampler .*sampler=DistributedSampler"):
        loader.state_dict()


def test_any_iterable_of_batches_goes_on():
    loader = NumberedLoader([collate([1]), collate([2])])
    next(loader)
    state = loader.state_dict()
    other = NumberedLoader([collate([1]), collate([2])])
    other.load_state_dict(state)
    assert next(other).sample_ids.tolist() == [2]
