"""Promise: where tables are changes no bit, however small caches and chunks; what cannot run is named."""

from itertools import chain, product
from tempfile import gettempdir

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speeds import examples, slow_except
from trainer_parts import optimizer_of, same, state

from tritonrec import checkpoint, nn
from tritonrec.checkpoint import flatten, unflatten
from tritonrec.data import Batch, KeyedJaggedTensor
from tritonrec.data.jagged import Lookup, offsets_of
from tritonrec.distributed import Communicators
from tritonrec.embedding import (
    DynamicTable,
    Eviction,
    FeatureConfig,
    HashTableCollection,
    Placement,
    PrecisionTiers,
    RowOptimizer,
    TablePolicy,
)
from tritonrec.pipeline import DenseModel, StageFailedError, Trainer, WindowConfig
from tritonrec.settings import with_values

PLACES = {
    "host": Placement(),
    "device": Placement("device"),
    "cached": Placement("cached", cache_rows=6),
    "one_row_cached": Placement("cached", cache_rows=1),
    "disk": Placement("disk", path=gettempdir(), memory="600"),
    "one_row_on_disk": Placement("disk", path=gettempdir(), memory="100"),
    "cached_on_disk": Placement("cached", cache_rows=6, path=gettempdir(), memory="600"),
    "one_row_cached_and_one_on_disk": Placement("cached", cache_rows=1, path=gettempdir(), memory="100"),
}
STORED = "host", "device", "cached", "one_row_on_disk", "disk", "cached_on_disk"
# Each is followed by each once, itself among them: a de Bruijn sequence, of words i and ij with i < j.
EVERY_PAIR = [
    place for i, first in enumerate(STORED) for place in (first, *chain(*product([first], STORED[i + 1 :])))
]
POLICIES = {
    "none": TablePolicy(),
    "all": TablePolicy(Eviction("lru", capacity=4, every=2), 2, PrecisionTiers(2, 3), admission_window=3),
    "size": TablePolicy(Eviction("lru", capacity=6, every=3), precision=PrecisionTiers("256", every=2)),
}
EXTREMES = [-(2**63), -(2**63) + 1, -1, 0, 2**63 - 2, 2**63 - 1]
MODES = ("sequential", "fwp", "dbp", "nestpipe")


class Clicks(torch.nn.Module):
    """A loss per sample from a sum of bags, a mean of bags and rows of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.mix = nn.Linear(6, 6)

    def forward(self, batch, rows, seed):
        lookup = batch.features["word"]
        samples = torch.arange(batch.num_samples + 1)
        both = self.mix(rows["item"] + rows["genre"], samples)
        word = nn.sum_by_sample(rows["word"].sum(1), lookup.offsets)
        return torch.tanh(both.sum(1)) + torch.tanh(word) + rows["user"].sum(1)


def parts(item="host", genre="host", word="host", policy="none", chunk_rows=1):
    rule, policy = RowOptimizer("adam", lr=0.05), POLICIES[policy]
    model = Clicks()
    features = [
        FeatureConfig("item", 6, pooling="sum", policy=policy, placement=PLACES[item]),
        FeatureConfig("genre", 6, pooling="mean", policy=policy, placement=PLACES[genre]),
        FeatureConfig("user", 4, pooling="sum", policy=policy, placement=PLACES[word]),
        FeatureConfig("word", 4, policy=policy, placement=PLACES[word], merge=False),
    ]
    tables = HashTableCollection(features, rule, seed=2, slots=8, chunk_rows=chunk_rows)
    return model, tables, optimizer_of(model, rule.name, rule.lr)


def batch(step, kind="mixed", size=5):
    random = torch.Generator().manual_seed(step)
    size = {"empty": 0, "one": 1}.get(kind, size)

    def lookup(ids):
        lengths = torch.randint(0, 4, (size,), generator=random)
        chosen = torch.randint(0, len(ids), (int(lengths.sum()),), generator=random)
        if kind == "equal":
            chosen.zero_()
        return Lookup(torch.tensor(ids)[chosen], offsets_of(lengths))

    ids = list(range(9))
    features = {"item": ids, "genre": ids, "user": ids, "word": EXTREMES}
    lookups = {name: lookup(each) for name, each in features.items()}
    return Batch(step, torch.arange(size) + 100 * step, KeyedJaggedTensor.from_dict(lookups))


def trained(made, mode, batches, **window):
    config = with_values(WindowConfig(seed=4), window)
    with Trainer(*made, Communicators.local(), mode, config) as training:
        return [result.losses for result in training.run(batches)]


@settings(max_examples=examples(12))
@given(st.data())
def test_a_model_of_tables_here_and_there_has_the_bits_of_the_reference(data):
    draw = data.draw
    names = st.sampled_from(sorted(PLACES))
    policy, mode = draw(st.sampled_from(sorted(POLICIES))), draw(st.sampled_from(MODES))
    kinds = draw(st.lists(st.sampled_from(["mixed", "empty", "one", "equal"]), min_size=1, max_size=9))
    window = {"micro_batches": draw(st.integers(1, 4)), "accumulate": draw(st.integers(1, 3))}
    window["dedup"] = draw(st.sampled_from(["both", "exchange", "lookup", "none"]))
    if window["dedup"] in ("both", "exchange"):
        window["first_use"] = draw(st.booleans())
    if mode in ("dbp", "nestpipe"):
        window["depth"] = draw(st.sampled_from([0, 2, 5]))
        window["skip_fetch"] = window["dedup"] in ("both", "lookup") and draw(st.booleans())
    batches = [batch(step, kind) for step, kind in enumerate(kinds)]
    expected = parts(policy=policy)
    losses = trained(expected, "reference", batches, accumulate=window["accumulate"])
    assert len(losses) == len(batches)  # what is left of an update is one too
    made = parts(draw(names), draw(names), draw(names), policy, draw(st.sampled_from([1, 32])))
    assert same(trained(made, mode, batches, **window), losses)
    assert same(state(made), state(expected))


@pytest.mark.parametrize(
    ("place", "skip_fetch"),
    slow_except(
        [("device", True), ("one_row_cached", False), ("one_row_on_disk", True), ("cached_on_disk", False)],
        product([*STORED[1:], "one_row_cached", "one_row_cached_and_one_on_disk"], [False, True]),
    ),
)
def test_rows_loaded_and_erased_between_runs_are_seen_by_the_next(place, skip_fetch):
    def run(made, mode, **window):
        config = with_values(WindowConfig(seed=4), window)
        with Trainer(*made, Communicators.local(), mode, config) as training:
            for first in (0, 4, 8):
                list(training.run(batch(step) for step in range(first, first + 4)))
                for name in ("item", "word"):
                    ids, rows = made[1].export()[name]
                    made[1].load(name, ids[:2], rows[1:3])
                    table, member = made[1]._group(name)
                    table.table.erase(table.layout.pack(member, ids[3:4], name))
        return state(made)

    expected = run(parts(policy="all"), "reference")
    made = parts(place, place, place, "all")
    assert same(run(made, "nestpipe", micro_batches=2, skip_fetch=skip_fetch), expected)


def by_key(tables):
    return {
        name: {column: values[columns["keys"].argsort()] for column, values in columns.items()}
        for name, columns in tables.items()
    }


@pytest.mark.if_changed
@pytest.mark.parametrize(
    "places",
    [
        ("host", "device", "cached", "disk", "cached_on_disk", "host"),
        pytest.param(EVERY_PAIR, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_and_deltas_move_between_storages(tmp_path, places):
    expected = parts(policy="all")
    trained(expected, "reference", [batch(step) for step in range(4 * len(places))])
    loaded = None
    for number, place in enumerate(places):
        model, tables, optimizer = made = parts(place, place, place, "all")
        dense = DenseModel(model, optimizer)
        if loaded is not None:
            tables.load_state(loaded.tables)
            dense.load_state_dict(unflatten(loaded.meta, loaded.dense))
        folder = tmp_path / place / str(number)
        tables.track_changes()
        meta, tensors = flatten(dense.state_dict(), "dense")
        saved = checkpoint.save(folder, 0, tensors, tables.state(), meta)
        for step in (2, 4):
            first = 4 * number + step - 2
            trained(made, "nestpipe", [batch(first), batch(first + 1)], micro_batches=2, skip_fetch=True)
            changed, erased = tables.take_changes()
            meta, tensors = flatten(dense.state_dict(), "dense")
            saved = checkpoint.save(folder, step, tensors, changed, meta, base=saved, erased=erased)
        loaded = checkpoint.load(folder, like=tables.state(), like_dense=tensors)
        there, here = by_key(loaded.tables), by_key(tables.state())
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name][c], here[name][c]) for name in here for c in here[name])
    assert same(state(made), state(expected))


@pytest.mark.parametrize("skip_fetch", slow_except([True], [False, True]))
def test_tables_can_be_emptied_and_loaded_after_a_step_that_failed_half_way(skip_fetch):
    window = {"micro_batches": 2, "skip_fetch": skip_fetch}
    places = "device", "disk", "one_row_cached"
    saved, made = parts(*places), parts(*places)
    trained(saved, "nestpipe", [batch(step) for step in range(3)], **window)
    forward = made[0].forward

    def failing(part, rows, seed):
        if part.step == 5:
            raise FloatingPointError("loss is not finite")
        return forward(part, rows, seed)

    made[0].forward = failing
    with pytest.raises(StageFailedError, match="loss is not finite"):
        trained(made, "nestpipe", [batch(step) for step in range(9)], **window)
    made[0].forward = forward
    for group in made[1].groups:
        assert group.table.erase(group.table.export()[0]).all() and len(group.table) == 0
    made[1].load_state(saved[1].state())
    DenseModel(made[0], made[2]).load_state_dict(DenseModel(saved[0], saved[2]).state_dict())
    for one in (saved, made):
        trained(one, "nestpipe", [batch(step) for step in range(3, 9)], **window)
    assert same(state(made), state(saved))


WRONG = [
    (lambda: Placement("cuda"), "storage must be one of auto, host, device, cached, disk, got 'cuda'"),
    (lambda: Placement("cached", cache_rows=0), "cache_rows"),
    (lambda: Placement("cached", cache_rows=2**29 + 1), "cache_rows"),
    (lambda: Placement("disk"), "tables on disk need a directory, .* got storage='disk' with path=''"),
    (lambda: Placement(path="here"), "others take none: got storage='auto' with path='here'"),
    (
        lambda: Placement("host", memory="1MiB"),
        "'1MiB' .disk_memory. is of tables on disk, .* storage='host'",
    ),
    (
        lambda: Placement("cached", path="here", index_memory="1MiB"),
        "'1MiB' .disk_index_memory. is of tables on disk, .* storage='cached'",
    ),
    (lambda: Placement("disk", path="here", index_memory="some"), "disk_index_memory. must be bytes"),
    (lambda: Placement("disk", path="here", memory="much"), "disk_memory. must be bytes, .* got 'much'"),
    (
        lambda: DynamicTable(3, placement=Placement("disk", path=gettempdir(), memory="21")),
        "memory=21 bytes of a table on disk hold no row of 22 bytes",
    ),
    (lambda: DynamicTable(3, placement=Placement("device", "nowhere")), "device 'nowhere'"),
    (lambda: DynamicTable(3, placement=Placement("device", "")), "device ''"),
    (lambda: DynamicTable(3, placement=Placement(device="nowhere")), "device 'nowhere'"),
    (lambda: DynamicTable(3, placement=Placement("cached", "meta")), "device 'meta' is not usable"),
]


def test_tables_are_cached_beside_an_accelerator_unless_said_otherwise():
    assert Placement().chosen() == Placement("host") and Placement(device="cpu:0").chosen().storage == "host"
    for device in ("cuda", "cuda:1", "npu:0"):
        assert Placement(device=device, cache_rows=9).chosen() == Placement("cached", device, 9)
        for storage in ("host", "device", "cached"):
            assert Placement(storage, device).chosen() == Placement(storage, device)


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_place_that_does_not_exist_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device to use")
@pytest.mark.parametrize("storage", ["device", "cached"])
def test_a_device_that_torch_does_not_find_is_named(storage):
    with pytest.raises(ValueError, match=r"device 'cuda:1' is not usable: torch .* finds no accelerator"):
        DynamicTable(3, placement=Placement(storage, "cuda:1"))


def test_keys_and_values_on_another_device_are_refused():
    table = DynamicTable(3, placement=Placement("device"))
    keys, values = torch.arange(2), torch.zeros(2, 3)
    handles = table.lookup(keys, 0).handles
    calls = [
        ("keys", lambda: table.lookup(keys.to("meta"), 1)),
        ("keys", lambda: table.find(keys.to("meta"))),
        ("keys", lambda: table.erase(keys.to("meta"))),
        ("handles", lambda: table.gather(handles.to("meta"), keys)),
        ("keys", lambda: table.gather(handles, keys.to("meta"))),
        ("handles", lambda: table.update(handles.to("meta"), values)),
        ("values", lambda: table.update(handles, values.to("meta"))),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"the table is on cpu, got {name} on meta"):
            call()


def test_a_trainer_names_the_table_that_is_on_another_device(monkeypatch):
    made = parts("host", "device", "host")
    monkeypatch.setattr(made[1].groups[0].table, "device", torch.device("cuda:1"))
    table = ", ".join(made[1].groups[0].layout.names)
    assert table == "genre"
    with pytest.raises(ValueError, match=r"table genre is on cuda:1, and the trainer works on cpu: .*'cpu'"):
        Trainer(*made, Communicators.local(), "nestpipe")


def test_tables_in_two_places_are_planned_alike_on_one_rank():
    """A table on a device counts its keys there, which one in host memory beside it has to join."""
    given = [batch(step, "mixed") for step in range(3)]
    expected = parts()
    losses = trained(expected, "reference", given)
    made = parts("cached", "host", "device")
    assert same(trained(made, "sequential", given, micro_batches=3), losses)
    assert same(state(made), state(expected))
